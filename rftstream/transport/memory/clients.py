"""Reader, member and producer of a log in memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from rftstream.contracts.records import NewRecord, Record, TopicPartition
from rftstream.errors import (
    AssignmentLost,
    ProducerLost,
    TransactionAborted,
    TransportError,
)
from rftstream.transport.base import Jump, Position, Snapshot
from rftstream.transport.checks import check_commit, check_metadata, choose_positions, too_large
from rftstream.transport.cursors import CursorMember, CursorReader, Cursors, PartitionBatch
from rftstream.transport.memory.log import MemoryTransaction, Subscriber
from rftstream.transport.memory.transactions import TransactionalLog


class _View:
    """The log with the interface that cursors read from."""

    def __init__(self, log: TransactionalLog, jumps: list[Jump], *, bodies: bool) -> None:
        self._log = log
        self._bodies = bodies
        self.jumped = jumps.append

    def spans(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, tuple[int, int]]:
        self._log.transactions.pass_time()
        known = self._log.partitions
        return {place: (known[place].begin, known[place].end) for place in partitions if place in known}

    def read(
        self, place: TopicPartition, offset: int, end: int, *, max_records: int, max_bytes: int, first_bytes: int | None
    ) -> PartitionBatch:
        partition = self._log.partitions[place]
        index = bisect_left(partition.offsets, offset)
        found: list[Record] = []
        num_bytes = 0
        room = first_bytes
        last = bisect_left(partition.offsets, end, index)
        for record in partition.records[index : min(last, index + max_records)]:
            size = len(record.key or b"") + (len(record.value or b"") if self._bodies else 0)
            if room is not None and num_bytes + size > room:
                return PartitionBatch(found, record.offset, num_bytes)
            room = max_bytes
            num_bytes += size
            found.append(record if self._bodies or record.value is None else _without_body(record))
        return PartitionBatch(found, end if len(found) < max_records else found[-1].offset + 1, num_bytes)


class MemoryReader(CursorReader):
    """`Reader` of a log in memory. `MemoryTransport.reader` makes it."""

    def __init__(
        self, log: TransactionalLog, positions: Mapping[TopicPartition, int], jumps: list[Jump], *, bodies: bool
    ) -> None:
        for place in positions:
            log.check_place(place)
        super().__init__(Cursors(positions))
        self._log = log
        self._view = _View(log, jumps, bodies=bodies)

    def poll(self, max_records: int = 1000, max_bytes: int = 16 << 20) -> list[Record]:
        with self._log.changed:
            return self._cursors.poll(self._view, max_records, max_bytes)

    def has_data(self) -> bool:
        """Return whether `poll` may have something. `MemoryTransport.wait` asks it."""
        return self._cursors.ready(self._view)


class MemoryMember(CursorMember):
    """`Member` of a group on a log in memory. `MemoryTransport.member` makes it, and it joins at once."""

    def __init__(
        self,
        log: TransactionalLog,
        group: str,
        topics: Collection[str],
        *,
        name: str,
        session_timeout_s: float,
        jumps: list[Jump],
        process: str = "",
    ) -> None:
        for topic in topics:
            log.topic(topic)
        super().__init__(Cursors({}), group=group, name=name)
        self._log = log
        self._process = process
        self._topics = frozenset(topics)
        self._session_timeout_s = session_timeout_s
        self._view = _View(log, jumps, bodies=True)
        self._generation = -1
        self._closed = False
        with log.changed:
            self._join()

    def poll(self, max_records: int = 1000, max_bytes: int = 16 << 20) -> list[Record]:
        with self._log.changed:
            self._keep_alive()
            return self._cursors.poll(self._view, max_records, max_bytes)

    def committed(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, Position]:
        self._log.at("question", self._process)
        with self._log.changed:
            self._log.transactions.await_stable(self._group)
            found = self._log.group(self._group).positions
            return choose_positions(found, partitions, group=self._group)

    def snapshot(self) -> Snapshot:
        """Return the partitions owned now, in the way of a client with its own thread. The generation is the newest
        one. Partitions that were lost meanwhile are left out, although `assignment` still names them."""
        self._log.at("snapshot", self._process)
        with self._log.changed:
            group = self._log.group(self._group)
            if self._member not in group.members:
                return Snapshot(self._group, dict(self._assignment), (self._member, self._generation))
            owned = {
                place: number
                for place, number in self._assignment.items()
                if group.owners.get(place) == self._member and group.numbers[place] == number
            }
            return Snapshot(self._group, owned, (self._member, group.generation))

    def working(self) -> AbstractContextManager[None]:
        """Return a context that does nothing, since a process that is paused here is paused as a whole."""
        return nullcontext()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with self._log.changed:
                self._log.leave(self._group, self._member)

    def has_data(self) -> bool:
        """Return whether `wait` should end: the assignment has changed, or there are records."""
        before = self._assignment
        self._keep_alive()
        return self._assignment is not before or self._cursors.ready(self._view)

    def _join(self) -> None:
        self._member = self._log.join(self._group, Subscriber(self._topics, self._log.clock(), self._session_timeout_s))
        self._refresh()

    def _keep_alive(self) -> None:
        if not self._log.beat(self._group, self._member):
            self._join()
        self._refresh()

    def _refresh(self) -> None:
        group = self._log.group(self._group)
        if group.generation == self._generation:
            return
        self._generation = group.generation
        assignment = {
            place: group.numbers[place] for place, owner in sorted(group.owners.items()) if owner == self._member
        }
        if assignment != self._assignment:
            self._cursors.forget([p for p, number in self._assignment.items() if assignment.get(p) != number])
            self._assignment = assignment


class MemoryProducer:
    """`Producer` of a log in memory. `MemoryTransport.producer` makes it.

    A commit goes through the phases of transactions.py, with fault points between them."""

    def __init__(self, log: TransactionalLog, process: str, transactional_id: str, timeout_s: float) -> None:
        self._log = log
        self._process = process
        self._id = transactional_id
        self._timeout_s = timeout_s
        self._epoch: int | None = None

    def start(self) -> None:
        self._log.at("before_start", self._process)
        with self._log.changed:
            self._epoch = self._log.transactions.start(self._id)
        self._log.at("after_start", self._process)

    def commit(
        self,
        records: Sequence[NewRecord],
        *,
        positions: Mapping[TopicPartition, Position] | None = None,
        group: str | None = None,
        snapshot: Snapshot | None = None,
    ) -> None:
        owner = check_commit(self._id, positions, group, snapshot, has_begun=self._epoch is not None)
        assert self._epoch is not None
        self._check_sizes(records, positions or {})
        if snapshot is not None:
            _check_owned(snapshot, positions or {})
        if not records and not positions:
            return  # As on Kafka, there is no empty transaction, so nothing shows whether this producer is fenced.
        self._log.at("before_commit", self._process)
        try:
            transaction = self._write(self._epoch, records, dict(positions or {}), owner, snapshot)
            self._end(self._epoch, transaction)
        except ProducerLost:
            self._epoch = None
            raise
        self._log.at("after_commit", self._process)

    def _write(
        self,
        epoch: int,
        records: Sequence[NewRecord],
        positions: dict[TopicPartition, Position],
        group: str | None,
        snapshot: Snapshot | None,
    ) -> MemoryTransaction:
        coordinator = self._log.transactions
        with self._log.changed:
            coordinator.check_epoch(self._id, epoch)
            transaction = coordinator.begin(self._id, self._timeout_s)
            coordinator.append(transaction, records)
            if positions and group is not None:
                try:
                    coordinator.add_positions(transaction, group, positions, snapshot)
                except AssignmentLost:
                    self._abort(transaction)
                    raise
        return transaction

    def _end(self, epoch: int, transaction: MemoryTransaction) -> None:
        coordinator = self._log.transactions
        try:
            self._log.at("in_commit", self._process)
        except TransactionAborted:
            with self._log.changed:
                coordinator.check_epoch(self._id, epoch)
                self._abort(transaction)
            raise
        except ProducerLost:
            # Its commit request may still arrive. The number of changes so far decides, which is as good as a random
            # choice.
            if self._log.num_changes % 2:
                transaction.commits_at = self._log.clock() + self._timeout_s * (self._log.num_changes % 20) / 20
            raise
        with self._log.changed:
            coordinator.check_epoch(self._id, epoch)
            coordinator.decide(transaction, committed=True)
            coordinator.mark(transaction, self._log.num_changes % (len(transaction.unmarked) + 1))
        try:
            self._log.at("marking", self._process)
        except ProducerLost:
            raise
        except TransportError:
            return
        with self._log.changed:
            coordinator.mark(transaction)

    def _abort(self, transaction: MemoryTransaction) -> None:
        self._log.transactions.decide(transaction, committed=False)
        self._log.transactions.mark(transaction)

    def close(self) -> None:
        self._epoch = None

    def _check_sizes(self, records: Sequence[NewRecord], positions: Mapping[TopicPartition, Position]) -> None:
        for record in records:
            limit = self._log.topic(record.topic).max_record_bytes
            self._log.check_place(TopicPartition(record.topic, record.partition))
            if record.num_bytes > limit:
                raise too_large(record, limit)
        for place, position in positions.items():
            self._log.check_place(place)
            check_metadata(place, position)


def _check_owned(snapshot: Snapshot, positions: Mapping[TopicPartition, Position]) -> None:
    missing = [place for place in positions if place not in snapshot.assignment]
    if missing:
        raise AssignmentLost(
            f"group {snapshot.group}, {', '.join(map(str, missing))}: not owned when the snapshot was taken; drop its"
            f" work"
        )


def _without_body(record: Record) -> Record:
    """Return the record without its value."""
    return Record(record.topic, record.partition, record.offset, record.timestamp_s, record.key, None, record.headers)
