"""The reader and the producer of an embedded log."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial

from rftstream import faults
from rftstream.contracts.records import NewRecord, Record, TopicPartition
from rftstream.errors import ProducerLost, TransactionAborted
from rftstream.transport.base import Position, Snapshot
from rftstream.transport.checks import check_commit, check_metadata, too_large
from rftstream.transport.cursors import CursorReader, Cursors, PartitionBatch
from rftstream.transport.embedded.groups import check_ownership
from rftstream.transport.embedded.store import OFFSET_BITS, Mark, Store, pack_headers

RecordBody = tuple[bytes | None, bytes | None, bytes | None]
"""Key, packed headers and value of a record."""


class StoreView:
    """A store with the interface that cursors read from, with or without the values of records."""

    def __init__(self, store: Store, *, bodies: bool) -> None:
        self.spans = store.spans
        self.jumped = store.jumps.append
        self._read = partial(store.read_partition, bodies=bodies)

    def read(
        self, place: TopicPartition, offset: int, end: int, *, max_records: int, max_bytes: int, first_bytes: int | None
    ) -> PartitionBatch:
        """Read records as `PartitionLog.read` says."""
        return self._read(place, offset, end, max_records=max_records, max_bytes=max_bytes, first_bytes=first_bytes)


class LogCursors(Cursors):
    """Cursors over an embedded log. They know without reading when the log has not changed.

    EmbeddedReader and EmbeddedMember make them, and call `fetch` and `has_data` in place of `poll` and `ready`."""

    def __init__(
        self,
        store: Store,
        positions: Mapping[TopicPartition, int],
        *,
        topics: Collection[str],
        bodies: bool = True,
    ) -> None:
        """`topics` are the topics of all positions that it will ever have."""
        super().__init__(positions)
        self._store, self._topics = store, topics
        self._view = StoreView(store, bodies=bodies)
        self._idle_mark: Mark | None = None
        """The state of the log in which nothing was left to read."""

    def seek(self, place: TopicPartition, offset: int) -> None:
        """Make `offset` the next one to read of the partition."""
        super().seek(place, offset)
        self.wake()

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Deliver from these partitions again."""
        super().resume(partitions)
        self.wake()

    def wake(self) -> None:
        """Read the log next time even if nobody has committed. Called after a seek, a resume or another assignment."""
        self._idle_mark = None

    def has_data(self) -> bool:
        """Return whether `fetch` may return something or raise."""
        mark = self._store.mark(self._topics)
        if mark == self._idle_mark:
            return False
        if self.ready(self._view):
            return True
        self._idle_mark = mark
        return False

    def fetch(self, max_records: int, max_bytes: int) -> list[Record]:
        """Return records as `Cursors.poll` does, all from one state of the log."""
        # The mark is taken before reading, since a commit meanwhile changes the mark.
        mark = self._store.mark(self._topics)
        if mark == self._idle_mark or max_records <= 0:  # without room nothing is found, though there may be records
            return []
        with self._store.read():
            found = self.poll(self._view, max_records, max_bytes)
        if not found:
            self._idle_mark = mark
        return found


class EmbeddedReader(CursorReader):
    """`Reader` of an embedded log. `EmbeddedTransport.reader` makes it."""

    _cursors: LogCursors

    def __init__(self, store: Store, positions: Mapping[TopicPartition, int], *, bodies: bool) -> None:
        for place in positions:
            store.partition_id(place)
        self.topics = frozenset(place.topic for place in positions)
        super().__init__(LogCursors(store, positions, topics=self.topics, bodies=bodies))

    def poll(self, max_records: int = 1000, max_bytes: int = 16 << 20) -> list[Record]:
        return self._cursors.fetch(max_records, max_bytes)

    def has_data(self) -> bool:
        """Return whether `poll` may have something. `EmbeddedTransport.wait` asks it."""
        return self._cursors.has_data()


class EmbeddedProducer:
    """`Producer` of an embedded log. A commit is one SQLite transaction under the write lock.

    `EmbeddedTransport.producer` makes it. `start` gives its transactional id the next epoch. A commit checks that no
    newer epoch has begun."""

    def __init__(self, store: Store, transactional_id: str) -> None:
        self._store = store
        self._id = transactional_id
        self._epoch: int | None = None

    def start(self) -> None:
        faults.at("before_start")
        # Durable, since two producers could get the same epoch if a loss of power undid it.
        with self._store.write(durable=True) as db:
            (self._epoch,) = db.execute(
                "INSERT INTO producers VALUES (?, 1) ON CONFLICT DO UPDATE SET epoch = epoch + 1 RETURNING epoch",
                (self._id,),
            ).fetchone()
        faults.at("after_start")

    def commit(
        self,
        records: Sequence[NewRecord],
        *,
        positions: Mapping[TopicPartition, Position] | None = None,
        group: str | None = None,
        snapshot: Snapshot | None = None,
    ) -> None:
        owner = check_commit(self._id, positions, group, snapshot, has_begun=self._epoch is not None)
        rows = self._encoded(records)
        moved = self._moved(positions) if positions else []
        timestamp_s = self._store.clock()
        topics = {record.topic for record in records}
        faults.at("before_commit")
        with self._store.write(topics=topics) as db:
            found = db.execute("SELECT epoch FROM producers WHERE transactional_id = ?", (self._id,)).fetchone()
            if found is None or found[0] != self._epoch:
                self._epoch, lost = None, self._epoch
                raise ProducerLost(
                    f"producer {self._id}: fenced, epoch {found and found[0]} has begun, its own is {lost};"
                    f" read `control` to see who took over"
                )
            if snapshot is not None and positions:
                check_ownership(db, snapshot, [(place, row[0]) for place, row in zip(positions, moved, strict=True)])
            for partition_id, bodies in rows.items():
                found = db.execute(
                    "UPDATE partitions SET next_offset = next_offset + ? WHERE id = ? RETURNING next_offset",
                    (len(bodies), partition_id),
                ).fetchone()
                if found is None:
                    raise TransactionAborted(
                        f"producer {self._id}: the topic of {self._store.place(partition_id)} was deleted meanwhile;"
                        f" publish again to see which topics there are"
                    )
                first = partition_id << OFFSET_BITS | found[0] - len(bodies)
                db.executemany(
                    "INSERT INTO records VALUES (?, ?, ?, ?, ?)",
                    [(row_id, timestamp_s, *body) for row_id, body in enumerate(bodies, first)],
                )
            if moved:
                db.executemany(
                    "INSERT OR REPLACE INTO positions(group_name, partition_id, offset, metadata) VALUES (?, ?, ?, ?)",
                    [(owner, *move) for move in moved],
                )
            faults.at("in_commit")
        faults.at("after_commit")
        self._store.wakeup_pipes.wake_topics(topics)

    def close(self) -> None:
        self._epoch = None

    def _encoded(self, records: Collection[NewRecord]) -> dict[int, list[RecordBody]]:
        """Return the rows to insert, by partition id. Called before the lock is taken."""
        rows: dict[int, list[RecordBody]] = {}
        topics = {name: self._store.topic(name) for name in {record.topic for record in records}}
        topic, limit = "", 0
        ids: tuple[int, ...] = ()
        for record in records:
            if record.topic != topic:
                topic = record.topic
                ids, limit = topics[topic].ids, topics[topic].settings.max_record_bytes
            key, value, partition = record.key, record.value, record.partition
            headers = pack_headers(record.headers) if record.headers else None
            # Packed headers are at least as long as their counted size, so most records need no exact count.
            size = len(key) if key is not None else 0
            if value is not None:
                size += len(value)
            if headers is not None:
                size += len(headers)
            if size > limit and record.num_bytes > limit:
                raise too_large(record, limit)
            if not 0 <= partition < len(ids):
                self._store.partition_id(TopicPartition(topic, partition))
            bodies = rows.get(ids[partition])
            if bodies is None:
                bodies = rows[ids[partition]] = []
            bodies.append((key, headers, value))
        return rows

    def _moved(self, positions: Mapping[TopicPartition, Position]) -> list[tuple[int, int, str]]:
        """Return the positions to commit as (partition id, offset, metadata)."""
        moved = []
        for place, position in positions.items():
            check_metadata(place, position)
            moved.append((self._store.partition_id(place), position.offset, position.metadata))
        return moved


def all_positions(store: Store, group: str) -> dict[TopicPartition, Position]:
    """Return all positions of a group, for topics that exist."""
    rows = store.select("SELECT partition_id, offset, metadata FROM positions WHERE group_name = ?", (group,))
    return {
        place: Position(offset, metadata)
        for partition_id, offset, metadata in rows
        if (place := store.place(partition_id)) is not None
    }
