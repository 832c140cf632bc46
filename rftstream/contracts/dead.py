"""Records that could not be dealt with. Topic `dead`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A record that could not be dealt with, as it was. `dead`: any -> any."""

    topic: str
    """Where the record stands."""
    partition: int
    """Where the record stands."""
    offset: int
    """Where the record stands."""
    key: bytes | None
    """Key of the record."""
    value: bytes | None
    """Value of the record, unchanged."""
    headers: tuple[tuple[str, bytes], ...]
    """Headers of the record, as names and values."""
    role: str
    """Role that gave up."""
    reason: str
    """Why it gave up, in a word."""
    detail: str
    """The error, for people."""
    tries: int
    """How often it was tried."""
    dead_at: float = 0.0
    """When it was given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadDropped:
    """Dead letters and dead groups that somebody has dealt with: they stay where they stand, and are not listed any
    more. `control`, key `dropped/<digest of what is in it>`."""

    letters: tuple[str, ...]
    """Ids of dead letters, `role/topic/partition/offset`."""
    groups: tuple[str, ...]
    """Groups whose outcome is dead, `taskset/pass/index/attempt`."""
    by: str
    """Who asked for it."""
    reason: str = ""
    """Why, for people."""
    dropped_at: float = 0.0
    """When it was asked for."""
