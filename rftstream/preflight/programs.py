"""What a run needs to run programs of its policy on this machine, for rewards and for tools."""

from __future__ import annotations

from collections.abc import Iterator

from rftstream.config import registry
from rftstream.config.part_specs import RewardSpec
from rftstream.config.reward_uses import reward_names
from rftstream.config.sections import RunConfig
from rftstream.environments.tools import ToolEnvironment
from rftstream.environments.toolset import PROGRAM_TOOLS
from rftstream.errors import ConfigError, RftError
from rftstream.sandbox.layers import find_layers, missing_text


def runs_programs(config: RunConfig) -> bool:
    """Return whether a reward or a tool runs programs of the policy on this machine."""
    named = [] if config.without_tasks else [section.reward for section in config.tasksets.values()]
    named += [section.reward for section in config.evaluations.values()]
    names = {name for reward in named for name in reward_names(reward)}
    by_reward = any(
        registry.find_spec(RewardSpec, name).runs_programs and not config.rewards.get(name, {}).get("sandbox_url")
        for name in names
    )
    return by_reward or any(_has_program_tool(config, where) for where in config.environments_named())


def _has_program_tool(config: RunConfig, where: str) -> bool:
    try:
        _, settings = config.build_environment(where)
    except RftError:  # it is told of by its own look
        return False
    if not isinstance(settings, ToolEnvironment.Config):
        return False
    programs = PROGRAM_TOOLS.intersection(settings.tools)
    return any(not settings.options.get(name, {}).get("sandbox_url") for name in programs)


def look_at_sandbox() -> str:
    """Return the layers that are there. ConfigError if no program can be run."""
    if (problem := missing_text()) is not None:
        raise ConfigError(problem)
    return ", ".join(layer.name for layer in find_layers() if layer.is_there)


def sandbox_warnings(config: RunConfig) -> Iterator[str]:
    """Yield a sentence for each layer that this machine lacks, if the run needs a sandbox here and can have one."""
    if runs_programs(config) and missing_text() is None:
        for layer in find_layers():
            if not layer.is_there:
                yield f"sandbox: without {layer.name} ({layer.found}): {layer.cost}"
