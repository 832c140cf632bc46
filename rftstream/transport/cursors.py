"""Read positions over many partitions. Reading is fair, bounded, and moves over gaps.

The embedded log and the log in memory share this module."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple, Protocol

from rftstream.contracts.records import Record, TopicPartition
from rftstream.errors import ConfigError, LogTruncated, PositionMissing
from rftstream.transport.base import Jump
from rftstream.transport.checks import check_owned


class PartitionBatch(NamedTuple):
    """The records that one read of a partition returned."""

    records: list[Record]
    next_offset: int
    """The offset at which reading continues: after the last record, or the end if nothing is left."""
    num_bytes: int
    """Size of the records together, in bytes."""


class PartitionLog(Protocol):
    """The interface of a log for `Cursors`: the begin and end of its partitions, and a read of one partition."""

    def spans(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, tuple[int, int]]:
        """Return, for each existing partition, the first remaining offset and the offset after the last record."""

    def read(
        self, place: TopicPartition, offset: int, end: int, *, max_records: int, max_bytes: int, first_bytes: int | None
    ) -> PartitionBatch:
        """Return at most `max_records` records from `offset` up to `end`. Their total size is at most `max_bytes`; only
        the first record may have `first_bytes` (None for any size)."""

    def jumped(self, jump: Jump) -> None:
        """Record a jump over deleted records, for `Transport.jumps`."""


class Cursors:
    """The read positions of one reader or member, over many partitions.

    Its owner makes it, and calls `poll` for records and `ready` to check whether there are any. Partitions are served
    in turn: a served partition goes to the end of the queue."""

    def __init__(self, positions: Mapping[TopicPartition, int]) -> None:
        # The order of the keys is the order of serving, since a dict keeps the order of insertion.
        self._positions = dict(positions)
        self._paused: set[TopicPartition] = set()

    def seek(self, place: TopicPartition, offset: int) -> None:
        """Make `offset` the next one to read of the partition."""
        self._positions[place] = offset

    def position(self, place: TopicPartition) -> int:
        """Return the next offset to read. PositionMissing if the partition was never positioned."""
        try:
            return self._positions[place]
        except KeyError:
            raise PositionMissing(
                f"{place}: it has no position here, one was expected; seek it first, while it is owned"
            ) from None

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Deliver nothing from these partitions until `resume`."""
        self._paused.update(partitions)

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Deliver from these partitions again."""
        self._paused.difference_update(partitions)

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """Forget the positions and pauses of these partitions. A partition that comes back starts afresh."""
        for place in partitions:
            self._positions.pop(place, None)
            self._paused.discard(place)

    def ready(self, log: PartitionLog) -> bool:
        """Return whether `poll` may return records or raise. It raises for a position beyond the end."""
        active = self._active()
        spans = log.spans(active)
        return any(place not in spans or self._positions[place] != spans[place][1] for place in active)

    def poll(self, log: PartitionLog, max_records: int, max_bytes: int) -> list[Record]:
        """Return the available records of the partitions that are not paused, and move their positions after them. Each
        partition with records gets a fair share of `max_records` and `max_bytes`. PositionMissing for a position beyond
        the end, ConfigError for a partition that no longer exists."""
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
        """Return the partitions with unread records, and their ends."""
        active = self._active()
        spans = log.spans(active)
        waiting = []
        for place in active:
            if place not in spans:
                raise ConfigError(f"{place}: no such partition, though it was being read; was the topic deleted?")
            begin, end = spans[place]
            offset = self._positions[place]
            if offset > end:
                raise LogTruncated(*place, offset, end)
            if offset < begin:
                log.jumped(Jump(place, offset, begin))
                self._positions[place] = offset = begin
            if offset < end:
                waiting.append((place, end))
        return waiting


class CursorReader:
    """A base class of readers: all of `Reader` except `poll`, over cursors. The readers of the embedded log and of the
    log in memory derive from it."""

    def __init__(self, cursors: Cursors) -> None:
        self._cursors = cursors

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self._cursors.position(partition)  # Raises for a partition that the reader was not opened for.
        self._cursors.seek(partition, offset)

    def position(self, partition: TopicPartition) -> int:
        return self._cursors.position(partition)

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        self._cursors.pause(partitions)

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        self._cursors.resume(partitions)

    def close(self) -> None:
        pass


class CursorMember:
    """A base class of members: the parts of `Member` about read positions, over cursors.

    The members of the embedded log and of the log in memory derive from it. They update `_assignment`, which maps owned
    partitions to assignment numbers."""

    def __init__(self, cursors: Cursors, *, group: str, name: str) -> None:
        self.name = name
        self._group = group
        self._cursors = cursors
        self._assignment: Mapping[TopicPartition, int] = {}

    def assignment(self) -> Mapping[TopicPartition, int]:
        return self._assignment

    def seek(self, partition: TopicPartition, offset: int) -> None:
        check_owned(partition, self._assignment, group=self._group, member=self.name)
        self._cursors.seek(partition, offset)

    def position(self, partition: TopicPartition) -> int:
        return self._cursors.position(partition)

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        self._cursors.pause(set(partitions) & set(self._assignment))

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        self._cursors.resume(partitions)
