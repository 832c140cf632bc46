"""Finds rollouts whose reward or length is far from that of the others: a scorer that failed, or an attempt that went
astray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from rftstream.config.ranges import AboveZero, Positive
from rftstream.data.operators.base import KEEP, ExperienceDecision, Mask, Reject, ScoredGroup, ScoredRollout, Seed
from rftstream.data.operators.facts import Facts
from rftstream.data.operators.truncated import all_tokens
from rftstream.errors import ConfigError

_SCALE = 0.6745
"""Median absolute deviation of the normal distribution with standard deviation 1."""


class Outliers:
    """Rejects or masks rollouts by the modified z-score, 0.6745 (x - median) / MAD (Iglewicz and Hoaglin, How to Detect
    and Handle Outliers, 1993). MAD is the median of the distances to the median.

    Where more than half of the values are the same, MAD is 0 and nothing is an outlier. So a rare success among
    rewards of 0 and 1 is kept."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings of `op = "outliers"`."""

        of: Literal["reward", "length"] = "length"
        """What is looked at: the reward, before operators shape it, or the number of sampled tokens."""
        on: str = ""
        """Named part of the verdict to look at in the place of the reward. Only within groups."""
        within: Literal["group", "taskset"] = "group"
        """Whom a rollout is compared with: its siblings, or the rollouts in the newest 64 groups of its taskset that
        have an outcome."""
        max_score: AboveZero = 3.5
        """Rollouts with a greater modified z-score are left out."""
        side: Literal["both", "high", "low"] = "both"
        """Leave out what is far above the median, far below, or both."""
        min_values: Positive = 5
        """With fewer values to compare with, nothing is an outlier."""
        action: Literal["reject", "mask"] = "reject"
        """Leave them out of the group, or keep them for the comparison of rewards and train on none of their tokens."""

    def __init__(self, config: Config) -> None:
        self._config = config
        if config.on and (config.of != "reward" or config.within != "group"):
            raise ConfigError(
                f'on: got {config.on!r} with of = "{config.of}" and within = "{config.within}", expected '
                'of = "reward" and within = "group"; outcomes do not say parts of single rollouts'
            )

    def decide(self, group: ScoredGroup, facts: Facts, seed: Seed) -> ExperienceDecision:
        """Return what becomes of the outliers, if there are some. A rollout that lacks the part is none."""
        config = self._config
        values = {one.sibling: value for one in group.rollouts if (value := self._value(one)) is not None}
        if config.within == "group":
            others: Sequence[float] = list(values.values())
        else:
            past = facts.taskset(group.taskset)
            others = past.recent_rewards() if config.of == "reward" else past.recent_lengths()
        if len(others) < config.min_values:
            return KEEP
        middle = median(others)
        deviation = median(abs(value - middle) for value in others)
        found = {number for number, value in values.items() if self._is_far(value - middle, deviation)}
        if not found:
            return KEEP
        reason = f"{config.on or config.of} far from the others"
        if config.action == "mask":
            return Mask({one.sibling: all_tokens(one) for one in group.rollouts if one.sibling in found}, reason)
        return Reject(reason, tuple(sorted(found)))

    def _value(self, scored: ScoredRollout) -> float | None:
        return float(scored.num_tokens) if self._config.of == "length" else scored.score(self._config.on)

    def _is_far(self, distance: float, deviation: float) -> bool:
        if (self._config.side == "high" and distance < 0) or (self._config.side == "low" and distance > 0):
            return False
        return deviation > 0 and _SCALE * abs(distance) / deviation > self._config.max_score
