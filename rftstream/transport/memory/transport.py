"""A log in memory, for tests and simulation. It keeps the same promises as the other transports, and is fast and
deterministic.

`MemoryLog` is the log, and `MemoryLog.connect()` returns the transport of one simulated process. With a manual clock no
call waits and nothing depends on real time. With the real clock threads can share a log, and `wait` blocks."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Collection, Mapping

from rftstream.contracts.records import TopicPartition
from rftstream.errors import ConfigError, PositionMissing
from rftstream.transport.base import Admin, Jump, Member, Position, Reader, TopicSettings
from rftstream.transport.checks import check_same_settings
from rftstream.transport.memory.clients import MemoryMember, MemoryProducer, MemoryReader
from rftstream.transport.memory.log import MemoryPartition
from rftstream.transport.memory.transactions import TransactionalLog

__all__ = ["MemoryLog", "MemoryTransport"]

TOMBSTONE_KEPT_S = 86_400.0
"""Seconds for which a tombstone is kept."""
_LOOK_AGAIN_S = 0.05


class MemoryAdmin:
    """`Admin` of a log in memory, for one simulated process. MemoryTransport makes it."""

    def __init__(self, log: TransactionalLog, process: str) -> None:
        self._log = log
        self._process = process

    def ensure_topics(self, topics: Mapping[str, TopicSettings]) -> None:
        log = self._log
        with log.changed:
            check_same_settings(log.settings, topics, otherwise="log")
            for name, settings in topics.items():
                if name not in log.settings:
                    log.settings[name] = settings
                    log.partitions.update({place: MemoryPartition() for place in log.places(name)})

    def topics(self) -> dict[str, TopicSettings]:
        return dict(self._log.settings)

    def begin_offsets(self, *topics: str) -> dict[TopicPartition, int]:
        self._log.at("question", self._process)
        return {place: self._log.partitions[place].begin for topic in topics for place in self._log.places(topic)}

    def end_offsets(
        self, topic: str, *, settled: bool = False, partitions: Collection[int] | None = None
    ) -> dict[TopicPartition, int]:
        self._log.at("question", self._process)
        places = [place for place in self._log.places(topic) if partitions is None or place.partition in partitions]
        with self._log.changed:
            self._log.transactions.await_marks(lambda one: not one.records.keys().isdisjoint(places))
            if settled:
                self._log.transactions.check_settled(places)
            return {place: self._log.partitions[place].end for place in places}

    def committed(self, group: str) -> dict[TopicPartition, Position]:
        self._log.at("question", self._process)
        with self._log.changed:
            self._log.transactions.await_stable(group)
            return dict(self._log.group(group).positions)

    def commit_initial(self, group: str, topics: Collection[str]) -> None:
        with self._log.changed:
            for topic in topics:
                for place in self._log.places(topic):
                    self._log.group(group).positions.setdefault(place, Position(0))

    def lag(self, group: str, topic: str) -> dict[TopicPartition, int]:
        positions, ends = self.committed(group), self.end_offsets(topic)
        with self._log.changed:
            return {
                place: max(
                    0, bisect_left(offsets, end) - bisect_left(offsets, positions.get(place, Position(0)).offset)
                )
                for place, end in ends.items()
                for offsets in [self._log.partitions[place].offsets]
            }

    def delete_before(self, offsets: Mapping[TopicPartition, int]) -> None:
        for place in offsets:
            self._log.check_place(place)
        for place, offset in offsets.items():
            self._log.at("before_delete", self._process)
            with self._log.changed:
                partition = self._log.partitions[place]
                if offset > partition.end:
                    raise PositionMissing(
                        f"{place}@{offset}: beyond the end of the log ({partition.end}); delete up to there"
                    )
                if offset > partition.begin:
                    partition.keep(lambda record, offset=offset: record.offset >= offset)  # type: ignore[misc]
                    partition.begin = offset
                    self._log.transactions.make_durable()  # later commits are lost before this one is
                    self._log.note_change()

    def compact(self, topic: str) -> None:
        """Compact as described for `Admin`. Tombstones are kept for a day, as in the embedded log."""
        if not self._log.topic(topic).compacted:
            raise ConfigError(f"topic {topic}: not a compacted one, compacting would lose records; see topics.py")
        with self._log.changed:
            forgotten_s = self._log.clock() - TOMBSTONE_KEPT_S
            for place in self._log.places(topic):
                partition = self._log.partitions[place]
                stable = partition.records[: bisect_left(partition.offsets, partition.end)]
                newest = {record.key: record.offset for record in stable}
                first = {record.key: record.offset for record in reversed(stable)}
                forgotten = {
                    record.offset
                    for record in stable
                    if record.value is None and record.timestamp_s < forgotten_s and first[record.key] == record.offset
                }
                gone = {
                    record.offset
                    for record in stable
                    if record.key is not None and (newest[record.key] != record.offset or record.offset in forgotten)
                }
                partition.keep(lambda record, gone=gone: record.offset not in gone)  # type: ignore[misc]
            self._log.transactions.make_durable()
            self._log.note_change()

    def delete_topics(self, topics: Collection[str]) -> None:
        log = self._log
        with log.changed:
            for topic in topics:
                for place in log.places(topic):
                    del log.partitions[place]
                    for group in log.groups.values():
                        group.positions.pop(place, None)
                del log.settings[topic]
            for group in log.groups.values():
                log.share_out_anew(group)

    def make_durable(self) -> None:
        with self._log.changed:
            self._log.transactions.make_durable()


class MemoryTransport:
    """`Transport` of one simulated process on a log in memory. `MemoryLog.connect` makes it."""

    def __init__(self, log: TransactionalLog, process: str) -> None:
        self._log = log
        self._process = process
        self._members: list[MemoryMember] = []
        self._jumps: list[Jump] = []
        self.admin: Admin = MemoryAdmin(log, process)

    def jumps(self) -> list[Jump]:
        jumps, self._jumps[:] = list(self._jumps), []
        return jumps

    def reader(self, positions: Mapping[TopicPartition, int], *, bodies: bool = True) -> MemoryReader:
        return MemoryReader(self._log, positions, self._jumps, bodies=bodies)

    def member(
        self, group: str, topics: Collection[str], *, name: str, session_timeout_s: float = 10.0
    ) -> MemoryMember:
        member = MemoryMember(
            self._log,
            group,
            topics,
            name=name,
            session_timeout_s=session_timeout_s,
            jumps=self._jumps,
            process=self._process,
        )
        self._members.append(member)
        return member

    def producer(self, transactional_id: str, *, timeout_s: float = 10.0) -> MemoryProducer:
        return MemoryProducer(self._log, self._process, transactional_id, timeout_s)

    def wait(self, sources: Collection[Reader | Member], timeout_s: float) -> None:
        """Wait as described for `Transport`. With a manual clock it returns at once, since the driver of the clock
        decides when time passes."""
        own = [source for source in sources if isinstance(source, MemoryReader | MemoryMember)]
        deadline = time.monotonic() + timeout_s
        with self._log.changed:
            # All sources are asked, since the call keeps a membership alive.
            while True not in [source.has_data() for source in own]:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not self._log.real_time:
                    return
                self._log.changed.wait(min(left_s, _LOOK_AGAIN_S))

    def close(self) -> None:
        """Let the members leave. A simulated crash does not call this."""
        for member in self._members:
            member.close()


class MemoryLog(TransactionalLog):
    """A log in memory. It holds the log's state (LogState). Each process that uses it calls `connect` first."""

    def connect(self, process: str = "") -> MemoryTransport:
        """Return the transport of one simulated process. `process` is its name in calls of `fault`."""
        return MemoryTransport(self, process)
