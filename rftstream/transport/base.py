"""The interface of a log for the service loop: five small protocols, the same over SQLite, Kafka and memory.

- `Reader`    reads from explicit positions, without a group (single roles, followers, tools);
- `Member`    shares the partitions of some topics with the other members of its group (concurrent roles);
- `Producer`  makes transactions: records and positions become visible together or not at all;
- `Admin`     knows topics, ends of partitions, committed positions and lag, and deletes and compacts;
- `Transport` makes these and waits until one of them has something.

Every transport keeps these promises, and the conformance suite checks them:

1. Records of a partition have growing offsets and are read in that order. Offsets may have gaps: a compacted or deleted
   record, on Kafka also transaction markers. `position` is the next offset to read, and moves over gaps.
2. Before a transaction commits, none of it is visible; afterwards all of it is, in every partition.
3. A commit either returns or raises. After `TransactionAborted`, `AssignmentLost`, `LogFull` or `RecordTooLarge`
   certainly nothing is visible, and the producer can be used further. After `ProducerLost` the transaction may have
   been committed, or a newer producer has the id; the producer is unusable until `start` is called again.
4. `Producer.start` ends the open transaction of an older producer with the same id and fences that producer: its later
   commits raise `ProducerLost`.
5. If a member commits a position for a partition that it no longer owns, the commit is refused (`AssignmentLost`). This
   also holds if the partition went away and came back: ownership is an assignment, and assignments are numbered.
6. `poll` never blocks and never raises for a temporary fault; `wait` blocks, without spinning.

Topic names here are bare (`tasks`). A transport is opened for one run and adds the run's prefix itself if it needs one.
Nothing here is thread-safe: one thread uses a transport and everything that it made."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from rftstream.contracts.records import NewRecord, Record, TopicPartition

MAX_METADATA_BYTES = 4096
"""Largest metadata beside a position, in bytes of UTF-8 (Kafka's default limit)."""


class Position(NamedTuple):
    """The next offset to read, and up to MAX_METADATA_BYTES of metadata that the reader stores with it."""

    offset: int
    metadata: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSettings:
    """The settings of a topic. They never change once the topic is made."""

    partitions: int
    """Number of partitions."""
    compacted: bool = False
    """Whether only the newest record of each key must be kept."""
    max_record_bytes: int = 8 * 1024 * 1024
    """Largest record in bytes: key + value + headers (NewRecord.num_bytes)."""


class Jump(NamedTuple):
    """Offsets of a partition that were deleted before a reader or member reached them."""

    place: TopicPartition
    start: int
    """The next offset to read before the jump."""
    end: int
    """The first remaining offset, which is read next."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The partitions that a member owned at one moment. A transaction that commits positions of a group carries a
    snapshot.

    The concurrent loop takes it with `Member.snapshot` *before* it collects results, and passes it to
    `Producer.commit`. The commit is refused if any of its partitions has changed hands since, even if the partition
    came back (promise 5)."""

    group: str
    """Bare name of the group."""
    assignment: Mapping[TopicPartition, int]
    """Partition -> number of its assignment. A partition that comes back has another number."""
    token: object = None
    """Data by which the transport identifies the member: generation, member id."""


class Reader(Protocol):
    """Reads from explicit positions. It belongs to no group, and other readers do not see it.

    `Transport.reader` makes it for a fixed set of partitions. Single roles, followers of weights and tools use it.
    Reading a partition to its end:

        place = TopicPartition("control", 0)
        end = transport.admin.end_offsets("control")[place]
        reader = transport.reader({place: 0})
        while reader.position(place) < end:
            for record in reader.poll():
                ...
            transport.wait([reader], 0.05)
        reader.close()
    """

    def poll(self, max_records: int = 1000, max_bytes: int = 16 << 20) -> list[Record]:
        """Return the available records, fairly over the partitions that are not paused. Never blocks.

        The service loop calls it in each round. If there is any record, at least one is returned, however large it is.
        Afterwards `position` is after the returned records. PositionMissing if a position is beyond the end of its
        partition."""

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Make `offset` the next one to read. The loop calls it to repeat records that a step could not process.

        The partition must be one of the reader's. An offset before the first remaining one is moved to that one at the
        next `poll`, and `Transport.jumps` reports it. For an offset beyond the end, the next `poll` raises
        PositionMissing."""

    def position(self, partition: TopicPartition) -> int:
        """Return the next offset to read. Single roles commit it; tools compare it with `Admin.end_offsets`.

        It moves over gaps, so it reaches the end even if the last offsets have no records."""

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        """Deliver nothing from these partitions until `resume`.

        The loop calls it while a step accepts no more records, which then stay on the log. Positions are kept.
        Partitions that the reader does not have are ignored."""

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        """Deliver from these partitions again, from their positions on. Partitions that are not paused are ignored."""

    def close(self) -> None:
        """Release the reader's resources. Its owner calls it once; no other call may follow."""


class Member(Protocol):
    """A member of a group. The members of a group share the partitions of some topics.

    `Transport.member` makes it, and the concurrent loop uses it. `poll` and `wait` keep the membership alive, and so
    does `working`. A member that does none of these for the session time-out loses its partitions to the others. A
    round:

        transport.wait([member], 1.0)
        with member.working():
            ...
        records = member.poll()
        for place in new_in(member.assignment()):
            member.seek(place, member.committed([place])[place].offset)
        snapshot = member.snapshot()            # before results are collected
        results, positions = ...
        producer.commit(results, positions=positions, snapshot=snapshot)
    """

    @property
    def name(self) -> str:
        """The name that was passed to `Transport.member`; for logs and metrics."""

    def assignment(self) -> Mapping[TopicPartition, int]:
        """Return the partitions that this member owned at the last `poll` or `wait`: partition -> number of its
        assignment.

        The loop compares the result with the previous one. A partition with another number was away in between, and its
        unfinished work is dropped."""

    def poll(self, max_records: int = 1000, max_bytes: int = 16 << 20) -> list[Record]:
        """Return records of the owned partitions that are not paused, as `Reader.poll` does. The call keeps the
        membership alive.

        A newly owned partition delivers nothing until `seek` was called: its owner first reads `committed`, then sets
        the position."""

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Make `offset` the next one to deliver. The loop calls it for each newly owned partition.

        AssignmentLost if `assignment` does not have the partition."""

    def position(self, partition: TopicPartition) -> int:
        """Return the next offset to be delivered.

        It moves over gaps, so that the loop can commit it if no record of the partition is open. PositionMissing if
        `seek` was never called for the partition."""

    def committed(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, Position]:
        """Return the group's stable positions, with no commit of them pending.

        The loop calls it for newly owned partitions, before `seek`. The call may wait for another member's open
        transaction. PositionMissing if a position was never committed (`Admin.commit_initial` commits the first
        ones)."""

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        """Deliver nothing from these partitions until `resume`. The member still owns them."""

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        """Deliver from these partitions again. Partitions that are not owned or not paused are ignored."""

    def snapshot(self) -> Snapshot:
        """Return the partitions owned now, for a later `Producer.commit`. Called before results are collected (promise
        5)."""

    def working(self) -> AbstractContextManager[None]:
        """Return a context in which the membership stays alive without calls, as long as the process lives.

        The loop works inside of it, since a step may take longer than the session time-out. Other members may join
        meanwhile, and get their share; the next `poll` updates the assignment."""

    def close(self) -> None:
        """Leave the group at once, so that the other members get the partitions without waiting for the session
        time-out."""


class Producer(Protocol):
    """Writes transactions under a transactional id. Only the newest producer of an id can commit.

    `Transport.producer` makes it, and a role's loop owns it. For the first use, and after ProducerLost:

        producer.start()
        while True:
            try:
                producer.commit(records, positions={place: Position(7)}, group="feeder")
                break
            except TransactionAborted:
                pass                            # certainly nothing is visible: try again
    """

    def start(self) -> None:
        """Fence every earlier producer of this transactional id, and end their open transaction.

        A role calls it before it reads its committed state, so that no other producer can commit after that reading.
        Afterwards `commit` may be called. ConfigError or TransportError if the log cannot be reached."""

    def commit(
        self,
        records: Sequence[NewRecord],
        *,
        positions: Mapping[TopicPartition, Position] | None = None,
        group: str | None = None,
        snapshot: Snapshot | None = None,
    ) -> None:
        """Make one transaction: all records and positions become visible, or nothing does (promise 3).

        The loop calls it with the decisions of a step. `positions` are committed for `group` (single roles) or for
        `snapshot.group` (members; each partition must still be under the snapshot's assignment). RecordTooLarge for a
        record over its topic's limit and for metadata over MAX_METADATA_BYTES; nothing was sent then."""

    def close(self) -> None:
        """Release the producer's resources. `start` may be called again."""


class Admin(Protocol):
    """The operations on a log other than reading and writing: topics, offsets, positions, and deletion.

    Each transport has one, as `Transport.admin`. A new run is made like this:

        admin.ensure_topics({"tasks": TopicSettings(partitions=4)})
        admin.commit_initial("explorer", ["tasks"])
        assert admin.lag("explorer", "tasks") == {TopicPartition("tasks", n): 0 for n in range(4)}
    """

    def ensure_topics(self, topics: Mapping[str, TopicSettings]) -> None:
        """Make the missing topics. ConfigError if a topic exists with other settings.

        Called first when a run is created. It may be called again at any time."""

    def topics(self) -> dict[str, TopicSettings]:
        """Return the run's topics with their settings; empty for a run that does not exist."""

    def begin_offsets(self, *topics: str) -> dict[TopicPartition, int]:
        """Return the first remaining offset of each partition of some topics. Readers of a whole topic begin there. On
        Kafka all of them cost one request."""

    def end_offsets(
        self, topic: str, *, settled: bool = False, partitions: Collection[int] | None = None
    ) -> dict[TopicPartition, int]:
        """Return the offset after the last readable committed record, for each partition or for some.

        Readers that read up to the end call it first. On Kafka, an open transaction hides records that other producers
        committed after its beginning. With `settled`, the call raises TransportError while there is an open
        transaction, and the caller asks again. This is for callers that must know the newest record, such as a role
        that looks for its successor."""

    def committed(self, group: str) -> dict[TopicPartition, Position]:
        """Return all positions of a group. A single role calls it after `Producer.start`, to continue from there."""

    def commit_initial(self, group: str, topics: Collection[str]) -> None:
        """Commit position 0 for every partition of the topics that has no position in the group yet.

        Called for each group when a run is created, before any role starts. Existing positions are not changed."""

    def lag(self, group: str, topic: str) -> dict[TopicPartition, int]:
        """Count the *records* of each partition from the group's committed position on; gaps do not count."""

    def delete_before(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Delete the records before these offsets. The offsets of later records do not change.

        Trimming calls it with offsets that are no longer needed. PositionMissing for an offset beyond the end."""

    def compact(self, topic: str) -> None:
        """Keep only the newest record of each key, now, if the log does not compact by itself.

        Trimming calls it. A tombstone is kept like any newest record, for a day at least. ConfigError for a topic that
        is not compacted."""

    def delete_topics(self, topics: Collection[str]) -> None:
        """Delete topics with all their records. The command `delete` calls it when no role of the run is running."""

    def make_durable(self) -> None:
        """Make all commits so far survive a loss of power.

        Called before deleting records that a commit replaces, and before using up a name for good. TransportError if
        the log cannot be made durable now."""


class Transport(Protocol):
    """A run's log as one process uses it. It makes readers, members and producers, and closes them when it is closed.

    A process makes it once, after its last fork, and uses it from one thread:

        transport = KafkaTransport("my-run", config.transport)
        reader = transport.reader({TopicPartition("tasks", 0): 0})
        transport.wait([reader], timeout_s=1.0)
        records = reader.poll()
        transport.close()
    """

    admin: Admin
    """Topics, offsets and positions of this run."""

    def jumps(self) -> list[Jump]:
        """Return the jumps of its readers and members over deleted records, each once.

        The service loop calls it in each round. Records deleted without a record of it on `control` are lost."""

    def reader(self, positions: Mapping[TopicPartition, int], *, bodies: bool = True) -> Reader:
        """Make a reader of these partitions, each from its offset on.

        Without `bodies`, the records' values are None, for callers that need keys, headers and offsets only.
        ConfigError for a partition that does not exist."""

    def member(self, group: str, topics: Collection[str], *, name: str, session_timeout_s: float = 10.0) -> Member:
        """Join a group that reads these topics. The member owns nothing until a later `poll` or `wait`.

        `name` identifies the member in messages. A member that does not poll for `session_timeout_s` is removed from
        the group."""

    def producer(self, transactional_id: str, *, timeout_s: float = 10.0) -> Producer:
        """Make a producer; its owner calls `start` before the first `commit`.

        A transaction that is open for longer than `timeout_s`, because its process was killed, is aborted."""

    def wait(self, sources: Collection[Reader | Member], timeout_s: float) -> None:
        """Block until `poll` of a source may have something (records, another assignment), or until the timeout.

        The loop calls it between rounds, with the sources that it polls. The call keeps memberships alive, may return
        early, and does not spin. The sources must come from this transport."""

    def close(self) -> None:
        """Close everything that this transport made. Further calls do nothing."""
