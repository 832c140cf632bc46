"""Whether the parts that a run file names exist and fit together. None of them is imported."""

from __future__ import annotations

from collections.abc import Iterator

from rftstream.config import registry
from rftstream.config.sections import RunConfig, name_of_algorithm
from rftstream.contracts.role_names import RoleName
from rftstream.errors import ConfigError


def check_part_names(config: RunConfig) -> None:
    """Raise ConfigError for a part that is neither built in nor `module:Name`. No part is imported."""
    for kind, where, name in named_parts(config):
        known = registry.table(kind)
        if name not in known and ":" not in name:
            raise ConfigError(
                f"{where}: unknown {name!r}; {registry.suggest(name, known)} (or 'module:Name' of your own)"
            )
    check_teacher(config)
    check_server_updates(config)
    check_shared(config)


def check_shared(config: RunConfig) -> None:
    """Raise ConfigError for a log that workers cannot share."""
    if config.transport.kind == "memory":
        raise ConfigError(
            "transport.kind: 'memory' lives in one process, expected one that workers share; use 'embedded', "
            "or drive the roles with rftstream.testing"
        )


def check_teacher(config: RunConfig) -> None:
    """Raise ConfigError for an algorithm that learns from a teacher if a taskset's rewards do not ask one. Rewards of
    users' own pass, since nobody knows before what they add."""
    named = config.algorithms_named()
    usual = {name_of_algorithm(one, where) for where, one in named.items() if not where.startswith("tasksets.")}
    for name, section in config.tasksets.items():
        used = {name_of_algorithm(section.algorithm, name)} if section.algorithm else usual
        if "opd" not in used:
            continue
        rewards = [section.reward] if isinstance(section.reward, str) else [one.name for one in section.reward]
        if not any(reward == "teacher" or ":" in reward for reward in rewards):
            raise ConfigError(
                f"tasksets.{name}.reward: asks no teacher, expected one for the algorithm 'opd'; add "
                '{ name = "teacher", weight = 0.0 }, and say in [rewards.teacher] where it is'
            )


def check_server_updates(config: RunConfig) -> None:
    """Raise ConfigError for a server that two roles would give weights: one would sample with the weights of the
    other."""
    if not config.policies.get("openai", {}).get("update"):
        return
    counts = {}
    if config.explorer.policy == "openai":
        counts[RoleName.explorer] = config.explorer.count
    if config.evaluations and (config.evaluator.policy or config.explorer.policy) == "openai":
        counts[RoleName.evaluator] = config.evaluator.count
    if sum(counts.values()) > 1:
        workers = " and ".join(f"{count} {role}{'s' * (count > 1)}" for role, count in counts.items())
        raise ConfigError(
            f"policies.openai.update: {workers} would give the server weights, expected one worker, for each would "
            "sample by those of the others; set explorer.count = 1, and evaluator.policy = 'hf' or another one"
        )


def named_parts(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield kind, place in the run file, and name of each part; of sources only those that are a class of the user's
    own."""
    yield "transport", "transport.kind", config.transport.kind
    yield "policy", "explorer.policy", config.explorer.policy
    if config.evaluator.policy is not None:
        yield "policy", "evaluator.policy", config.evaluator.policy
    yield "backend", "trainer.backend", config.trainer.backend
    yield from (
        ("algorithm", where, name_of_algorithm(named, where)) for where, named in config.algorithms_named().items()
    )
    for kind, sections in (("tasksets", config.tasksets), ("evaluations", config.evaluations)):
        for name, section in sections.items():
            scheme, _, thing = section.source.partition(":")
            if scheme not in registry.table("taskset") and thing.isidentifier():
                yield "taskset", f"{kind}.{name}.source", section.source
            yield "environment", f"{kind}.{name}.environment", section.environment
            rewards = [section.reward] if isinstance(section.reward, str) else [one.name for one in section.reward]
            for reward in rewards:
                yield "reward", f"{kind}.{name}.reward", reward
