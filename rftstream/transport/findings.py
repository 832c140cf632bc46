"""What the checks of a system find: for each thing what was found, what is wanted, and what to do about it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from rftstream.transport.base import TopicSettings


class Level(StrEnum):
    """How bad a finding is."""

    ok = "ok"
    """Nothing has to be done."""
    warning = "warning"
    """It works, and something will be slow or is a risk."""
    problem = "problem"
    """Something will not work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that a check looked at. The checks of a system make findings, and the commands print them."""

    level: Level
    """How bad it is."""
    what: str
    """The name of the thing."""
    found: str
    """Value that was found."""
    wanted: str = ""
    """Value that was expected; empty where anything will do."""
    todo: str = ""
    """Advice to a person; empty where the level is ok."""
    exit_code: int = 1
    """The exit code of the command, if this is a problem."""


class ServerLook(Protocol):
    """The checks of a log that is kept by servers. Such a transport has them as `transport.admin.look`."""

    def broker(self) -> list[Finding]:
        """Return findings about the version and the settings of the brokers."""

    def topic_differences(self, wanted: Mapping[str, TopicSettings]) -> dict[str, list[str]]:
        """Return, for each topic, the settings that differ from those it should have been made with, a sentence
        each."""

    def members(self, groups: Collection[str]) -> dict[str, list[str]]:
        """Return the members of each group now, as text for people. Groups without members are left out."""

    def delete_groups(self, groups: Collection[str]) -> list[str]:
        """Delete consumer groups with their positions. Return the names of those that existed."""
