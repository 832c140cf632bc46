"""From the run file's `reward = ...` to something that scores: built-in classes, users' functions, weighted sums.

A user's function is called by its signature. It may take a single RewardInput; or any of `completion`, `answer`,
`prompt`, `messages`, `info`, `data_source`, `num_tokens`, `truncated`, the keys of `info` and of its table
`[rewards."module:function"]`, and `**kwargs` for the rest of them. It returns a number, a dict with `reward` (or
`score`) whose other numbers become metrics, or a Score.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from rftstream import plugins
from rftstream.config import RunConfig, WeightedReward
from rftstream.errors import ConfigError, MissingChecker, RewardError
from rftstream.rewards.base import Reward, RewardInput, Score
from rftstream.rewards.version import source_version

MAX_NUMBERS = 200
"""Parts and metrics of one score."""

INPUT_FIELDS = tuple(item.name for item in fields(RewardInput))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    name: str
    weight: float
    reward: Reward


class CompositeReward:
    """The weighted sum of one or more rewards."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = tuple(parts)
        self.scorer = "+".join(part.name for part in parts)
        self.version = ",".join(
            part.reward.version if part.weight == 1.0 else f"{part.weight!r}*{part.reward.version}" for part in parts
        )

    def __call__(self, item: RewardInput) -> Score:
        if len(self._parts) == 1:
            part = self._parts[0]
            score = to_score(part.reward(item), where=part.name)
            reward = part.weight * score.reward
            return Score(reward=reward, parts=score.parts or {part.name: score.reward}, metrics=score.metrics)
        total, numbers_of, metrics = 0.0, {}, {}
        for part in self._parts:
            score = to_score(part.reward(item), where=part.name)
            total += part.weight * score.reward
            numbers_of[part.name] = score.reward
            numbers_of.update({f"{part.name}.{key}": value for key, value in score.parts.items()})
            metrics.update({f"{part.name}.{key}": value for key, value in score.metrics.items()})
        return Score(reward=total, parts=numbers_of, metrics=metrics)


def build_reward(spec: str | Sequence[WeightedReward], config: RunConfig, *, where: str = "reward") -> CompositeReward:
    """The reward that `spec` names. ConfigError for unknown ones, MissingChecker for absent packages."""
    wanted = [WeightedReward(name=spec)] if isinstance(spec, str) else list(spec)
    if not wanted:
        raise ConfigError(f"{where}: an empty list; name at least one reward")
    parts: list[Part] = []
    for one in wanted:
        if not math.isfinite(one.weight):
            raise ConfigError(f"{where}: weight of {one.name!r} is {one.weight}, expected a finite number")
        reward = _build_one(one.name, config, where=where)
        parts.append(Part(name=_part_name(one.name, parts), weight=one.weight, reward=reward))
    return CompositeReward(parts)


def reward_specs(config: RunConfig) -> dict[str, str | list[WeightedReward]]:
    """What ScoreRequest.taskset may name -> its reward: each taskset, and `eval:<name>` for each evaluation."""
    specs = {name: section.reward for name, section in config.tasksets.items()}
    specs.update({f"eval:{name}": section.reward for name, section in config.evaluations.items()})
    return specs


def build_rewards(config: RunConfig) -> dict[str, CompositeReward | MissingChecker]:
    """All rewards of a run; in place of one whose package is absent, the error that says so."""
    rewards: dict[str, CompositeReward | MissingChecker] = {}
    for name, spec in reward_specs(config).items():
        section = f"evaluations.{name.removeprefix('eval:')}" if name.startswith("eval:") else f"tasksets.{name}"
        try:
            rewards[name] = build_reward(spec, config, where=f"{section}.reward")
        except MissingChecker as error:
            rewards[name] = error
    return rewards


def to_score(value: Any, *, where: str) -> Score:
    """What a reward returned, checked. RewardError unless it is a finite number with finite parts and metrics."""
    if isinstance(value, Score):
        score = value
    elif isinstance(value, Mapping):
        key = "reward" if "reward" in value else "score"
        if key not in value:
            raise RewardError(f"{where}: returned a dict with {sorted(map(str, value))[:20]}, expected 'reward' in it")
        metrics: dict[str, Any] = {str(k): v for k, v in value.items() if k != key and isinstance(v, numbers.Real)}
        score = Score(reward=value[key], metrics=metrics)
    else:
        score = Score(reward=value)
    if len(score.parts) + len(score.metrics) > MAX_NUMBERS:
        raise RewardError(f"{where}: returned more than {MAX_NUMBERS} parts and metrics; return fewer")
    return Score(
        reward=_finite(score.reward, f"{where}: reward"),
        parts={str(key)[:200]: _finite(one, f"{where}: part {key!r}") for key, one in score.parts.items()},
        metrics={str(key)[:200]: _finite(one, f"{where}: metric {key!r}") for key, one in score.metrics.items()},
    )


class FunctionReward:
    """A user's function as a Reward. Other conventions of signature (verl's, TRL's) get their adapter here."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any], *, where: str) -> None:
        self._function = function
        self._options = dict(options)
        self._where = where
        self.version = source_version(function, options)
        parameters = list(inspect.signature(function).parameters.values())
        named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        required = [p for p in named if p.default is p.empty]
        self._takes_rest = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._only = required[0].name if len(required) == 1 else None
        self._names = [p.name for p in named]
        self._required = {p.name for p in required}
        self._positional = [p.name for p in named if p.kind is p.POSITIONAL_ONLY]
        unknown = set(options) - set(self._names)
        if unknown and not self._takes_rest:
            raise ConfigError(f"{where}: takes no {', '.join(sorted(unknown))}; it takes {', '.join(self._names)}")

    def __call__(self, item: RewardInput) -> Score:
        value = self._call(item)
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        return to_score(value, where=self._where)

    def _call(self, item: RewardInput) -> Any:
        known = {**item.info, **self._options, **{name: getattr(item, name) for name in INPUT_FIELDS}}
        if self._only is not None and self._only not in known:
            return self._function(item, **self._options)
        missing = self._required - set(known)
        if missing:
            raise RewardError(
                f"{self._where}: needs {', '.join(sorted(missing))}, but the problem has only "
                f"{', '.join(sorted(known))}; is the column in the taskset?"
            )
        positional = [known.pop(name) for name in self._positional]
        return self._function(*positional, **{k: v for k, v in known.items() if self._takes_rest or k in self._names})


def _build_one(name: str, config: RunConfig, *, where: str) -> Reward:
    thing: Any = plugins.resolve("reward", name, where=where)
    options = config.part_options("reward", name)
    if not isinstance(thing, type):
        if not callable(thing):
            raise ConfigError(f"{where}: {name!r} is a {type(thing).__name__}, expected a function or a class")
        return FunctionReward(thing, options, where=name)
    part_config = plugins.build_config(thing, options, where=f"rewards.{name}")
    reward: Reward = thing() if part_config is None else thing(part_config)
    if not isinstance(getattr(reward, "version", None), str):
        reward.version = source_version(thing, options)
    return reward


def _part_name(name: str, taken: Sequence[Part]) -> str:
    short = name.rpartition(":")[2]
    used = {part.name for part in taken}
    return short if short not in used else f"{short}-{len(taken) + 1}"


def _finite(value: Any, where: str) -> float:
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # a number of numpy or torch
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise RewardError(f"{where}: got {type(value).__name__}, expected a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(f"{where}: got {number}, expected a finite number")
    return number
