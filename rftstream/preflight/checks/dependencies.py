"""Checks the dependencies of a run on this machine: the sandbox for programs of its policy, and its model servers."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import RewardSpec
from rftstream.config.parts.reward_uses import reward_names
from rftstream.config.sections import RunConfig
from rftstream.environments.tools import ToolEnvironment
from rftstream.environments.toolset import PROGRAM_TOOLS
from rftstream.errors import ConfigError, RftError
from rftstream.http.address import host_and_port
from rftstream.models.server_client import split_url
from rftstream.sandbox.base import Isolation
from rftstream.sandbox.layers import find_layers, missing_text


def isolations(config: RunConfig) -> list[Isolation]:
    """Return the isolation of the policy's programs on this machine, for rewards and for tools. Empty if none runs
    here."""
    settings: list[Mapping[str, Any]] = [
        config.rewards.get(name, {})
        for name in _rewards_named(config)
        if registry.find_spec(RewardSpec, name).runs_programs
    ]
    settings += [options for where in config.environments_named() for options in _program_tools(config, where)]
    here = [setting for setting in settings if not setting.get("sandbox_url")]
    return sorted({Isolation(one.get("isolation", Isolation.full)) for one in here if one.get("isolation") in _KNOWN})


_KNOWN = (None, *Isolation)


def _rewards_named(config: RunConfig) -> list[str]:
    """Return the names of the rewards that tasksets and evaluations use, each once."""
    named = [] if config.without_tasks else [section.reward for section in config.tasksets.values()]
    named += [section.reward for section in config.evaluations.values()]
    return sorted({name for reward in named for name in reward_names(reward)})


def _program_tools(config: RunConfig, where: str) -> list[Mapping[str, Any]]:
    """Return the settings of the tools there that run programs."""
    try:
        _, settings = config.build_environment(where)
    except RftError:  # another check reports it
        return []
    if not isinstance(settings, ToolEnvironment.Config):
        return []
    return [settings.options.get(name, {}) for name in PROGRAM_TOOLS.intersection(settings.tools)]


def look_at_sandbox(config: RunConfig) -> str:
    """Return the sandbox layers that are available and those that are not. ConfigError if no program can be run."""
    said = []
    for isolation in isolations(config):
        if (problem := missing_text(isolation)) is not None:
            raise ConfigError(problem)
        said.append(", ".join(layer.name for layer in find_layers(isolation) if layer.is_there))
    return "; ".join([*said, *sandbox_warnings(config)])


def sandbox_warnings(config: RunConfig) -> Iterator[str]:
    """Yield a sentence for each layer that this machine lacks, or that was given up, if a sandbox is possible here."""
    sentences = [
        f"sandbox: without {layer.name} ({layer.found}): {layer.cost}"
        for isolation in isolations(config)
        if missing_text(isolation) is None
        for layer in find_layers(isolation)
        if not layer.is_there
    ]
    yield from dict.fromkeys(sentences)


# ----------------------------------------------------------- whether the model servers of the run are reachable


CONNECT_S = 2.0
"""Seconds that a server may take to accept a connection."""


def look_at_servers(config: RunConfig, policies: Sequence[str]) -> str | None:
    """Return which servers of these policies accept connections, or None if no policy asks a server. ConfigError for an
    invalid address. An unreachable server is no error: it may start later, and others serve meanwhile."""
    said = []
    for name in policies:
        _, options = config.build_part("policy", name)
        urls: Sequence[str] = getattr(options, "urls", ())
        if not urls:
            continue
        addresses = [host_and_port(split_url(url, f"policies.{name}")) for url in urls]
        with ThreadPoolExecutor(min(32, len(urls))) as threads:
            errors = list(threads.map(_error, addresses))
        there = f"{name}: {errors.count(None)} of {len(urls)} model servers there"
        said.append("; ".join([there, *(f"{url}: {error}" for url, error in zip(urls, errors, strict=True) if error)]))
    return ". ".join(said) or None


def reward_server_warnings(config: RunConfig) -> Iterator[str]:
    """Yield a sentence for each reward whose server accepts no connection now, such as a judge's."""
    for name in _rewards_named(config):
        url = config.rewards.get(name, {}).get("url")
        error = None
        with suppress(ConfigError):  # the reward itself says what is wrong with its url
            error = _error(host_and_port(split_url(url, f"rewards.{name}"))) if isinstance(url, str) else None
        if error:
            yield (
                f"rewards.{name}: nobody accepts connections at {url} now ({error}); what it does not answer has no "
                "reward, and a run without rewards stops: start it first"
            )


def _error(address: tuple[str, int]) -> str | None:
    try:
        socket.create_connection(address, timeout=CONNECT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None
