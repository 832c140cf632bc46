"""Growing tasksets and the settings of [synthesiser], which are checked before anything runs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import EnvironmentSpec, TasksetSpec
from rftstream.errors import ConfigError

if TYPE_CHECKING:
    from rftstream.config.role_sections import SynthesiserSection
    from rftstream.config.sections import RunConfig


def grows(source: str) -> bool:
    """Return whether problems join the taskset of this source during the run."""
    spec = registry.built_in(TasksetSpec).get(source.partition(":")[0])
    return spec is not None and spec.grows


def growing_tasksets(config: RunConfig) -> list[str]:
    """Return the names of the tasksets that grow."""
    return [name for name, section in config.tasksets.items() if grows(section.source)]


def into_taskset(config: RunConfig, section: SynthesiserSection) -> str:
    """Return the taskset that new problems join. ConfigError if the run file does not say which."""
    growing = growing_tasksets(config)
    known = f"growing tasksets: {', '.join(growing)}" if growing else "no taskset grows"
    if section.into is None and len(growing) == 1:
        return growing[0]
    if section.into is None or section.into not in growing:
        found = "not set" if section.into is None else f"got {section.into!r}"
        raise ConfigError(
            f"synthesiser.into: {found}, expected a taskset that grows; {known}; one is made by [tasksets.NAME] "
            'source = "log:problems"'
        )
    return section.into


def check_synthesiser(config: RunConfig) -> None:
    """Check what [synthesiser] names. ConfigError says what is wrong."""
    section = config.synthesiser
    if section is None:
        return
    into = into_taskset(config, section)
    for name in section.tasksets:
        if name not in config.tasksets:
            raise ConfigError(f"synthesiser.tasksets: unknown {name!r}; {registry.suggest(name, config.tasksets)}")
        if section.read == "problems" and not grows(config.tasksets[name].source):
            raise ConfigError(
                f"synthesiser.tasksets: {name!r} does not grow, expected one that does with read = 'problems'"
            )
    if not section.tasksets and section.read != "problems" and set(config.tasksets) == {into}:
        raise ConfigError(
            f"synthesiser.tasksets: nothing to make problems of, since {into!r} is the only taskset; name it here, or "
            "set read = 'problems' to make them of what people add"
        )
    if not section.make:
        raise ConfigError("synthesiser.make: is empty, expected some of reworded, varied, harder")
    for setting in ("solved", "check_agree"):
        least, most = getattr(section, setting)
        if least > most:
            raise ConfigError(f"synthesiser.{setting}: got {least:g} to {most:g}, expected the smaller one first")
    _check_wording(section)
    if (section.ask == "server") is not (section.server is not None):
        found, more = ("none", "name url and model there") if section.server is None else ("one", "set ask = 'server'")
        raise ConfigError(f"synthesiser.server: found {found} with ask = {section.ask!r}; {more}")
    _check_environment(config, section, into)


def _check_wording(section: SynthesiserSection) -> None:
    for kind, prompt in section.prompts.items():
        where = f"synthesiser.prompts.{kind}"
        if kind not in section.make:
            raise ConfigError(f"{where}: is not made, expected of synthesiser.make: {', '.join(section.make)}")
        if "{problem}" not in prompt:
            raise ConfigError(f"{where}: found no {{problem}}, expected it where the parent's text is to stand")
    if section.pattern is None:
        return
    try:
        names = re.compile(section.pattern).groupindex
    except re.error as error:
        raise ConfigError(f"synthesiser.pattern: no regular expression: {error}") from None
    needed = ["problem", *(["answer"] if set(section.make) - {"reworded"} else [])]
    if lacking := [name for name in needed if name not in names]:
        raise ConfigError(
            f"synthesiser.pattern: lacks the group {lacking[0]}, expected (?P<{lacking[0]}>...) for what is made"
        )


def _check_environment(config: RunConfig, section: SynthesiserSection, into: str) -> None:
    named = config.tasksets[into].environment
    name = named if isinstance(named, str) else str(named.get("name"))
    spec = registry.find_spec(EnvironmentSpec, name)
    if spec.is_agent or (section.ask == "server" and not spec.has_one_turn):
        expected = "one that is no agent" if spec.is_agent else "single_turn with ask = 'server'"
        raise ConfigError(
            f"tasksets.{into}.environment: got {name!r}, in which a synthesiser cannot attempt problems; expected "
            f"{expected}"
        )
