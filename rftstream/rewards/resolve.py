"""From the run file's `reward = ...` to something that scores: built-in classes and users' functions alike."""

from __future__ import annotations

from typing import Any

from rftstream.config import secrets
from rftstream.config.parts import registry
from rftstream.config.parts.part_names import gives_steps
from rftstream.config.parts.part_specs import RewardSpec
from rftstream.config.parts.reward_uses import RewardNamed, RewardUse, part_names, reward_uses
from rftstream.config.sections import EvaluationSection, RunConfig, TasksetSection
from rftstream.errors import ConfigError, MissingChecker
from rftstream.rewards.base import Reward
from rftstream.rewards.composite import CompositeReward, RewardPart
from rftstream.rewards.functions import FunctionReward
from rftstream.rewards.version import source_version


def build_reward(
    named: RewardNamed,
    config: RunConfig,
    *,
    where: str = "reward",
    section: TasksetSection | EvaluationSection | None = None,
) -> CompositeReward:
    """Build the reward in `named`, for the taskset of `section`. ConfigError for unknown rewards, MissingChecker for
    missing packages."""
    parts: list[RewardPart] = []
    uses = reward_uses(named, where)
    for use, name in zip(uses, part_names(uses), strict=True):
        reward = _build_one(use, config, section, where=where)
        spec = registry.find_spec(RewardSpec, use.name)
        always, is_group = spec.asks_teacher or gives_steps(config, use), use.group or spec.group
        if is_group and not hasattr(reward, "score_group"):
            raise ConfigError(
                f"{where}: {use.name!r} scores each rollout alone, expected a method score_group(group) for "
                "group = true; remove `group`, or name a function, which needs no such method"
            )
        parts.append(
            RewardPart(
                name=name,
                use=use,
                reward=reward,
                is_always_asked=always,
                is_group=is_group,
                takes_given=spec.takes_given,
            )
        )
    return CompositeReward(parts)


def reward_specs(config: RunConfig) -> dict[str, RewardNamed]:
    """Return the reward for each possible ScoreRequest.taskset: of each taskset by its name, and of each evaluation by
    `eval:<name>`."""
    return {name: section.reward for name, section in _sections(config).items()}


def _sections(config: RunConfig) -> dict[str, TasksetSection | EvaluationSection]:
    return {**config.tasksets, **{f"eval:{name}": section for name, section in config.evaluations.items()}}


def build_rewards(config: RunConfig) -> dict[str, CompositeReward | MissingChecker]:
    """Build and open all rewards of a run, by the name of their taskset or evaluation. If a reward's package is
    missing, the result has the error instead."""
    rewards: dict[str, CompositeReward | MissingChecker] = {}
    for name, section in _sections(config).items():
        place = f"evaluations.{name.removeprefix('eval:')}" if name.startswith("eval:") else f"tasksets.{name}"
        try:
            built = rewards[name] = build_reward(section.reward, config, where=f"{place}.reward", section=section)
            built.open()
        except MissingChecker as error:
            rewards[name] = error
    return rewards


def _build_one(
    use: RewardUse, config: RunConfig, section: TasksetSection | EvaluationSection | None, *, where: str
) -> Reward:
    name = use.name
    thing: Any = registry.resolve("reward", name, where=where)
    options = {**config.part_options("reward", name), **secrets.reveal(use.settings, where=where)}
    if not isinstance(thing, type):
        if not callable(thing):
            raise ConfigError(f"{where}: {name!r} is a {type(thing).__name__}, expected a function or a class")
        columns = {} if section is None else section.columns
        return FunctionReward(thing, options, where=name, columns=columns, conversational="messages" in columns)
    part_config = registry.build_config(thing, options, where=where if use.settings else f"rewards.{name}")
    base = {"base": config.base} if getattr(thing, "takes_base", False) else {}
    reward: Reward = thing(**base) if part_config is None else thing(part_config, **base)
    if not isinstance(getattr(reward, "version", None), str):
        reward.version = source_version(thing, options, name=name)
    return reward
