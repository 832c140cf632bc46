"""Deals with rollouts that a limit cut off: their reward says little about what they would have become."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rftstream.config.ranges import Fraction
from rftstream.contracts.rollouts import Rollout
from rftstream.data.operators.base import (
    KEEP,
    ExperienceDecision,
    Mask,
    Reject,
    ScoredGroup,
    ScoredRollout,
    Seed,
    TokenSpan,
)
from rftstream.data.operators.facts import Facts

_REASON = "a limit ended it"


class Truncated:
    """Rejects or masks truncated rollouts (overlong filtering, as in DAPO, arXiv:2503.14476, section 3.4)."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings of `op = "truncated"`."""

        action: Literal["reject", "mask"] = "reject"
        """Leave them out of the group, or keep them for the comparison of rewards and train on none of their tokens."""
        max_share: Fraction = 1.0
        """A group in which a greater share is truncated is rejected as a whole."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def decide(self, group: ScoredGroup, facts: Facts, seed: Seed) -> ExperienceDecision:
        """Return what becomes of the truncated siblings, if there are some."""
        cut = [one for one in group.rollouts if one.truncated]
        if not cut:
            return KEEP
        if len(cut) > self._config.max_share * len(group.rollouts):
            return Reject("too many were cut off")
        if self._config.action == "mask":
            return Mask({one.sibling: all_tokens(one) for one in cut}, _REASON)
        return Reject(_REASON, tuple(one.sibling for one in cut))


def all_tokens(scored: ScoredRollout) -> tuple[TokenSpan, ...]:
    """Return the spans that cover all tokens of a rollout."""
    rollout = scored.verified.rollout
    assert isinstance(rollout, Rollout), "it was sampled"
    return tuple(TokenSpan(number, 0, segment.token_ids.shape[0]) for number, segment in enumerate(rollout.segments))
