"""Operators that choose problems, and their numbers of rollouts, from the outcomes of the run so far."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from rftstream.config.ranges import AboveZero, Count, Fraction, NotNegative, Positive
from rftstream.contracts.ids import split_group_id, unit_interval
from rftstream.contracts.outcomes import GroupOutcome
from rftstream.contracts.tasks import Problem
from rftstream.data.operators.answers import MAX_GROUP_SIZE
from rftstream.data.operators.base import KEEP, Change, Draw, Problems, RunProblems, Seed, Skip, TaskDecision
from rftstream.data.operators.facts import Facts
from rftstream.errors import ConfigError


class SolveRate:
    """Skips problems that the policy solves nearly always or nearly never: they teach little (GRESO, arXiv:2506.02177).

    The solve rate is the mean reward, or mean named part, in the outcomes of the problem's earlier groups. A share of
    the problems that would be skipped is explored anyway, since a learning policy's solve rates change."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings of `op = "solve_rate"`."""

        keep: tuple[float, float] = (0.05, 0.95)
        """Problems with a mean below the first or above the second number are skipped."""
        explore: Fraction = 0.1
        """Share of these problems that is admitted anyway."""
        on: str = ""
        """Named part of the verdict whose mean is the solve rate; default: the reward, before operators shape it."""
        min_scored: Positive = 1
        """Scored rollouts that a problem needs before it may be skipped."""
        last_group: bool = False
        """Use only the newest group of a problem, instead of all."""

    def __init__(self, config: Config) -> None:
        self._config = config
        if config.keep[0] > config.keep[1]:
            raise ConfigError(f"keep: got {list(config.keep)}, expected the smaller number first")

    def decide(self, draw: Draw, facts: Facts, seed: Seed) -> TaskDecision:
        """Return Skip for a problem that is too easy or too hard, except for the explored share."""
        config, record = self._config, facts.problem(draw.taskset, draw.index)
        if record.num_scored < config.min_scored:
            return KEEP
        rate = record.recent(config.on) if config.last_group else record.mean(config.on)
        if rate is None or config.keep[0] <= rate <= config.keep[1]:
            return KEEP
        if unit_interval(seed) < config.explore:
            return KEEP
        return Skip("too hard" if rate < config.keep[0] else "too easy")


class Budget:
    """Gives each problem the number of rollouts that are likely to teach something: few if all attempts end the same,
    more if some succeed and some fail.

    The idea and the value of a problem are from Knapsack RL (arXiv:2509.25849), which solves a knapsack over the
    problems of a batch. Here each problem is decided separately, so that a decision depends only on the problem's own
    facts: a price per rollout replaces the knapsack's limit, and a group grows while one more rollout is worth its
    price."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings of `op = "budget"`."""

        min_size: Annotated[int, Meta(ge=2)] = 2
        """Number of rollouts of a problem that teaches nothing."""
        max_size: Positive = 32
        """Largest number of rollouts of a problem."""
        first_size: Positive | None = None
        """Number of rollouts of a problem without outcomes; default: feeder.group_size."""
        price: AboveZero = 0.001
        """Price of a rollout, in the unit of `rollout_value`. With the default, a problem that is solved half of the
        time gets 7 rollouts, and a problem that is solved one time in ten gets 20. A higher price makes all groups
        smaller."""
        on: str = ""
        """Named part of the verdict whose mean is the solve rate; default: the reward, before operators shape it. It
        should be between 0 and 1; values outside count as 0 or 1."""
        last_group: bool = False
        """Use only the newest group of a problem, instead of all."""

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
    """Return the increase of a group's expected value by its last rollout, which makes its size `size`.

        value(N) = p (1 - p)^2 * (1 - p^N - (1 - p)^N),    this: value(N) - value(N - 1)

    The first factor is the gain in success from one update, the second the probability that not all N rollouts end the
    same (Knapsack RL, arXiv:2509.25849). The increase falls with N. `rate`: p, in (0, 1). `size`: N, at least 2."""
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


class Mixture:
    """Changes the mixture of the tasksets over time: by a schedule, by their usefulness, or both.

    The feeder draws by the `weight` of each taskset. This operator skips some of the drawn problems, which changes the
    shares. The schedule's progress is counted in groups with an outcome, never in seconds. Use the operator in
    `[[pipeline]]`, for all tasksets. A skipped problem comes again in the next pass."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings of `op = "mixture"`."""

        weights: dict[str, tuple[NotNegative, ...]] = field(default_factory=dict)
        """Taskset -> factors of its `weight`, one for each point of `groups`, for example `{ easy = [1, 0.1], hard =
        [0.1, 1] }`. Tasksets that are not named have the factor 1."""
        groups: tuple[Count, ...] = (0,)
        """Numbers of groups with an outcome at which the factors apply, ascending. Between two points the factors
        change linearly."""
        adaptive: bool = False
        """Also multiply weights by 4 p (1 - p), where p is the solve rate in the taskset's newest groups. The factor is
        largest if half of all attempts succeed."""
        floor: Annotated[float, Meta(gt=0, le=1)] = 0.1
        """Smallest factor of `adaptive`, so that no taskset disappears."""
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
        """Whether there are tasksets that are not named."""

    def prepare(self, problems: RunProblems) -> None:
        """Record the existing tasksets. ConfigError for weights of an unknown taskset."""
        if unknown := sorted(set(self._config.weights) - problems.asked):
            raise ConfigError(
                f"weights: unknown taskset {unknown[0]!r}; known here: {', '.join(sorted(problems.asked))}"
            )
        self._has_others = not problems.asked <= set(self._config.weights)

    def decide(self, draw: Draw, facts: Facts, seed: Seed) -> TaskDecision:
        """Return Skip with the probability that the weights give."""
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
        """Return the current weight of a taskset."""
        points, weights = self._config.groups, self._config.weights[name]
        after = bisect_right(points, num_groups)
        if after == 0:
            return weights[0]
        if after == len(points):
            return weights[-1]
        share = (num_groups - points[after - 1]) / (points[after] - points[after - 1])
        return weights[after - 1] + share * (weights[after] - weights[after - 1])


Value = str | int | float


class Curriculum:
    """Admits problems stage by stage, the easy ones first (curriculum learning, Bengio et al., 2009).

    A column of the taskset assigns problems to stages. Problems of later stages are skipped, and so are most problems
    of earlier stages. A stage ends when the policy has done well enough in its newest groups, or after a number of
    groups. Each taskset has its own stage. The outcomes alone determine it, so that a restart finds the same stage.

    A skipped problem comes again in the next pass: leave the taskset's `passes` unset, or set enough."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings of `op = "curriculum"`."""

        column: str = "level"
        """Column of the taskset with the difficulty of a problem; a dotted path leads into tables."""
        stages: Annotated[tuple[tuple[str | int | float, ...], ...], Meta(min_length=2)]
        """Values of the column in each stage, for example `[[1, 2], [3], ["4a", "4b"]]`."""
        advance: Literal["success", "groups"] = "success"
        """Condition that ends a stage: its newest groups are good enough, or a number of groups regardless of their
        rewards."""
        success: float = 0.8
        """The mean reward, or mean named part, that is good enough."""
        groups: Positive = 64
        """Number of the stage's newest groups that count for `success`, or of all its groups for `groups`. The stage
        does not end with fewer."""
        on: str = ""
        """Named part of the verdict that counts; default: the reward, before operators shape it."""
        rehearse: Fraction = 0.1
        """Share of the problems of earlier stages that is still admitted."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._stage_of_value: dict[Value, int] = {}
        for number, values in enumerate(config.stages):
            if not values:
                raise ConfigError(f"stages.{number}: found no values, expected at least one")
            for value in values:
                if value in self._stage_of_value:
                    raise ConfigError(f"stages: {value!r} is in two stages")
                self._stage_of_value[value] = number
        self._stages: dict[str, list[int]] = {}
        """Taskset -> stage of each problem."""

    def prepare(self, problems: RunProblems) -> None:
        """Read the stages of all problems. ConfigError if a problem has no stage, or a stage has no problems."""
        self._stages = {
            taskset.name: self._read(taskset) for taskset in problems.tasksets if taskset.name in problems.asked
        }

    def fold(self) -> Progress:
        """Return the fold that tracks the stages of the tasksets."""
        return Progress(self._config, self._stages)

    def decide(self, draw: Draw, facts: Facts, seed: Seed) -> TaskDecision:
        """Return Skip for a problem of another stage, except for the rehearsed share."""
        current = facts.fold(self).stage(draw.taskset)
        known = self._stages.get(draw.taskset, [])
        stage = known[draw.index] if draw.index < len(known) else self._stage(draw.problem, f"problem {draw.index}")
        if stage == current or (stage < current and unit_interval(seed) < self._config.rehearse):
            return KEEP
        return Skip("of a later stage" if stage > current else "of an earlier stage")

    def _read(self, problems: Problems) -> list[int]:
        where = f"problem %d of the taskset {problems.name}"
        stages = [self._stage(problem, where % index) for index, problem in enumerate(problems)]
        for number in range(len(self._config.stages)):
            if number not in stages:
                raise ConfigError(
                    f"stages.{number}: the taskset {problems.name} has no problem with {self._config.column} = "
                    f"{self._config.stages[number]}, so the stage would never end; leave it "
                    "out, or name the operator in [[tasksets.NAME.pipeline]] of those that have it"
                )
        return stages

    def _stage(self, problem: Problem, where: str) -> int:
        value: Any = problem.info
        for name in self._config.column.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        stage = self._stage_of_value.get(value) if isinstance(value, Value) else None
        if stage is None:
            lacks = f"; it has the columns {', '.join(problem.info) or 'none'}" if value is None else ""
            raise ConfigError(
                f"column: {where} has {self._config.column} = {value!r}, expected a value of `stages`{lacks}"
            )
        return stage


class Progress:
    """The current stage of each taskset: a fold over outcomes. `Curriculum.fold` makes it, and the facts call
    `absorb`."""

    def __init__(self, config: Curriculum.Config, stages: Mapping[str, list[int]]) -> None:
        self._config = config
        self._stages = stages
        self._current = dict.fromkeys(stages, 0)
        self._newest: dict[str, deque[float]] = {name: deque(maxlen=config.groups) for name in stages}
        """Scores of groups of the current stage."""

    def stage(self, taskset: str) -> int:
        """Return the number of the current stage, from 0."""
        return self._current.get(taskset, 0)

    def absorb(self, outcome: GroupOutcome) -> None:
        """Process an outcome. It counts if its problem is of the current stage and it has a score."""
        place = split_group_id(outcome.group_id)
        if place is None or outcome.taskset not in self._stages or place[2] >= len(self._stages[outcome.taskset]):
            return
        name, current = outcome.taskset, self._current[outcome.taskset]
        if self._stages[name][place[2]] != current or current == len(self._config.stages) - 1:
            return
        score = _score(outcome, self._config.on)
        if score is None:
            return
        newest = self._newest[name]
        newest.append(score)
        if len(newest) < self._config.groups:
            return
        if self._config.advance == "groups" or sum(newest) / len(newest) >= self._config.success:
            self._current[name] += 1
            newest.clear()


def _score(outcome: GroupOutcome, on: str) -> float | None:
    if on:
        return outcome.parts.get(on)
    rewards = [rollout.reward for rollout in outcome.rollouts if rollout.reward is not None]
    return sum(rewards) / len(rewards) if rewards else None
