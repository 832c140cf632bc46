"""Reading positions over many partitions: fair, bounded, moving over gaps. Shared by the logs we hold ourselves."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple, Protocol

from rftstream.contracts.records import Record, TopicPartition
from rftstream.errors import ConfigError, PositionMissing


class PartitionBatch(NamedTuple):
    """What one partition gave."""

    records: list[Record]
    next_offset: int
    """Where to go on: after the last record, or the end if nothing is left."""
    num_bytes: int


class PartitionLog(Protocol):
    """What a log offers for this."""

    def spans(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, tuple[int, int]]:
        """First offset kept and offset after the last record."""

    def read(
        self, place: TopicPartition, offset: int, end: int, *, max_records: int, max_bytes: int, first_bytes: int | None
    ) -> PartitionBatch:
        """Records from `offset` up to `end`. The first one may have `first_bytes` (None: any size), all of them
        together `max_bytes` unless the first one alone is larger."""


class Cursors:
    """The positions of one reader. Partitions that were served wait at the end of the queue."""

    def __init__(self, positions: Mapping[TopicPartition, int]) -> None:
        # In the order of serving: a dict keeps the order in which its keys came.
        self._positions = dict(positions)
        self._paused: set[TopicPartition] = set()

    def seek(self, place: TopicPartition, offset: int) -> None:
        self._positions[place] = offset

    def position(self, place: TopicPartition) -> int:
        try:
            return self._positions[place]
        except KeyError:
            raise PositionMissing(
                f"{place}: it has no position here, one was expected; seek it first, while it is owned"
            ) from None

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        self._paused.update(partitions)

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        self._paused.difference_update(partitions)

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """A partition that comes back starts afresh: no position, not paused."""
        for place in partitions:
            self._positions.pop(place, None)
            self._paused.discard(place)

    def ready(self, log: PartitionLog) -> bool:
        """Whether `poll` may have something (a position to be refused included)."""
        active = self._active()
        spans = log.spans(active)
        return any(place not in spans or self._positions[place] != spans[place][1] for place in active)

    def poll(self, log: PartitionLog, max_records: int, max_bytes: int) -> list[Record]:
        waiting = self._waiting(log)
        found: list[Record] = []
        left_bytes = max_bytes
        for index, (place, end) in enumerate(waiting):
            left_records = max_records - len(found)
            if left_records <= 0 or (left_bytes <= 0 and found):
                break
            num_left = len(waiting) - index
            batch = log.read(
                place,
                self._positions[place],
                end,
                max_records=-(-left_records // num_left),
                max_bytes=left_bytes // num_left,
                first_bytes=left_bytes if found else None,
            )
            if batch.records:
                del self._positions[place]
                found += batch.records
                left_bytes -= batch.num_bytes
            self._positions[place] = batch.next_offset
        return found

    def _active(self) -> list[TopicPartition]:
        return [place for place in self._positions if place not in self._paused]

    def _waiting(self, log: PartitionLog) -> list[tuple[TopicPartition, int]]:
        """Partitions that have something, with their ends."""
        active = self._active()
        spans = log.spans(active)
        waiting = []
        for place in active:
            if place not in spans:
                raise ConfigError(f"{place}: no such partition, though it was being read; was the topic deleted?")
            begin, end = spans[place]
            offset = self._positions[place]
            if offset > end:
                raise PositionMissing(
                    f"{place}@{offset}: beyond the end of the log ({end}); the log has lost records or the position"
                    f" is of another log: take an earlier position"
                )
            if offset < begin:
                self._positions[place] = offset = begin
            if offset < end:
                waiting.append((place, end))
        return waiting
