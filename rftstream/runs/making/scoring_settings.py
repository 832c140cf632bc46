"""Settings that decide which reward a rollout gets: those of rewards, and those of environments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import EnvironmentSpec
from rftstream.config.sections import RunConfig, name_of_part

_REWARD = re.compile(r"((tasksets|evaluations)\..+?\.reward|rewards)[. ]")
_REACHED_BY = re.compile(
    r"(url|api_key|timeout_s|tries|max_concurrent|cache_mib|cache_folder|price_\w+|sandbox_url|auth_token|wait_s|isolation)"
)
"""Settings of rewards that say how a host reaches a service, and not what scores."""


def is_of_a_reward(line: str) -> bool:
    """Return whether a changed setting, as a line `key before -> after`, changes what scores."""
    setting = line.partition(" ")[0].rpartition(".")[2]
    return _REWARD.match(line) is not None and not _REACHED_BY.fullmatch(setting)


def is_of_an_environment(line: str, config: RunConfig) -> bool:
    """Return whether a changed setting, as a line `key before -> after`, changes what an environment says and
    rewards. `config`: either of the two."""
    setting = line.partition(" ")[0]
    for place, name in _environments(config):
        if setting == place:
            return True
        if setting.startswith(f"{place}."):
            key = setting.removeprefix(f"{place}.")
            spec = registry.find_spec(EnvironmentSpec, name)
            of_host = key.partition(".")[0] in spec.host_settings or (":" not in name and key == "url")
            return not of_host and not any(fnmatchcase(key, path) for path in spec.path_settings)
    return setting.startswith("environments.")


def _environments(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield place and name of environments in the run file, also of those that it does not name."""
    for name in {**registry.built_in(EnvironmentSpec), **config.environments}:
        yield f"environments.{name}", name
    for place, named in config.environments_named().items():
        yield place, name_of_part(named, place)
