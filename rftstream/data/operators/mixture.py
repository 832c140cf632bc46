"""Changes the mixture of the tasksets over time: by a schedule, by how much they teach, or both.

The feeder draws by the `weight` of each taskset. This operator skips some of what it draws, so that the groups come in
other shares. How far the schedule has come is counted in groups with an outcome, never in seconds.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from rftstream.config.ranges import Count, NotNegative
from rftstream.contracts.ids import unit_interval
from rftstream.data.operators.base import KEEP, Draw, RunProblems, Seed, Skip, TaskDecision
from rftstream.data.operators.facts import Facts
from rftstream.errors import ConfigError


class Mixture:
    """Skips problems of tasksets whose weight is low now. It belongs into `[[pipeline]]`, for all tasksets.

    A problem that is skipped comes again in the next pass."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings of `op = "mixture"`."""

        weights: dict[str, tuple[NotNegative, ...]] = field(default_factory=dict)
        """Taskset -> its weight at each point of `groups`, which its `weight` is multiplied by, for example
        `{ easy = [1, 0.1], hard = [0.1, 1] }`. Tasksets that are not named have 1."""
        groups: tuple[Count, ...] = (0,)
        """Groups with an outcome at which the weights hold, rising; between two points they change evenly."""
        adaptive: bool = False
        """Weights are also multiplied by 4 p (1 - p), where p is how often the newest groups of the taskset were
        solved: most where half of all attempts succeed."""
        floor: Annotated[float, Meta(gt=0, le=1)] = 0.1
        """The least that `adaptive` multiplies by, so that no taskset is lost from sight."""
        on: str = ""
        """Named part of the verdict whose mean is p; default: the reward, before operators shape it."""

    def __init__(self, config: Config) -> None:
        self._config = config
        if not config.weights and not config.adaptive:
            raise ConfigError("weights: found none, expected weights or adaptive = true")
        if not config.groups or any(b <= a for a, b in zip(config.groups, config.groups[1:], strict=False)):
            raise ConfigError(f"groups: got {list(config.groups)}, expected at least one number, rising")
        for name, weights in config.weights.items():
            if len(weights) != len(config.groups):
                raise ConfigError(
                    f"weights.{name}: got {len(weights)} numbers, expected {len(config.groups)}, as many as in groups"
                )
        for number in range(len(config.groups)):
            if config.weights and not any(weights[number] for weights in config.weights.values()):
                raise ConfigError(f"weights: all are 0 at {config.groups[number]} groups, expected one above it")

        self._has_others = True
        """Tasksets that are not named."""

    def prepare(self, problems: RunProblems) -> None:
        """Learn which tasksets there are. ConfigError for weights of one that is not there."""
        if unknown := sorted(set(self._config.weights) - problems.asked):
            raise ConfigError(
                f"weights: unknown taskset {unknown[0]!r}; known here: {', '.join(sorted(problems.asked))}"
            )
        self._has_others = not problems.asked <= set(self._config.weights)

    def decide(self, draw: Draw, facts: Facts, seed: Seed) -> TaskDecision:
        """Return Skip with the chance that the weights leave."""
        chance = 1.0
        if self._config.weights:
            weights = {name: self._scheduled(name, facts.num_groups) for name in self._config.weights}
            largest = max([*weights.values(), 1.0] if self._has_others else weights.values())
            chance = weights.get(draw.taskset, 1.0) / largest
        if self._config.adaptive:
            solved = facts.taskset(draw.taskset).recent(self._config.on)
            if solved is not None:
                solved = min(max(solved, 0.0), 1.0)
                chance *= max(self._config.floor, 4.0 * solved * (1.0 - solved))
        return KEEP if unit_interval(seed) < chance else Skip("low weight")

    def _scheduled(self, name: str, num_groups: int) -> float:
        """Return the weight of a taskset by now."""
        points, weights = self._config.groups, self._config.weights[name]
        after = bisect_right(points, num_groups)
        if after == 0:
            return weights[0]
        if after == len(points):
            return weights[-1]
        share = (num_groups - points[after - 1]) / (points[after] - points[after - 1])
        return weights[after - 1] + share * (weights[after] - weights[after - 1])
