"""Gives each problem as many rollouts as are likely to teach something: few where all attempts end the same, more where
some succeed and some fail.

The idea and the value of a problem are those of Knapsack RL (arXiv:2509.25849). That paper solves a knapsack over the
problems of a batch. Here each problem is decided by itself, so that a decision depends on its own facts alone: a price
for a rollout takes the place of the knapsack's limit, and a group grows for as long as one more rollout is worth it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from rftstream.config.ranges import AboveZero, Positive
from rftstream.data.operators.answers import MAX_GROUP_SIZE
from rftstream.data.operators.base import KEEP, Change, Draw, Seed, TaskDecision
from rftstream.data.operators.facts import Facts
from rftstream.errors import ConfigError


class Budget:
    """Changes the group size of a problem by how often the policy solves it."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings of `op = "budget"`."""

        min_size: Annotated[int, Meta(ge=2)] = 2
        """Rollouts of a problem that teaches nothing."""
        max_size: Positive = 32
        """Most rollouts of a problem."""
        first_size: Positive | None = None
        """Rollouts of a problem of which nothing is known; default: feeder.group_size."""
        price: AboveZero = 0.001
        """What a rollout costs, in the unit of `rollout_value`. With the default a problem that is solved half of the
        time gets 7 rollouts, one that is solved one time in ten gets 20. A higher price makes all groups smaller."""
        on: str = ""
        """Named part of the verdict whose mean is the solve rate; default: the reward, before operators shape it. It
        should lie between 0 and 1; what is outside counts as 0 or 1."""
        last_group: bool = False
        """Only the newest group of a problem counts, instead of all of them."""

    def __init__(self, config: Config) -> None:
        self._config = config
        if not config.min_size <= config.max_size <= MAX_GROUP_SIZE:
            raise ConfigError(
                f"max_size: got {config.max_size}, expected at least min_size = {config.min_size} and at most "
                f"{MAX_GROUP_SIZE}"
            )

    def decide(self, draw: Draw, facts: Facts, seed: Seed) -> TaskDecision:
        """Return Change with the group size."""
        config, record = self._config, facts.problem(draw.taskset, draw.index)
        mean = record.recent(config.on) if config.last_group else record.mean(config.on)
        if mean is None:
            return KEEP if config.first_size is None else Change(group_size=config.first_size)
        num_scored = record.num_scored / record.num_groups if config.last_group else record.num_scored
        rate = (min(max(mean, 0.0), 1.0) * num_scored + 1.0) / (num_scored + 2.0)
        size = _size(rate, config.price, config.min_size, config.max_size)
        return KEEP if size == draw.group_size else Change(group_size=size)


def rollout_value(rate: float, size: int) -> float:
    """Return what the rollout that makes a group of `size` adds to the expected value of the group.

        value(N) = p (1 - p)^2 * (1 - p^N - (1 - p)^N),    this: value(N) - value(N - 1)

    The first factor is the gain of the policy's success from one update, the second the chance that not all N rollouts
    end the same (Knapsack RL, arXiv:2509.25849). It falls with N. `rate`: p, in (0, 1). `size`: N, at least 2."""
    fails = 1.0 - rate
    return rate * fails**2 * (rate ** (size - 1) * fails + fails ** (size - 1) * rate)


def _size(rate: float, price: float, low: int, high: int) -> int:
    """Return the greatest size within the bounds whose last rollout is worth its price."""
    while low < high:  # the value falls with the size
        middle = math.ceil((low + high) / 2)
        if rollout_value(rate, middle) >= price:
            low = middle
        else:
            high = middle - 1
    return low
