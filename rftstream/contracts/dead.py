"""Records that could not be processed. Topic `dead`."""

from __future__ import annotations

import hashlib

from rftstream.contracts.message_spec import Facts, Message, message
from rftstream.contracts.ranges import NonNegativeInt
from rftstream.error_kinds import last_line

MAX_ERROR = 300
"""The most characters of the header `error`."""


def _dead_letter_headers(letter: DeadLetter) -> Facts:
    error = last_line(letter.detail)[:MAX_ERROR]
    return {"role": letter.role, "reason": letter.reason, "error": error or None}


@message(
    "dead_letter",
    topic="dead",
    key=lambda letter: f"{letter.role}/{letter.topic}/{letter.partition}/{letter.offset}",
    headers=_dead_letter_headers,
)
class DeadLetter(Message):
    """A record that could not be dealt with, as it was. `dead`: any -> any."""

    topic: str
    """Topic of the record."""
    partition: NonNegativeInt
    """Partition of the record."""
    offset: NonNegativeInt
    """Offset of the record."""
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
    tries: NonNegativeInt
    """Number of tries."""
    dead_at: float = 0.0
    """When it was given up."""


def _dropped_key(dropped: DeadDropped) -> str:
    parts = (*dropped.letters, "", *dropped.groups)
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return f"dropped/{digest[:32]}"


@message("dead_dropped", topic="control", key=_dropped_key)
class DeadDropped(Message):
    """Dead letters and dead groups that somebody has dealt with: they stay where they stand, and are not listed any
    more. `control`, key `dropped/<digest of what is in it>`."""

    letters: tuple[str, ...]
    """Ids of dead letters, `role/topic/partition/offset`."""
    groups: tuple[str, ...]
    """Groups whose outcome is dead, `taskset/pass/index/attempt`."""
    by: str
    """Name of the person who dropped it."""
    reason: str = ""
    """Why, for people."""
    dropped_at: float = 0.0
    """When it was asked for."""
