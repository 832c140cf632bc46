"""Transactions on a log in memory. They have the phases of Kafka's transactions.

open      its records have offsets but are not visible: readers stop at the first open transaction of each partition;
          its positions are pending, and the group's positions cannot be read meanwhile
decided   committed or aborted, for good; its producer may not know it yet
marked    partition by partition: its records are visible now, or skipped

An open transaction is aborted when its producer's id starts anew or its time is up. If nobody has waited for the
markers of a decided transaction, they are written at the same two moments.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence

from rftstream.contracts.records import NewRecord, Record, TopicPartition
from rftstream.errors import AssignmentLost, ProducerLost, TransportError
from rftstream.transport.base import Position, Snapshot
from rftstream.transport.memory.log import LogState, MemoryTransaction

MARKS_S = 0.5
"""Seconds from the decision to the markers, if nobody waits for them."""


class Coordinator:
    """The transactions of a log in memory. TransactionalLog makes it.

    Producers call `start`, then for each transaction `check_epoch`, `begin`, `append`, `add_positions`, `decide` and
    `mark`. All calls are made under the log's lock."""

    def __init__(self, log: LogState) -> None:
        self._log = log
        self._epochs: dict[str, int] = {}
        self._unfinished: dict[str, MemoryTransaction] = {}
        self.history: list[MemoryTransaction] = []
        """The committed transactions, in the order of the decisions."""
        self.num_durable = 0
        """Number of transactions, from the first one on, that certainly survive a loss of power."""

    # -- producers

    def start(self, transactional_id: str) -> int:
        """End the open transaction of the id, and return the id's new epoch. Producers with an older epoch are
        fenced."""
        self.pass_time()
        self._end(transactional_id)
        epoch = self._epochs[transactional_id] = self._epochs.get(transactional_id, 0) + 1
        self.make_durable()
        return epoch

    def check_epoch(self, transactional_id: str, epoch: int) -> None:
        """Raise ProducerLost if the epoch is not the newest one of the id."""
        self.pass_time()
        newest = self._epochs.get(transactional_id)
        if newest != epoch:
            raise ProducerLost(
                f"producer {transactional_id}: fenced or timed out, epoch {newest} has begun, its own is {epoch};"
                f" read `control` to see who took over"
            )

    def begin(self, transactional_id: str, timeout_s: float) -> MemoryTransaction:
        """Begin a transaction. It is aborted if it is still open after `timeout_s`."""
        self._end(transactional_id)  # the next transaction waits for the markers of the last
        now = self._log.clock()
        transaction = MemoryTransaction(transactional_id, now, now + timeout_s)
        self._unfinished[transactional_id] = transaction
        return transaction

    def _end(self, transactional_id: str) -> None:
        """Abort the open transaction of the id, if any, and write the markers of the last one."""
        transaction = self._unfinished.get(transactional_id)
        if transaction is not None:
            if transaction.committed is None:
                self.decide(transaction, committed=False)
            self.mark(transaction)

    def make_durable(self) -> None:
        """Make all commits so far survive a loss of power."""
        self.num_durable = len(self.history)

    def lose(self, num_kept: int) -> list[MemoryTransaction]:
        """Keep the first `num_kept` transactions, and return the others, which are lost. Open transactions are
        aborted."""
        for transaction in list(self._unfinished.values()):
            self._end(transaction.transactional_id)
        lost = self.history[num_kept:]
        del self.history[num_kept:]
        return lost

    # -- phases

    def append(self, transaction: MemoryTransaction, records: Sequence[NewRecord]) -> None:
        """Write records of the transaction. They take offsets, but are not visible yet."""
        for new in records:
            place = TopicPartition(new.topic, new.partition)
            partition = self._log.partitions[place]
            own = transaction.records.get(place)
            if own is None:
                own = transaction.records[place] = []
                transaction.unmarked.append(place)
                partition.open[id(transaction)] = partition.written
            at = transaction.began_at
            own.append(Record(new.topic, new.partition, partition.written, at, new.key, new.value, new.headers))
            partition.written += 1

    def add_positions(
        self,
        transaction: MemoryTransaction,
        group: str,
        positions: dict[TopicPartition, Position],
        snapshot: Snapshot | None,
    ) -> None:
        """Add positions to the transaction. The snapshot's generation must be the current one; as on Kafka, owners are
        not checked."""
        if snapshot is not None:
            self._check_generation(snapshot, positions)
        transaction.group, transaction.positions = group, positions
        transaction.unmarked.append(group)
        self._log.group(group).pending.append(transaction)

    def _check_generation(self, snapshot: Snapshot, positions: Iterable[TopicPartition]) -> None:
        group = self._log.group(snapshot.group)
        member, generation = snapshot.token if isinstance(snapshot.token, tuple) else (None, None)
        if member not in group.members or generation != group.generation:
            raise AssignmentLost(
                f"group {snapshot.group}: the transaction was made by member {member} in generation {generation}, it"
                f" is {group.generation} now; publish what is still owned of {', '.join(map(str, positions))} anew"
            )

    def decide(self, transaction: MemoryTransaction, *, committed: bool) -> None:
        """Commit or abort the transaction. Readers see it when it is marked."""
        transaction.committed = committed
        transaction.ends_at = self._log.clock() + MARKS_S
        if committed:
            self.history.append(transaction)

    def mark(self, transaction: MemoryTransaction, num: int | None = None) -> None:
        """Write the markers of the transaction in `num` more places; None for all of them."""
        for where in transaction.unmarked[:num]:
            if isinstance(where, str):
                group = self._log.group(where)
                group.pending.remove(transaction)
                if transaction.committed:
                    group.positions.update(transaction.positions)
            elif where in self._log.partitions:  # its topic may have been deleted
                partition = self._log.partitions[where]
                del partition.open[id(transaction)]
                if transaction.committed:
                    _insert(partition.records, partition.offsets, transaction.records[where])
                partition.written += self._log.marks
                partition.end = min(partition.open.values(), default=partition.written)
        del transaction.unmarked[:num]
        if not transaction.unmarked and self._unfinished.get(transaction.transactional_id) is transaction:
            del self._unfinished[transaction.transactional_id]
        self._log.note_change()

    # -- time

    def pass_time(self) -> None:
        """End the transactions whose time is up."""
        if not self._unfinished:
            return
        now = self._log.clock()
        for transaction in list(self._unfinished.values()):
            if transaction.committed is None and (at := transaction.commits_at) is not None and at <= now:
                self.decide(transaction, committed=True)
                transaction.ends_at = now
            if transaction.ends_at <= now:
                if transaction.committed is None:
                    # This fences its producer, since another epoch has begun.
                    self._epochs[transaction.transactional_id] += 1
                self._end(transaction.transactional_id)

    def await_marks(self, concerns: Callable[[MemoryTransaction], bool]) -> None:
        """Write the markers of the decided transactions that `concerns` selects. A client that requests an end or a
        position waits for these."""
        self.pass_time()
        for transaction in [one for one in self._unfinished.values() if one.committed is not None]:
            if concerns(transaction):
                self.mark(transaction)

    def check_settled(self, places: Collection[TopicPartition]) -> None:
        """Raise TransportError if an open transaction hides records of one of these partitions."""
        hidden = [place for place in places if (one := self._log.partitions[place]).end < one.written]
        if hidden:
            raise TransportError(
                f"{', '.join(map(str, hidden))}: a transaction is open and hides what was committed after it began;"
                f" ask again when it is through or its time is up"
            )

    def await_stable(self, group: str) -> None:
        """Wait until no commit of the group's positions is pending. With a manual clock time does not pass here, so the
        call raises TransportError instead of waiting."""
        while True:
            self.await_marks(lambda transaction: transaction.group == group)
            if not self._log.group(group).pending:
                return
            if not self._log.real_time:
                raise TransportError(f"group {group}: a commit of its positions is pending; ask again")
            self._log.changed.wait(0.05)


def _insert(records: list[Record], offsets: list[int], new: Sequence[Record]) -> None:
    """Insert records by offset, since other transactions may have committed later offsets before."""
    index = len(offsets) if not offsets or offsets[-1] < new[0].offset else bisect_left(offsets, new[0].offset)
    records[index:index] = new
    offsets[index:index] = [record.offset for record in new]


class TransactionalLog(LogState):
    """A log in memory with the coordinator of its transactions."""

    def __init__(
        self, clock: Callable[[], float] = time.time, *, real_time: bool | None = None, marks: bool = False
    ) -> None:
        super().__init__(clock, real_time=real_time, marks=marks)
        self.transactions = Coordinator(self)

    def lose_power(self, num_kept: int) -> None:
        """Simulate a loss of power of an embedded log: only the first `num_kept` transactions remain. The caller must
        keep at least `transactions.num_durable` of them, and must not use earlier clients."""
        with self.changed:
            lost = self.transactions.lose(num_kept)
            for place in {place for transaction in lost for place in transaction.records}:
                if place in self.partitions:
                    gone = {record.offset for one in lost for record in one.records.get(place, ())}
                    partition = self.partitions[place]
                    partition.keep(lambda record, gone=gone: record.offset not in gone)  # type: ignore[misc]
                    # Nobody has read beyond the first of them, since it was not decided yet.
                    left = partition.offsets[-1] + 1 if partition.offsets else 0
                    partition.end = partition.written = max(partition.begin, left, min(gone))
            for group in self.groups.values():
                group.positions = {place: Position(0) for place in group.positions}
            for transaction in self.transactions.history:
                if transaction.group is not None:
                    self.group(transaction.group).positions.update(transaction.positions)
            self.note_change()
