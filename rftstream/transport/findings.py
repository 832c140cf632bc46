"""What a look at a system finds: each thing with what was found, what is wanted, and what to do about it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from rftstream.transport.base import TopicSettings


class Level(StrEnum):
    ok = "ok"
    warning = "warning"
    """It works, and something will be slow or is a risk."""
    problem = "problem"
    """Something will not work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    level: Level
    what: str
    found: str
    wanted: str = ""
    """Empty where anything will do."""
    todo: str = ""
    """Empty where it is ok."""
    exit_code: int = 1
    """Of the command, if it is a problem."""


class ServerLook(Protocol):
    """What only a log that is kept by servers has: `transport.admin.look`, where there is one."""

    def broker(self) -> list[Finding]:
        """Version and settings of the brokers."""

    def topic_differences(self, wanted: Mapping[str, TopicSettings]) -> dict[str, list[str]]:
        """Topic -> settings that it should have been made with and has not (any more), a sentence each."""

    def members(self, groups: Collection[str]) -> dict[str, list[str]]:
        """Group -> who is in it now."""

    def delete_groups(self, groups: Collection[str]) -> list[str]:
        """Forgets groups with their positions; those that there were."""
