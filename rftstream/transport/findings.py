"""Findings of system checks: the value found, the value wanted, and advice; and what to ask for before anything can be
checked."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from rftstream.transport.base import TopicSettings


class Level(StrEnum):
    """The severity of a finding."""

    ok = "ok"
    """Nothing needs to be done."""
    warning = "warning"
    """It works, but will be slow or is a risk."""
    problem = "problem"
    """Something will not work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One result of a check. The checks of a system make findings, and the commands print them."""

    level: Level
    """Severity of the finding."""
    what: str
    """Name of the checked item."""
    found: str
    """Value that was found."""
    wanted: str = ""
    """Expected value; empty if any value is fine."""
    todo: str = ""
    """Advice to the user; empty if the level is ok."""
    exit_code: int = 1
    """The exit code of the command, if this is a problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerWish:
    """A setting that brokers should have."""

    name: str
    wanted: str
    why: str
    needed: bool
    """Whether nothing works without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicWish:
    """A topic as it has to be made."""

    name: str
    """Its name on the brokers."""
    partitions: int
    replicas: int | None
    """None: as many as the brokers have as their default."""
    settings: Mapping[str, str]


class ServerLook(Protocol):
    """Checks of a log that servers keep. Such a transport has them as `transport.admin.look`."""

    def broker_wishes(self) -> list[BrokerWish]:
        """Return what to ask of those who own the servers. No server is asked."""

    def topic_wishes(self, wanted: Mapping[str, TopicSettings]) -> list[TopicWish]:
        """Return the topics, by their bare names, as somebody else has to make them. No server is asked."""

    def broker(self) -> list[Finding]:
        """Return findings about the version and the settings of the brokers."""

    def topic_differences(self, wanted: Mapping[str, TopicSettings]) -> dict[str, list[str]]:
        """Return topic -> sentences about the settings that differ from those it should have."""

    def members(self, groups: Collection[str]) -> dict[str, list[str]]:
        """Return the current members of each group, as text for users. Groups without members are left out."""

    def delete_groups(self, groups: Collection[str]) -> list[str]:
        """Delete consumer groups with their positions. Return the names of those that existed."""
