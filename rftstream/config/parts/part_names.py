"""Whether the parts that a run file names exist and fit together. None of the built-in ones is imported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import AlgorithmSpec, PolicySpec, RewardSpec, TransportSpec
from rftstream.config.parts.reward_uses import RewardUse, reward_names, reward_uses
from rftstream.config.role_sections import AUTO
from rftstream.config.sections import RunConfig, name_of_part
from rftstream.contracts.role_names import RoleName
from rftstream.errors import ConfigError


def check_part_names(config: RunConfig) -> None:
    """Raise ConfigError for the first part that does not exist or does not fit the others."""
    for check in PART_CHECKS:
        check(config)


def check_known(config: RunConfig) -> None:
    """Raise ConfigError for a part that is neither built in nor `module:Name`. No part is imported."""
    for kind, where, name in named_parts(config):
        known = registry.table(kind)
        if name not in known and ":" not in name:
            raise ConfigError(
                f"{where}: unknown {name!r}; {registry.suggest(name, known)} (or 'module:Name' of your own)"
            )


def check_rewards(config: RunConfig) -> None:
    """Raise ConfigError for rewards that cannot be combined into one number."""
    for kind, sections in (("tasksets", config.tasksets), ("evaluations", config.evaluations)):
        for name, section in sections.items():
            reward_uses(section.reward, f"{kind}.{name}.reward")


def check_shared(config: RunConfig) -> None:
    """Raise ConfigError for a log that workers cannot share."""
    kind = config.transport.kind
    if not registry.find_spec(TransportSpec, kind).is_shared:
        raise ConfigError(
            f"transport.kind: {kind!r} lives in one process, expected one that workers share; use 'embedded', "
            "or drive the roles with rftstream.testing"
        )


def check_teacher(config: RunConfig) -> None:
    """Raise ConfigError for an algorithm that learns from a teacher if a taskset's rewards do not ask one. Users' own
    rewards pass, since nobody knows in advance what they add."""
    named = config.algorithms_named()
    usual = {name_of_part(one, where) for where, one in named.items() if not where.startswith("tasksets.")}
    for name, section in config.tasksets.items():
        used = {name_of_part(section.algorithm, name)} if section.algorithm else usual
        taught = [one for one in sorted(used) if registry.find_spec(AlgorithmSpec, one).needs_teacher]
        if not taught:
            continue
        rewards = reward_names(section.reward)
        teachers = [reward for reward, spec in registry.built_in(RewardSpec).items() if spec.asks_teacher]
        if not any(reward in teachers or ":" in reward for reward in rewards):
            raise ConfigError(
                f"tasksets.{name}.reward: asks no teacher, expected one for the algorithm {taught[0]!r}; add "
                '{ name = "teacher", weight = 0.0 }, and say in [rewards.teacher] where it is'
            )


def check_steps(config: RunConfig) -> None:
    """Raise ConfigError for an algorithm that learns from rewards of steps if a taskset's rewards give none. Users' own
    rewards pass, since nobody knows in advance what they add."""
    named = config.algorithms_named()
    usual = [where for where in named if not where.startswith("tasksets.")]
    for name, section in config.tasksets.items():
        places = [f"tasksets.{name}.algorithm"] if section.algorithm else usual
        learning = [where for where in places if _learns_from_steps(config, named[where], where)]
        uses = reward_uses(section.reward, f"tasksets.{name}.reward")
        if learning and not any(":" in use.name or gives_steps(config, use) for use in uses):
            raise ConfigError(
                f"tasksets.{name}.reward: gives no rewards of steps, expected some for {learning[0]}, whose "
                'step_rewards is not "off"; add { name = "reward_model", steps = "\\n\\n" }'
            )


def _learns_from_steps(config: RunConfig, named: str | dict[str, Any], where: str) -> bool:
    name = name_of_part(named, where)
    setting = registry.find_spec(AlgorithmSpec, name).steps_setting
    own = {} if isinstance(named, str) else named
    return bool(setting) and {**config.algorithms.get(name, {}), **own}.get(setting, "off") != "off"


def gives_steps(config: RunConfig, use: RewardUse) -> bool:
    """Return whether a reward, with the settings of this use, gives rewards of steps."""
    setting = registry.find_spec(RewardSpec, use.name).steps_setting
    return bool(setting and {**config.rewards.get(use.name, {}), **use.settings}.get(setting))


def compares_siblings(config: RunConfig) -> bool:
    """Return whether the reward of any taskset sees whole groups."""
    uses = (use for name, one in config.tasksets.items() for use in reward_uses(one.reward, f"tasksets.{name}.reward"))
    return any(use.group or registry.find_spec(RewardSpec, use.name).group for use in uses)


def check_server_updates(config: RunConfig) -> None:
    """Raise ConfigError if two roles would send weights to the same server: one would sample with the weights of the
    other."""
    samplers = [(RoleName.explorer, config.explorer.policy, config.explorer.processes)]
    if config.evaluations:
        policy = config.evaluator.policy or config.explorer.policy
        samplers.append((RoleName.evaluator, policy, config.evaluator.count))
    if (synthesiser := config.synthesiser) is not None and synthesiser.ask == "policy":
        samplers.append((RoleName.synthesiser, synthesiser.policy or config.explorer.policy, synthesiser.count))
    for policy in dict.fromkeys(policy for _, policy, _ in samplers):
        counts = {role: count for role, used, count in samplers if used == policy}
        if sum(counts.values()) > 1 and (setting := server_update(config, policy)):
            workers = " and ".join(f"{count} {role}{'s' * (count > 1)}" for role, count in counts.items())
            raise ConfigError(
                f"policies.{policy}.{setting}: {workers} would give the server weights, expected one worker, for each "
                "would sample by those of the others; set explorer.count = 1, and evaluator.policy = 'hf' or another "
                "one"
            )


def server_update(config: RunConfig, policy: str) -> str | None:
    """Return the setting by which the policy's server gets the trained weights, or None if the server gets none."""
    options = config.policies.get(policy)
    setting = registry.find_spec(PolicySpec, policy).update_setting if options else ""
    return setting if options and options.get(setting) else None


PART_CHECKS = (check_rewards, check_known, check_teacher, check_steps, check_server_updates, check_shared)
"""The checks, in this order. Each checks one thing."""


def named_parts(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield kind, place in the run file, and name of each part. A source is a part only if it names a class of the
    user's own."""
    yield "transport", "transport.kind", config.transport.kind
    if config.explorer.policy != AUTO:
        yield "policy", "explorer.policy", config.explorer.policy
    if config.evaluator.policy is not None:
        yield "policy", "evaluator.policy", config.evaluator.policy
    if config.synthesiser is not None and config.synthesiser.policy is not None:
        yield "policy", "synthesiser.policy", config.synthesiser.policy
    yield "backend", "trainer.backend", config.trainer.backend
    yield from (("algorithm", where, name_of_part(named, where)) for where, named in config.algorithms_named().items())
    for kind, sections in (("tasksets", config.tasksets), ("evaluations", config.evaluations)):
        for name, section in sections.items():
            scheme, _, thing = section.source.partition(":")
            if scheme not in registry.table("taskset") and thing.isidentifier():
                yield "taskset", f"{kind}.{name}.source", section.source
            place = f"{kind}.{name}.environment"
            yield "environment", place, name_of_part(section.environment, place)
            for reward in reward_names(section.reward):
                yield "reward", f"{kind}.{name}.reward", reward
