"""Dead letters: records that could not be dealt with, as they are put aside on `dead`."""

from __future__ import annotations

from rftstream.contracts.dead import DeadLetter
from rftstream.contracts.records import Record
from rftstream.contracts.topics import MAX_RECORD_BYTES
from rftstream.service.role import Publish

MAX_LETTER_BYTES = MAX_RECORD_BYTES - 128 * 1024
"""Of the value of a record that a dead letter can hold: beside it there are its headers and the reason."""


def dead_letter(record: Record, *, role: str, reason: str, detail: str, tries: int, now: float) -> Publish:
    """Return the letter: the original bytes, where they are from, and why nobody could deal with them."""
    value = record.value
    if value is not None and len(value) > MAX_LETTER_BYTES:
        detail = f"{len(value)} bytes, too large to be held by another record: see where it stands. {detail}"
        value = None
    return Publish(
        "dead",
        0,
        DeadLetter(
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            key=record.key,
            value=value,
            headers=record.headers,
            role=role,
            reason=reason,
            detail=detail[:4000],
            tries=tries,
            dead_at=now,
        ),
    )
