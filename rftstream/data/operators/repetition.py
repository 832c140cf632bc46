"""Finds rollouts that say the same again and again, though their answer may be right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rftstream.config.ranges import Fraction, Positive
from rftstream.data.operators.base import KEEP, ExperienceDecision, Mask, Reject, ScoredGroup, ScoredRollout, Seed
from rftstream.data.operators.facts import Facts
from rftstream.data.operators.sampled import hash_ngrams, sampled_tokens
from rftstream.data.operators.truncated import all_tokens

_REASON = "too repetitive"


class Repetition:
    """Rejects or masks rollouts of which too many n-grams of sampled tokens were there before in the rollout."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings of `op = "repetition"`."""

        ngram: Positive = 8
        """Tokens that are compared at once."""
        max_share: Fraction = 0.3
        """Rollouts with a greater share of repeated n-grams are left out."""
        action: Literal["reject", "mask"] = "reject"
        """Leave them out of the group, or keep them for the comparison of rewards and train on none of their tokens."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def decide(self, group: ScoredGroup, facts: Facts, seed: Seed) -> ExperienceDecision:
        """Return what becomes of the repetitive siblings, if there are some."""
        config = self._config
        found = [one for one in group.rollouts if _repeated_share(one, config.ngram) > config.max_share]
        if not found:
            return KEEP
        if config.action == "mask":
            return Mask({one.sibling: all_tokens(one) for one in found}, _REASON)
        return Reject(_REASON, tuple(one.sibling for one in found))


def _repeated_share(scored: ScoredRollout, size: int) -> float:
    """Return the share of n-grams of sampled tokens that occurred before; 0 for rollouts of fewer than 2 n-grams."""
    if scored.num_tokens <= size:
        return 0.0
    ngrams = hash_ngrams(sampled_tokens(scored), size)
    return 1.0 - len(set(ngrams)) / len(ngrams) if len(ngrams) > 1 else 0.0
