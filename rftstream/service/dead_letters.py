"""Dead letters: records that could not be processed, and that are set aside on the topic `dead`."""

from __future__ import annotations

import logging

from rftstream import metrics
from rftstream.clock import Clock
from rftstream.contracts import codec
from rftstream.contracts.dead import DeadLetter
from rftstream.contracts.records import Record
from rftstream.contracts.topics import MAX_RECORD_BYTES
from rftstream.errors import ContractError, ForeignRecord
from rftstream.service.role import Log, Publish
from rftstream.transport.base import Transport

log = logging.getLogger(__name__)

MAX_LETTER_BYTES = MAX_RECORD_BYTES - 128 * 1024
"""Largest record value that a dead letter holds, in bytes. The rest of the record is left for headers and the
reason."""


def dead_letter(record: Record, *, role: str, reason: str, detail: str, tries: int, now: float) -> Publish:
    """Return a dead letter: the original bytes, their place on the log, and why they could not be processed."""
    value = record.value
    if value is not None and len(value) > MAX_LETTER_BYTES:
        detail = f"{len(value)} bytes, too large to be held by another record: see where it stands. {detail}"
        value = None
    letter = DeadLetter(
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
    )
    return Publish("dead", 0, letter)


def reason_of(error: ContractError) -> str:
    """Return the reason that a dead letter gives for this error."""
    return "foreign" if isinstance(error, ForeignRecord) else "undecodable"


class UnsentLetters:
    """Dead letters of a single role that wait for its next transaction.

    SingleService makes one after each recovery. It calls `add` for each record that cannot be processed, and `take`
    when it builds a transaction."""

    def __init__(self, transport: Transport, role: str, clock: Clock) -> None:
        self._transport, self._role, self._clock = transport, role, clock
        self._letters: list[Publish] = []
        self._keys_on_dead: set[bytes] | None = None
        """Keys of this role's letters on `dead`; None until they are needed."""

    def __len__(self) -> int:
        return len(self._letters)

    def add(self, record: Record, error: ContractError) -> None:
        """Add a dead letter, unless `dead` already has it: after a restart a role reads some records a second time."""
        reason = reason_of(error)
        detail, now = str(error), self._clock.now()
        letter = dead_letter(record, role=self._role, reason=reason, detail=detail, tries=1, now=now)
        if letter.message is not None and codec.key_of(letter.message) in self._on_dead():
            return
        log.error("%s; message sent to dead", error)
        metrics.DEAD.labels(self._role, reason).inc()
        self._letters.append(letter)

    def put(self, publish: Publish) -> None:
        """Add another record to the next transaction."""
        self._letters.append(publish)

    def take(self) -> tuple[Publish, ...]:
        """Return the collected letters and forget them."""
        letters, self._letters = tuple(self._letters), []
        return letters

    def _on_dead(self) -> set[bytes]:
        if self._keys_on_dead is None:
            mine = self._role.encode()
            self._keys_on_dead = {
                record.key or b""
                for record in Log(self._transport).read("dead", bodies=False, settled=True)
                if record.header("role") == mine
            }
        return self._keys_on_dead
