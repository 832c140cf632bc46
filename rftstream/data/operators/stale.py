"""Deals with what was sampled by weights that are too old by now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rftstream.config.ranges import Count
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
from rftstream.data.operators.sampled import rollout_of

_REASON = "too old"


class Stale:
    """Rejects rollouts with tokens that are too old, or masks these tokens. The age of a token is the trainer's version
    at which the group would be trained minus the version that sampled it.

    `feeder.max_staleness` is about groups: one sibling that is too old costs all of them. Rejected here, it costs
    itself alone."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings of `op = "stale"`."""

        max_age: Count = 1
        """Tokens may be so many versions old."""
        action: Literal["reject", "mask"] = "reject"
        """Leave the rollouts out of the group, or keep them and do not train on their old tokens. Masked or not,
        `feeder.max_staleness` counts every token, so masking needs a smaller number here than there."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def decide(self, group: ScoredGroup, facts: Facts, seed: Seed) -> ExperienceDecision:
        """Return what becomes of old rollouts or tokens, if there are some."""
        if group.version is None:
            return KEEP
        oldest = group.version - self._config.max_age
        old = [one for one in group.rollouts if one.oldest_version is not None and one.oldest_version < oldest]
        if not old:
            return KEEP
        if self._config.action == "mask":
            return Mask({one.sibling: _tokens_before(one, oldest) for one in old}, _REASON)
        return Reject(_REASON, tuple(one.sibling for one in old))


def _tokens_before(scored: ScoredRollout, version: int) -> tuple[TokenSpan, ...]:
    """Return the spans of tokens that older versions sampled."""
    return tuple(
        TokenSpan(number, span.start, span.start + span.count)
        for number, segment in enumerate(rollout_of(scored).segments)
        for span in segment.versions
        if span.version < version
    )
