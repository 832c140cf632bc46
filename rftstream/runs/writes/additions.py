"""Adds records to a topic of a run, each once, even if a killed command is repeated.

The topic has a producer name of its own, so that of two commands at once the later fences the earlier. All records are
checked before the first one is written. Records that a killed command has written stay.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from rftstream.contracts.records import NewRecord
from rftstream.errors import ConfigError, ProducerLost
from rftstream.transport.base import Producer, Transport

MAX_RECORDS, MAX_BYTES = 512, 4 << 20
"""Most records, and most bytes, in one transaction."""
SAY_EVERY_S = 5.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Additions:
    """The records that a command adds to a run. `adding` makes it; the command calls `write` after it has checked
    everything."""

    transport: Transport
    producer: Producer | None
    """The producer. None: nothing is written."""

    def write(self, records: Iterable[NewRecord], progress: Callable[[int], None] = lambda count: None) -> None:
        """Write the records durably, since later commands skip records that exist."""
        if self.producer is None:
            return
        count = 0
        for some in by_transaction(records):
            self.producer.commit(some)
            progress(count := count + len(some))
        self.transport.admin.make_durable()


@contextmanager
def adding(transport: Transport, name: str, *, lost: str, again: str, dry_run: bool = False) -> Iterator[Additions]:
    """Start a producer of this name, unless `dry_run`. Reads after the start see everything that other commands have
    written.

    ConfigError if another command begins meanwhile, with the texts `lost` (what happened) and `again` (what to do).
    """
    producer = None if dry_run else transport.producer(name)
    try:
        if producer is not None:
            producer.start()
        yield Additions(transport, producer)
    except ProducerLost as error:
        raise ConfigError(f"{lost} ({error}), expected one at a time; {again}") from None
    finally:
        if producer is not None:
            producer.close()


def commit_once(transport: Transport, name: str, records: Iterable[NewRecord]) -> None:
    """Write records in one transaction, as a producer of this name."""
    with closing(transport.producer(name)) as producer:
        producer.start()
        producer.commit(list(records))


def by_transaction(records: Iterable[NewRecord], max_records: int = MAX_RECORDS) -> Iterator[list[NewRecord]]:
    """Yield the records in lists that are small enough for one transaction each."""
    some: list[NewRecord] = []
    num_bytes = 0
    for record in records:
        if some and (len(some) >= max_records or num_bytes + record.num_bytes > MAX_BYTES):
            yield some
            some, num_bytes = [], 0
        some.append(record)
        num_bytes += record.num_bytes
    if some:
        yield some


def progress_sayer(say: Say, total: int, done: str = "looked at") -> Callable[[int], None]:
    """Return a function that reports progress every few seconds."""
    say_at = time.monotonic() + SAY_EVERY_S

    def progress(count: int) -> None:
        nonlocal say_at
        if time.monotonic() >= say_at:
            say_at += SAY_EVERY_S
            say(f"{count:,} of {total:,} {done}")

    return progress
