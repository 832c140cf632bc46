"""Says how much a group matters: by its difficulty, the spread of its scores, or its advantages (prioritised experience
replay, arXiv:1511.05952)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from rftstream.config.ranges import AboveZero, NotNegative
from rftstream.data.operators.base import KEEP, ExperienceDecision, Prioritise, ScoredGroup, Seed
from rftstream.data.operators.facts import Facts


class Priority:
    """Gives each group a priority. `replay` chooses by it which groups are trained on once more, each with a chance
    that grows with its priority. With `feeder.on_stale = "drop"`, batches take ready groups with a higher priority
    first, but for those that the next batch is the last one to take.

    `difficulty`: highest where the mean score is `target` and lower the further it is away, as a normal distribution of
    the width `width` (ExGRPO, arXiv:2510.02245, replays groups of medium difficulty). `spread`: the standard deviation
    of the scores. `advantage`: their mean distance from the group's mean."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings of `op = "priority"`."""

        by: Literal["difficulty", "spread", "advantage"] = "difficulty"
        """What makes a group matter."""
        on: str = ""
        """Named part of the verdict that is the score; default: the reward, before it is shaped. Rollouts that lack the
        part are left out; a group without any stays as it is."""
        target: float = 0.5
        """Of `difficulty`: the mean score that matters most."""
        width: AboveZero = 0.2
        """Of `difficulty`: how far from `target` a mean score still matters."""
        floor: NotNegative = 0.01
        """It is added to every priority, so that no group is left out for good unless this is 0."""
        power: NotNegative = 1.0
        """The priority is the sum to this power: 0 makes all equal, more than 1 prefers high ones all the more."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def decide(self, group: ScoredGroup, facts: Facts, seed: Seed) -> ExperienceDecision:
        """Return the group's priority."""
        config = self._config
        scores = [score for one in group.rollouts if (score := one.score(config.on)) is not None]
        if not scores:
            return KEEP
        mean = sum(scores) / len(scores)
        if config.by == "difficulty":
            value = math.exp(-(((mean - config.target) / config.width) ** 2) / 2)
        elif config.by == "spread":
            value = math.sqrt(sum((score - mean) ** 2 for score in scores) / len(scores))
        else:
            value = sum(abs(score - mean) for score in scores) / len(scores)
        return Prioritise((config.floor + value) ** config.power, config.by)
