"""Admits problems stage by stage, the easy ones first (curriculum learning, Bengio et al., 2009).

A column of the taskset says to which stage a problem belongs. A stage ends when the policy has done well enough in its
newest groups, or after a number of groups. Which stage it is follows from the outcomes alone, so that a restart finds
the same one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from rftstream.config.ranges import Fraction, Positive
from rftstream.contracts.ids import split_group_id, unit_interval
from rftstream.contracts.outcomes import GroupOutcome
from rftstream.contracts.tasks import Problem
from rftstream.data.operators.base import KEEP, Draw, Problems, RunProblems, Seed, Skip, TaskDecision
from rftstream.data.operators.facts import Facts
from rftstream.errors import ConfigError

Value = str | int | float


class Curriculum:
    """Skips problems of later stages, and most of those of earlier ones. Each taskset is at a stage of its own.

    A problem that is skipped comes again in the next pass: leave `passes` of the taskset open, or give it enough."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings of `op = "curriculum"`."""

        column: str = "level"
        """Column of the taskset that says how hard a problem is; a dotted path leads into tables."""
        stages: Annotated[tuple[tuple[str | int | float, ...], ...], Meta(min_length=2)]
        """Values of the column in each stage, for example `[[1, 2], [3], ["4a", "4b"]]`."""
        advance: Literal["success", "groups"] = "success"
        """A stage ends when its newest groups are good enough, or after some groups whatever their rewards."""
        success: float = 0.8
        """The mean reward, or mean named part, that is good enough."""
        groups: Positive = 64
        """Newest groups of the stage that count, or all of the stage; there have to be as many."""
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
        """Read the stages of all problems. ConfigError if one has none, or a stage has no problems."""
        self._stages = {one.name: self._read(one) for one in problems.tasksets if one.name in problems.asked}

    def fold(self) -> Progress:
        """Return what follows the stages of the tasksets."""
        return Progress(self._config, self._stages)

    def decide(self, draw: Draw, facts: Facts, seed: Seed) -> TaskDecision:
        """Return Skip for a problem of another stage, but for the share that is rehearsed."""
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
                    f"{self._config.stages[number]}, so the stage would never end; leave it out"
                )
        return stages

    def _stage(self, problem: Problem, where: str) -> int:
        value: Any = problem.info
        for name in self._config.column.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        stage = self._stage_of_value.get(value) if isinstance(value, Value) else None
        if stage is None:
            raise ConfigError(f"column: {where} has {self._config.column} = {value!r}, expected a value of `stages`")
        return stage


class Progress:
    """At which stage each taskset is: a fold over outcomes. `Curriculum.fold` makes it, the facts call `absorb`."""

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
        """Take an outcome. It counts if its problem is of the current stage and it has a score."""
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
