"""What a run needs to run programs of its policy on this machine, for rewards and for tools."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import RewardSpec
from rftstream.config.parts.reward_uses import reward_names
from rftstream.config.sections import RunConfig
from rftstream.environments.tools import ToolEnvironment
from rftstream.environments.toolset import PROGRAM_TOOLS
from rftstream.errors import ConfigError, RftError
from rftstream.sandbox.base import Isolation
from rftstream.sandbox.layers import find_layers, missing_text


def isolations(config: RunConfig) -> list[Isolation]:
    """Return how programs of the policy are kept apart on this machine, for rewards and for tools. Empty if none runs
    here."""
    named = [] if config.without_tasks else [section.reward for section in config.tasksets.values()]
    named += [section.reward for section in config.evaluations.values()]
    names = {name for reward in named for name in reward_names(reward)}
    settings: list[Mapping[str, Any]] = [
        config.rewards.get(name, {}) for name in names if registry.find_spec(RewardSpec, name).runs_programs
    ]
    settings += [options for where in config.environments_named() for options in _program_tools(config, where)]
    here = [setting for setting in settings if not setting.get("sandbox_url")]
    return sorted({Isolation(one.get("isolation", Isolation.full)) for one in here if one.get("isolation") in _KNOWN})


_KNOWN = (None, *Isolation)


def _program_tools(config: RunConfig, where: str) -> list[Mapping[str, Any]]:
    """Return the settings of the tools there that run programs."""
    try:
        _, settings = config.build_environment(where)
    except RftError:  # it is told of by its own look
        return []
    if not isinstance(settings, ToolEnvironment.Config):
        return []
    return [settings.options.get(name, {}) for name in PROGRAM_TOOLS.intersection(settings.tools)]


def look_at_sandbox(config: RunConfig) -> str:
    """Return the layers that are there and those that are not. ConfigError if no program can be run."""
    said = []
    for isolation in isolations(config):
        if (problem := missing_text(isolation)) is not None:
            raise ConfigError(problem)
        said.append(", ".join(layer.name for layer in find_layers(isolation) if layer.is_there))
    return "; ".join([*said, *sandbox_warnings(config)])


def sandbox_warnings(config: RunConfig) -> Iterator[str]:
    """Yield a sentence for each layer that this machine lacks, or that was given up, if a sandbox can be had here."""
    sentences = [
        f"sandbox: without {layer.name} ({layer.found}): {layer.cost}"
        for isolation in isolations(config) if missing_text(isolation) is None
        for layer in find_layers(isolation) if not layer.is_there
    ]  # fmt: skip
    yield from dict.fromkeys(sentences)
