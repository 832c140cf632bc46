"""Rejects groups whose rewards are all the same: the policy learns nothing from comparing them (dynamic sampling of
DAPO, arXiv:2503.14476, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass

from rftstream.config.ranges import NotNegative
from rftstream.data.operators.base import KEEP, ExperienceDecision, Reject, ScoredGroup, Seed
from rftstream.data.operators.facts import Facts


class ZeroVariance:
    """Rejects groups without a spread. `buffer.zero_variance = "replace"` is this operator before all others, with its
    defaults."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings of `op = "zero_variance"`."""

        on: str = ""
        """Named part of the verdict that has to differ; default: the reward, before operators shape it. Name the part
        that says whether an answer is right, where a reward is made of several: a term for length or style differs
        nearly always, and lets groups through of which all failed."""
        min_spread: NotNegative = 0.0
        """The greatest value has to be more than this above the smallest one."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def decide(self, group: ScoredGroup, facts: Facts, seed: Seed) -> ExperienceDecision:
        """Return Reject for a group without a spread. A rollout that lacks the part counts as different from those that
        have it."""
        scores = [one.score(self._config.on) for one in group.rollouts]
        found = [score for score in scores if score is not None]
        if 0 < len(found) < len(scores) or (found and max(found) - min(found) > self._config.min_spread):
            return KEEP
        return Reject(f"no spread of {self._config.on}" if self._config.on else "")
