"""From the run file's `reward = ...` to something that scores: built-in classes, users' functions, weighted sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rftstream.config import registry
from rftstream.config.sections import EvaluationSection, RunConfig, TasksetSection, WeightedReward
from rftstream.contracts.arrays import Array
from rftstream.errors import ConfigError, MissingChecker, RewardError
from rftstream.rewards.base import Reward, RewardInput, Score
from rftstream.rewards.functions import BatchFailed, FunctionReward, Outcome, to_score
from rftstream.rewards.version import source_version


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPart:
    """One reward of a weighted sum, with its name and weight."""

    name: str
    weight: float
    reward: Reward


class CompositeReward:
    """The weighted sum of one or more rewards. A part that does not apply to a rollout is left out of its sum.

    `build_reward` makes it, `build_rewards` opens it, and a scorer calls `score_all`.
    """

    def __init__(self, parts: Sequence[RewardPart]) -> None:
        self._parts = tuple(parts)
        self.scorer = "+".join(part.name for part in parts)
        self.version = ",".join(
            part.reward.version if part.weight == 1.0 else f"{part.weight!r}*{part.reward.version}" for part in parts
        )
        self.batched = any(getattr(part.reward, "batched", False) for part in parts)
        """Whether any part scores several rollouts at once."""

    @property
    def rewards(self) -> list[Reward]:
        """Return the rewards of all parts, in order."""
        return [part.reward for part in self._parts]

    def open(self) -> None:
        """Open all rewards that need costly preparation."""
        for part in self._parts:
            if (opens := getattr(part.reward, "open", None)) is not None:
                opens()

    def __call__(self, item: RewardInput) -> Score:
        outcome = self.score_all([item])[0]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def score_all(self, items: Sequence[RewardInput]) -> list[Score | BaseException]:
        """Return for each item its score, or what went wrong with it."""
        if len(self._parts) == 1:
            return [self._weighed(outcome) for outcome in _outcomes(self._parts[0], items)]
        columns = [_outcomes(part, items) for part in self._parts]
        return [self._sum([column[place] for column in columns]) for place in range(len(items))]

    def _weighed(self, outcome: Outcome) -> Score | BaseException:
        """Return the score of the only part, with its weight."""
        if not isinstance(outcome, Score):
            return self._nothing() if outcome is None else outcome
        part = self._parts[0]
        reward = part.weight * outcome.reward
        if not math.isfinite(reward):
            return RewardError(f"{self.scorer}: the weighted reward is {reward}, expected a finite number")
        parts = outcome.parts or {part.name: outcome.reward}
        return Score(reward=reward, parts=parts, metrics=outcome.metrics, additions=outcome.additions)

    def _nothing(self) -> RewardError:
        return RewardError(f"{self.scorer}: returned None, so no reward applies to this rollout; add one that does")

    def _sum(self, outcomes: Sequence[Outcome]) -> Score | BaseException:
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if errors:
            return next((error for error in errors if isinstance(error, BatchFailed)), errors[0])
        applied = [(part, one) for part, one in zip(self._parts, outcomes, strict=True) if isinstance(one, Score)]
        if not applied:
            return self._nothing()
        total = sum(part.weight * score.reward for part, score in applied)
        if not math.isfinite(total):
            return RewardError(f"{self.scorer}: the weighted sum is {total}, expected a finite number")
        numbers_of, metrics, additions = {}, {}, dict[str, Array]()
        for part, score in applied:
            if twice := additions.keys() & score.additions.keys():
                return RewardError(f"{self.scorer}: two parts stamp {min(twice)!r}, expected one that does")
            additions.update(score.additions)
            numbers_of[part.name] = score.reward
            numbers_of.update({f"{part.name}.{key}": value for key, value in score.parts.items()})
            metrics.update({f"{part.name}.{key}": value for key, value in score.metrics.items()})
        return Score(reward=total, parts=numbers_of, metrics=metrics, additions=additions)


def build_reward(
    spec: str | Sequence[WeightedReward],
    config: RunConfig,
    *,
    where: str = "reward",
    section: TasksetSection | EvaluationSection | None = None,
) -> CompositeReward:
    """Build the reward that `spec` names, for the taskset of `section`. ConfigError for unknown rewards, MissingChecker
    for absent packages."""
    wanted = [WeightedReward(name=spec)] if isinstance(spec, str) else list(spec)
    if not wanted:
        raise ConfigError(f"{where}: an empty list; name at least one reward")
    parts: list[RewardPart] = []
    for one in wanted:
        reward = _build_one(one.name, config, section, where=where)
        parts.append(RewardPart(name=_part_name(one.name, parts), weight=one.weight, reward=reward))
    return CompositeReward(parts)


def reward_specs(config: RunConfig) -> dict[str, str | list[WeightedReward]]:
    """Return the reward of each name that ScoreRequest.taskset may have: of each taskset by its name, and of each
    evaluation by `eval:<name>`."""
    return {name: section.reward for name, section in _sections(config).items()}


def _sections(config: RunConfig) -> dict[str, TasksetSection | EvaluationSection]:
    return {**config.tasksets, **{f"eval:{name}": section for name, section in config.evaluations.items()}}


def build_rewards(config: RunConfig) -> dict[str, CompositeReward | MissingChecker]:
    """Build and open all rewards of a run, by the name of their taskset or evaluation. If a reward's package is absent,
    the result has the error in its place."""
    rewards: dict[str, CompositeReward | MissingChecker] = {}
    for name, section in _sections(config).items():
        place = f"evaluations.{name.removeprefix('eval:')}" if name.startswith("eval:") else f"tasksets.{name}"
        try:
            built = rewards[name] = build_reward(section.reward, config, where=f"{place}.reward", section=section)
            built.open()
        except MissingChecker as error:
            rewards[name] = error
    return rewards


def _outcomes(part: RewardPart, items: Sequence[RewardInput]) -> list[Outcome]:
    """Return the result of one reward for each item."""
    reward: Any = part.reward
    if not getattr(reward, "batched", False):
        outcomes: list[Outcome] = []
        for item in items:
            try:
                outcomes.append(to_score(reward(item), where=part.name))
            except (Exception, SystemExit) as error:
                outcomes.append(error)
        return outcomes
    try:
        values = list(reward.score_all(items))
        if len(values) != len(items):
            raise RewardError(f"{part.name}: score_all returned {len(values)} values for {len(items)} rollouts")
    except (Exception, SystemExit) as error:
        return [error if len(items) == 1 else BatchFailed(f"{part.name}: {error!r}")] * len(items)
    known = (type(None), Score, BaseException)
    return [one if isinstance(one, known) else _caught(lambda v: to_score(v, where=part.name), one) for one in values]


def _caught(function: Callable[[Any], Score], value: Any) -> Outcome:
    try:
        return function(value)
    except (Exception, SystemExit) as error:
        return error


def _build_one(
    name: str, config: RunConfig, section: TasksetSection | EvaluationSection | None, *, where: str
) -> Reward:
    thing: Any = registry.resolve("reward", name, where=where)
    options = config.part_options("reward", name)
    if not isinstance(thing, type):
        if not callable(thing):
            raise ConfigError(f"{where}: {name!r} is a {type(thing).__name__}, expected a function or a class")
        columns = {} if section is None else section.columns
        return FunctionReward(thing, options, where=name, columns=columns, conversational="messages" in columns)
    part_config = registry.build_config(thing, options, where=f"rewards.{name}")
    base = {"base": config.base} if getattr(thing, "takes_base", False) else {}
    reward: Reward = thing(**base) if part_config is None else thing(part_config, **base)
    if not isinstance(getattr(reward, "version", None), str):
        reward.version = source_version(thing, options)
    return reward


def _part_name(name: str, taken: Sequence[RewardPart]) -> str:
    short = name.rpartition(":")[2]
    used = {part.name for part in taken}
    return short if short not in used else f"{short}-{len(taken) + 1}"
