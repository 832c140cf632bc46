"""The operators that a run file declares, in order, each with its taskset and its side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rftstream.config import secrets
from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import OperatorSpec
from rftstream.config.sections import RunConfig
from rftstream.errors import ConfigError


@dataclass(frozen=True, slots=True)
class OperatorPlace:
    """An operator as the run file names it."""

    where: str
    """`pipeline.0`, or `tasksets.NAME.pipeline.0`."""
    name: str
    """A built-in name or `module:Class`."""
    settings: Mapping[str, Any]
    """Settings of the operator as they stand in the run file."""
    taskset: str | None
    """The taskset that the operator works on. None: all."""

    @property
    def side(self) -> str:
        """Side on which the operator works: `task` or `experience`. ConfigError if there is no such operator."""
        return registry.spec(OperatorSpec, self.name, where=f"{self.where}.op").side

    @property
    def by_version(self) -> bool:
        """Whether the operator's answer depends on the version at which a group is trained."""
        return registry.spec(OperatorSpec, self.name, where=f"{self.where}.op").by_version

    @property
    def by_problem(self) -> bool:
        """Whether the operator's answer depends on the problem alone."""
        return registry.spec(OperatorSpec, self.name, where=f"{self.where}.op").by_problem

    def build_config(self) -> tuple[Any, Any]:
        """Return the operator's class and its Config. ConfigError for unknown and bad settings."""
        part = registry.resolve("operator", self.name, where=f"{self.where}.op")
        settings = secrets.reveal(self.settings, where=self.where)
        return part, registry.build_config(part, settings, where=self.where)

    def build(self) -> Any:
        """Return the operator. ConfigError with the place if it refuses its settings."""
        part, options = self.build_config()
        try:
            return part() if options is None else part(options)
        except ConfigError as error:
            raise ConfigError(f"{self.where}.{error}") from None


def operator_places(config: RunConfig) -> Iterator[OperatorPlace]:
    """Yield all operators of the run file in order: those for all tasksets, then those of each taskset."""
    yield from _places("pipeline", config.pipeline, None)
    for name, section in config.tasksets.items():
        yield from _places(f"tasksets.{name}.pipeline", section.pipeline, name)


def _places(where: str, tables: tuple[dict[str, Any], ...], taskset: str | None) -> Iterator[OperatorPlace]:
    for number, table in enumerate(tables):
        name = table.get("op")
        if not isinstance(name, str):
            raise ConfigError(f'{where}.{number}: found no operator, expected its name, op = "NAME"')
        settings = {key: value for key, value in table.items() if key != "op"}
        yield OperatorPlace(f"{where}.{number}", name, settings, taskset)


def has_operators(config: RunConfig) -> bool:
    """Return whether the run file declares any operators. Outcomes then record more, for facts and for people."""
    return any(True for _ in operator_places(config))
