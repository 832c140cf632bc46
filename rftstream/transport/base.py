"""What the runtime asks of a log: five small things, the same over SQLite, Kafka and memory.

- `Reader`    reads explicit positions, without a group (single roles, followers, tools);
- `Member`    is one of several that share the partitions of some topics (concurrent roles);
- `Producer`  makes transactions: records and positions become visible together or not at all;
- `Admin`     topics, ends of partitions, committed positions, lag, deletion, compaction;
- `Transport` makes these and can wait until one of them has something.

Promises that every transport keeps (the conformance suite holds it to them):

1. Records of a partition have growing offsets and are seen in that order. Offsets may have gaps: a compacted or
   deleted record, on Kafka also transaction markers. `position` is the next offset to look at, and moves over gaps.
2. Nothing of a transaction is visible before it commits; afterwards all of it is, in every partition.
3. A commit either returns, or raises. `TransactionAborted`, `AssignmentLost`, `LogFull`, `RecordTooLarge`: certainly
   nothing is visible, and the producer can be used on. `ProducerLost`: it may have been committed, or a newer
   producer holds the id; the producer is of no more use until `start` was called again.
4. `Producer.start` ends what an older producer of the same id had open and fences it: that one's later commits
   raise `ProducerLost`.
5. A position committed for a partition by a member that does not own it any more is refused (`AssignmentLost`),
   also when the partition went away and came back: ownership is an assignment, and assignments are numbered.
6. `poll` never blocks and never raises for a passing fault; `wait` blocks, without spinning.

Topic names here are bare (`tasks`); a transport is opened for one run and adds the run's prefix itself if it needs
one. Nothing here is thread-safe: one thread uses a transport and what it made.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from rftstream.contracts.records import NewRecord, Record, TopicPartition

MAX_METADATA_BYTES = 4096
"""Of the metadata beside a position, UTF-8 (Kafka's default limit)."""


class Position(NamedTuple):
    """The next offset to read, and up to MAX_METADATA_BYTES that the reader keeps beside it."""

    offset: int
    metadata: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSettings:
    partitions: int
    compacted: bool = False
    max_record_bytes: int = 8 * 1024 * 1024
    """key + value + headers of one record (NewRecord.num_bytes)."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a member owned at one moment; a transaction that commits positions of a group carries one.

    Taken *before* the results are collected: a later commit is refused if any of its partitions has changed hands
    since, even if they came back (promise 5)."""

    group: str
    assignment: Mapping[TopicPartition, int]
    """Partition -> number of the assignment; a partition that comes back has another number."""
    token: object = None
    """The transport's own: generation, member id."""


class Reader(Protocol):
    """Reads by explicit positions; sees everything from there on, belongs to no group."""

    def poll(self, max_records: int = 1000, max_bytes: int = 16 << 20) -> list[Record]:
        """What is there now, fairly over the partitions; at least one record if there is any, however large."""

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Raises PositionMissing on the next `poll` if the offset lies beyond the end of the partition.

        An offset before the first one kept is moved to that one."""

    def position(self, partition: TopicPartition) -> int: ...

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        """No delivery until `resume`: what cannot be dealt with now stays on the log."""

    def resume(self, partitions: Collection[TopicPartition]) -> None: ...

    def close(self) -> None: ...


class Member(Protocol):
    """One of the members of a group. The transport keeps it alive through `poll` and `wait`; a member that does
    neither for the session time-out loses its partitions to the others."""

    @property
    def name(self) -> str: ...

    def assignment(self) -> Mapping[TopicPartition, int]:
        """What this member owns, as of the last `poll` or `wait`: partition -> number of the assignment."""

    def poll(self, max_records: int = 1000, max_bytes: int = 16 << 20) -> list[Record]:
        """As Reader.poll, of the owned partitions that are not paused. A newly owned partition delivers nothing
        until it was positioned by `seek`: first ask `committed`, then say where to begin."""

    def seek(self, partition: TopicPartition, offset: int) -> None: ...

    def position(self, partition: TopicPartition) -> int:
        """Next offset to be delivered; moves over gaps, so that with nothing open it is what to commit."""

    def committed(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, Position]:
        """The group's stable positions (no commit of them pending). PositionMissing if one was never committed."""

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        """No delivery until `resume`; membership goes on."""

    def resume(self, partitions: Collection[TopicPartition]) -> None: ...

    def snapshot(self) -> Snapshot: ...

    def close(self) -> None:
        """Leaves the group at once."""


class Producer(Protocol):
    def start(self) -> None:
        """Fences every earlier producer of this transactional id and ends what it had open."""

    def commit(
        self,
        records: Sequence[NewRecord],
        *,
        positions: Mapping[TopicPartition, Position] | None = None,
        group: str | None = None,
        snapshot: Snapshot | None = None,
    ) -> None:
        """One transaction: all records and positions, or nothing.

        `positions` are committed for `group` (single roles) or for `snapshot.group` (members; then each partition
        must still be under the snapshot's assignment). RecordTooLarge also for metadata over its limit."""

    def close(self) -> None: ...


class Admin(Protocol):
    def ensure_topics(self, topics: Mapping[str, TopicSettings]) -> None:
        """Makes what is missing. ConfigError if one exists with other settings."""

    def topics(self) -> dict[str, TopicSettings]: ...

    def begin_offsets(self, topic: str) -> dict[TopicPartition, int]:
        """First offset kept, of each partition."""

    def end_offsets(
        self, topic: str, *, settled: bool = False, partitions: Collection[int] | None = None
    ) -> dict[TopicPartition, int]:
        """Offset after the last committed record that can be read, of each partition or of some.

        On Kafka a transaction that is open hides what others committed after it began. `settled`: TransportError
        while there is one, to be asked again; for who must know the newest."""

    def committed(self, group: str) -> dict[TopicPartition, Position]:
        """All positions of a group."""

    def commit_initial(self, group: str, topics: Collection[str]) -> None:
        """Position 0 for every partition of the topics that has none yet in the group."""

    def lag(self, group: str, topic: str) -> dict[TopicPartition, int]:
        """*Records* from the group's committed position on: not offsets, so gaps do not count."""

    def delete_before(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Deletes the records before these offsets; offsets of the others stay. PositionMissing beyond the end."""

    def compact(self, topic: str) -> None:
        """Keeps the newest record of each key now, where a log does not do so by itself. A tombstone is kept like
        any newest record, for a day at least. ConfigError for a topic that is not compacted."""

    def delete_topics(self, topics: Collection[str]) -> None: ...

    def make_durable(self) -> None:
        """Everything committed so far survives the loss of power. TransportError if that cannot be had."""


class Transport(Protocol):
    admin: Admin

    def reader(self, positions: Mapping[TopicPartition, int], *, bodies: bool = True) -> Reader: ...

    def member(self, group: str, topics: Collection[str], *, name: str, session_timeout_s: float = 10.0) -> Member: ...

    def producer(self, transactional_id: str, *, timeout_s: float = 10.0) -> Producer: ...

    def wait(self, sources: Collection[Reader | Member], timeout_s: float) -> None:
        """Until one of the sources may have something for `poll` (records, another assignment), or the time is up.

        May return early."""

    def close(self) -> None: ...
