"""The results of a concurrent role, finished or saved, that are not on the log yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rftstream.clock import Clock
from rftstream.contracts.records import NewRecord, TopicPartition
from rftstream.service.role import Log, Publish
from rftstream.transport.base import Transport

MAX_TRANSACTION_BYTES = 8 << 20
"""Size of the results that makes a transaction due, in bytes. A transaction takes at most so many, unless its first
result alone is larger."""

MAX_TRANSACTION_RECORDS = 512
"""Number of results that make a transaction due."""

LINGER_S = 0.02
"""Seconds that a finished result waits for others, so that they share a transaction."""


@dataclass(slots=True)
class InHand:
    """A record that was given to the step, with its place on the log and the assignment number under which it was
    polled."""

    place: TopicPartition
    assignment: int
    offset: int
    letters: tuple[Publish, ...] = ()
    """The dead letter of a record that cannot be decoded."""


@dataclass(slots=True)
class PendingResult:
    """The outputs for a record in hand, or for several of one partition. They are published together with the positions
    of these records."""

    number: int
    """Number of the item, or of the first of several."""
    work: InHand
    """The record in hand, or the first of several."""
    records: list[NewRecord]
    """Records to be published."""
    num_bytes: int
    """Size of `records` together, in bytes."""
    finishes: bool = True
    """Whether the record is finished. If not, only its work is saved, and the record stays in hand."""
    waits: bool = False
    """Whether a client outside of the log waits for this result."""
    leaves: bool = False
    """Whether the record is given back once the result is on the log."""
    also: Mapping[int, InHand] = field(default_factory=dict)
    """Number -> record in hand, for the other records that the result finishes."""

    @property
    def numbers(self) -> list[int]:
        """Numbers of all items of the result."""
        return [self.number, *self.also]

    @property
    def offsets(self) -> tuple[int, ...]:
        """Offsets of all its records, in order."""
        if not self.also:
            return (self.work.offset,)
        return tuple(sorted((self.work.offset, *(work.offset for work in self.also.values()))))


class PendingResults:
    """The results that are not on the log yet, oldest first.

    ConcurrentService makes one when it is made itself. It calls `add` for each result, `is_due` in each slice, `choose`
    for a transaction, `remove` once the transaction is on the log, and `drop` when a partition is lost."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._results: list[PendingResult] = []
        self._waiting_since = 0.0
        """Time when the oldest result came, or of the last commit if that was later."""

    def __len__(self) -> int:
        return len(self._results)

    def __iter__(self) -> Iterator[PendingResult]:
        return iter(self._results)

    def add(
        self,
        number: int,
        work: InHand,
        records: list[NewRecord],
        *,
        finishes: bool = True,
        waits: bool = False,
        leaves: bool = False,
        also: Mapping[int, InHand] | None = None,
    ) -> None:
        """Add a result. The arguments are the fields of PendingResult."""
        if not self._results:
            self._waiting_since = self._clock.now()
        num_bytes = sum(record.num_bytes for record in records)
        self._results.append(PendingResult(number, work, records, num_bytes, finishes, waits, leaves, also or {}))

    def all_finish(self) -> bool:
        """Return whether every pending result finishes its record."""
        return all(result.finishes for result in self._results)

    @property
    def is_full(self) -> bool:
        """Return whether the results fill a transaction."""
        return sum(result.num_bytes for result in self._results) >= MAX_TRANSACTION_BYTES

    def is_due(self, *, nothing_else: bool) -> bool:
        """Return whether it is time for a transaction. At least one result must be pending. `nothing_else` means that
        no further results come soon."""
        return (
            nothing_else
            or any(result.waits for result in self._results)
            or self._clock.now() - self._waiting_since >= LINGER_S
            or len(self._results) >= MAX_TRANSACTION_RECORDS
            or self.is_full
        )

    def due_in_s(self) -> float:
        """Return the seconds until the oldest result has waited long enough."""
        return max(0.0, self._waiting_since + LINGER_S - self._clock.now())

    def choose(self, assignment: Mapping[TopicPartition, int]) -> list[PendingResult]:
        """Return the results of one transaction: the oldest ones whose partitions still have the assignment number of
        their records. The other results are dropped when the assignment is read next."""
        chosen: list[PendingResult] = []
        num_bytes = 0
        for result in self._results:
            if assignment.get(result.work.place) != result.work.assignment:
                continue
            if chosen and num_bytes + result.num_bytes > MAX_TRANSACTION_BYTES:
                break
            chosen.append(result)
            num_bytes += result.num_bytes
        return chosen

    def remove(self, written: Sequence[PendingResult]) -> None:
        """Forget results that are on the log."""
        gone = {id(result) for result in written}
        self._results = [result for result in self._results if id(result) not in gone]
        self._waiting_since = self._clock.now()

    def drop(self, place: TopicPartition) -> None:
        """Forget the results of a partition that was lost."""
        self._results = [result for result in self._results if result.work.place != place]


class SavedRecords:
    """Looks up whether saved results are on the log after a lost commit.

    ConcurrentService makes it when it is made itself. It calls `look_at_ends` before each commit, and `there` when a
    transaction is in doubt. By then the lost producer was closed or replaced, so its commit can no longer arrive."""

    def __init__(self, transport: Transport, topic: str | None) -> None:
        """`topic` is the topic for unfinished work; None if the role saves nothing."""
        self._transport, self._topic = transport, topic
        self._ends: dict[TopicPartition, int] = {}
        """Ends of the partitions before the latest commit."""

    def look_at_ends(self, results: Iterable[PendingResult]) -> None:
        """Note the current ends of the topic, if some of the results are to be saved there."""
        partitions = {result.work.place.partition for result in results if not result.finishes}
        if partitions and self._topic is not None:
            self._ends = self._transport.admin.end_offsets(self._topic, partitions=partitions)

    def there(self, results: Iterable[PendingResult]) -> set[tuple[int, bytes | None]]:
        """Return partition and key of each record that was saved since the ends were noted. TransportError while a
        transaction in one of the partitions is open, because it may be the lost one."""
        if self._topic is None or not self._ends or all(result.finishes for result in results):
            return set()
        partitions = {place.partition for place in self._ends}
        records = Log(self._transport).read(
            self._topic, start=self._ends, bodies=False, settled=True, partitions=partitions
        )
        return {(record.partition, record.key) for record in records}
