"""Topics, positions, lag and retention of an embedded log.

A tombstone outlives the compaction that removes the record it withdraws, so that a reader that was away still sees it.
A compaction removes the tombstone itself once it is older than a day (Kafka's default) and no older record of its key
exists. Records without a key are kept."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rftstream.contracts.records import TopicPartition
from rftstream.errors import ConfigError, PositionMissing
from rftstream.transport.base import Position, TopicSettings
from rftstream.transport.checks import check_same_settings
from rftstream.transport.embedded.clients import all_positions
from rftstream.transport.embedded.store import OFFSET_BITS, Store
from rftstream.transport.embedded.wakeup import is_dead

TOMBSTONE_KEPT_S = 86_400.0
"""Seconds for which a tombstone is kept."""

DELETED_AT_ONCE = 2000
"""Most records that one transaction deletes, since no other process can write meanwhile."""


class EmbeddedAdmin:
    """`Admin` of an embedded log. EmbeddedTransport makes it. It reads and writes the SQLite file directly."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def ensure_topics(self, topics: Mapping[str, TopicSettings]) -> None:
        existing = self.topics()
        check_same_settings(existing, topics, otherwise="run folder")
        if all(name in existing for name in topics):
            return
        with self._store.write() as db:
            for name, settings in topics.items():
                made = db.execute(
                    "INSERT INTO topics VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
                    (name, settings.partitions, settings.compacted, settings.max_record_bytes),
                ).rowcount
                if made:
                    db.executemany(
                        "INSERT INTO partitions(topic, partition) VALUES (?, ?)",
                        [(name, partition) for partition in range(settings.partitions)],
                    )
        self.ensure_topics(topics)  # another process may have made one of them meanwhile, with other settings

    def topics(self) -> dict[str, TopicSettings]:
        return {name: row.settings for name, row in self._store.load_topics().items()}

    def begin_offsets(self, *topics: str) -> dict[TopicPartition, int]:
        return {place: span[0] for topic in topics for place, span in self._spans(topic).items()}

    def end_offsets(
        self, topic: str, *, settled: bool = False, partitions: Collection[int] | None = None
    ) -> dict[TopicPartition, int]:
        return {
            place: span[1]
            for place, span in self._spans(topic).items()
            if partitions is None or place.partition in partitions
        }

    def committed(self, group: str) -> dict[TopicPartition, Position]:
        return all_positions(self._store, group)

    def commit_initial(self, group: str, topics: Collection[str]) -> None:
        ids = [partition_id for topic in topics for partition_id in self._store.topic(topic).ids]
        with self._store.write() as db:
            db.executemany(
                "INSERT INTO positions VALUES (?, ?, 0, '') ON CONFLICT DO NOTHING",
                [(group, partition_id) for partition_id in ids],
            )

    def members(self, groups: Collection[str]) -> dict[str, list[str]]:
        """Return the names of the living members of each group. A member is alive if its pipe has a reader. A member
        without a pipe is alive if its last heartbeat is not older than its session time-out."""
        now_s = self._store.clock()
        found: dict[str, list[str]] = {group: [] for group in groups}
        for group, name, pipe, heartbeat_s, timeout_s in self._store.select(
            "SELECT group_name, name, bell, heartbeat_s, session_timeout_s FROM members ORDER BY id"
        ):
            alive = not is_dead(pipe) if pipe else abs(now_s - heartbeat_s) <= timeout_s
            if alive and group in found:
                found[group].append(name)
        return found

    def lag(self, group: str, topic: str) -> dict[TopicPartition, int]:
        ids = self._store.topic(topic).ids
        positions = self.committed(group)
        lag = {}
        with self._store.read() as db:
            for partition, partition_id in enumerate(ids):
                place = TopicPartition(topic, partition)
                begin, end, num_removed = db.execute(
                    "SELECT begin_offset, next_offset, num_removed FROM partitions WHERE id = ?", (partition_id,)
                ).fetchone()
                start = max(begin, positions.get(place, Position(0)).offset)
                if num_removed and start < end:
                    base = partition_id << OFFSET_BITS
                    (lag[place],) = db.execute(
                        "SELECT count(*) FROM records WHERE id >= ? AND id < ?", (base + start, base + end)
                    ).fetchone()
                else:
                    # There are no gaps here, so the difference of offsets is the count.
                    lag[place] = max(0, end - start)
        return lag

    def delete_before(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Delete records as described for `Admin`, in slices. The file does not shrink: SQLite keeps the pages and
        reuses them for new records."""
        ids = {place: self._store.partition_id(place) for place in offsets}
        for place, offset in offsets.items():
            while self._delete_some(place, ids[place], offset):
                pass  # other processes can write between two slices

    def _delete_some(self, place: TopicPartition, partition_id: int, offset: int) -> bool:
        """Delete a slice of the records before the offset. Return whether more are left."""
        base = partition_id << OFFSET_BITS
        with self._store.write() as db:
            begin, end = db.execute(
                "SELECT begin_offset, next_offset FROM partitions WHERE id = ?", (partition_id,)
            ).fetchone()
            if offset > end:
                raise PositionMissing(f"{place}@{offset}: beyond the end of the log ({end}); delete up to there")
            if offset <= begin:
                return False
            row = db.execute(
                "SELECT id FROM records WHERE id >= ? AND id < ? ORDER BY id LIMIT 1 OFFSET ?",
                (base + begin, base + offset, DELETED_AT_ONCE),
            ).fetchone()
            upto = offset if row is None else row[0] - base
            num_deleted = db.execute(
                "DELETE FROM records WHERE id >= ? AND id < ?", (base + begin, base + upto)
            ).rowcount
            db.execute(
                "UPDATE partitions SET begin_offset = ?, num_removed = num_removed - ? WHERE id = ?",
                (upto, upto - begin - num_deleted, partition_id),
            )
            return bool(upto < offset)

    def compact(self, topic: str) -> None:
        row = self._store.topic(topic)
        if not row.settings.compacted:
            raise ConfigError(f"topic {topic}: not a compacted one, compacting would lose records; see topics.py")
        forgotten_s = self._store.clock() - TOMBSTONE_KEPT_S
        for partition_id in row.ids:
            base = partition_id << OFFSET_BITS
            with self._store.write() as db:
                newest: dict[bytes, int] = {}
                old_tombstones: dict[bytes, int] = {}
                gone: list[tuple[int]] = []
                has_older: set[bytes] = set()
                for row_id, key, is_tombstone, timestamp_s in db.execute(
                    "SELECT id, key, value IS NULL, timestamp_s FROM records WHERE id >= ? AND id < ? ORDER BY id",
                    (base, base + (1 << OFFSET_BITS)),
                ):
                    if key is None:
                        continue
                    if key in newest:
                        gone.append((newest[key],))
                        has_older.add(key)
                        old_tombstones.pop(key, None)
                    newest[key] = row_id
                    if is_tombstone and timestamp_s < forgotten_s:
                        old_tombstones[key] = row_id
                gone += [(row_id,) for key, row_id in old_tombstones.items() if key not in has_older]
                db.executemany("DELETE FROM records WHERE id = ?", gone)
                db.execute(
                    "UPDATE partitions SET num_removed = num_removed + ? WHERE id = ?", (len(gone), partition_id)
                )

    def delete_topics(self, topics: Collection[str]) -> None:
        for topic in topics:
            ids = [(partition_id,) for partition_id in self._store.topic(topic).ids]
            with self._store.write() as db:
                for (partition_id,) in ids:
                    base = partition_id << OFFSET_BITS
                    db.execute("DELETE FROM records WHERE id >= ? AND id < ?", (base, base + (1 << OFFSET_BITS)))
                db.executemany("DELETE FROM positions WHERE partition_id = ?", ids)
                db.executemany("DELETE FROM assignments WHERE partition_id = ?", ids)
                db.executemany("DELETE FROM partitions WHERE id = ?", ids)
                db.execute("DELETE FROM topics WHERE name = ?", (topic,))
                # Members read their assignment again.
                db.execute("UPDATE groups SET generation = generation + 1")
        self._store.load_topics()

    def make_durable(self) -> None:
        # A commit that waits for the disk also makes everything written to the same file before it durable.
        with self._store.write(durable=True) as db:
            db.execute("UPDATE durable SET times = times + 1")

    def _spans(self, topic: str) -> dict[TopicPartition, tuple[int, int]]:
        places = [TopicPartition(topic, partition) for partition in range(len(self._store.topic(topic).ids))]
        return self._store.spans(places)
