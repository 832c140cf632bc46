"""What the service loop asks of a log: five small protocols, the same over SQLite, Kafka and memory.

- `Reader`    reads from explicit positions, without a group (single roles, followers, tools);
- `Member`    shares the partitions of some topics with the other members of its group (concurrent roles);
- `Producer`  makes transactions: records and positions become visible together or not at all;
- `Admin`     knows topics, ends of partitions, committed positions and lag, and deletes and compacts;
- `Transport` makes these and waits until one of them has something.

Every transport keeps these promises, and the conformance suite holds it to them:

1. Records of a partition have growing offsets and are seen in that order. Offsets may have gaps: a compacted or
   deleted record, on Kafka also transaction markers. `position` is the next offset to look at, and moves over gaps.
2. Nothing of a transaction is visible before it commits; afterwards all of it is, in every partition.
3. A commit either returns, or raises. `TransactionAborted`, `AssignmentLost`, `LogFull`, `RecordTooLarge`: certainly
   nothing is visible, and the producer can be used on. `ProducerLost`: the transaction may have been committed, or
   a newer producer holds the id; the producer is of no use until `start` is called again.
4. `Producer.start` ends what an older producer of the same id had open and fences that producer: its later commits
   raise `ProducerLost`.
5. A position committed for a partition by a member that does not own it any more is refused (`AssignmentLost`),
   also when the partition went away and came back: ownership is an assignment, and assignments are numbered.
6. `poll` never blocks and never raises for a passing fault; `wait` blocks, without spinning.

Topic names here are bare (`tasks`); a transport is opened for one run and adds the run's prefix itself if it needs
one. Nothing here is thread-safe: one thread uses a transport and what it made.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from rftstream.contracts.records import NewRecord, Record, TopicPartition

MAX_METADATA_BYTES = 4096
"""Largest metadata beside a position, in bytes of UTF-8 (Kafka's default limit)."""


class Position(NamedTuple):
    """The next offset to read, and up to MAX_METADATA_BYTES that the reader keeps beside it."""

    offset: int
    metadata: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSettings:
    """The settings of a topic; they never change once it is made."""

    partitions: int
    """Number of partitions."""
    compacted: bool = False
    """Whether only the newest record of each key has to be kept."""
    max_record_bytes: int = 8 * 1024 * 1024
    """Largest record in bytes: key + value + headers (NewRecord.num_bytes)."""


class Jump(NamedTuple):
    """Offsets of a partition that were deleted before a reader or member came to them."""

    place: TopicPartition
    start: int
    """The next offset to read, before."""
    end: int
    """The first offset that is kept, and the next to read now."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The partitions that a member owned at one moment. A transaction that commits positions of a group carries a
    snapshot.

    The concurrent loop takes it with `Member.snapshot` *before* it collects results, and gives it to `Producer.commit`.
    The commit is refused if any of its partitions has changed hands since, even if the partition came back (promise
    5)."""

    group: str
    """Bare name of the group."""
    assignment: Mapping[TopicPartition, int]
    """Partition -> number of its assignment; a partition that comes back has another number."""
    token: object = None
    """Data by which the transport recognizes the member: generation, member id."""


class Reader(Protocol):
    """Reads from explicit positions; it belongs to no group, and others do not see it.

    `Transport.reader` makes it with the partitions that it reads, for as long as it lives. Single roles, followers of
    weights and tools use it. Reading a partition to its end:

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
        """Return what is there now, fairly over the partitions that are not paused. Never blocks.

        The service loop calls it in each round. At least one record is returned if there is any, however large it is.
        Afterwards `position` stands behind the records that were returned. It raises PositionMissing if a
        position lies beyond the end of its partition."""

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Make `offset` the next one to read. The loop calls it to read again what a step could not take.

        The partition must be one that the reader was made for. An offset before the first one kept is moved to that
        one at the next `poll`, and `Transport.jumps` tells of it. For an offset beyond the end, the next `poll` raises
        PositionMissing."""

    def position(self, partition: TopicPartition) -> int:
        """Return the next offset to look at. Single roles commit it; tools compare it with `Admin.end_offsets`.

        It moves over gaps, so it reaches the end also where the last offsets hold no records."""

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        """Deliver nothing from these partitions until `resume`.

        The loop calls it while a step cannot deal with more: the records stay on the log. Positions are kept, and
        partitions that the reader does not have are ignored."""

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        """Deliver from these partitions again, from their positions on. Ignored for those that are not paused."""

    def close(self) -> None:
        """Give back what the reader holds. Its owner calls it once; no other call may follow."""


class Member(Protocol):
    """A member of a group. The members of a group share the partitions of some topics.

    `Transport.member` makes it, and the concurrent loop uses it. The transport keeps it alive through `poll` and
    `wait`, and while it is `working`; a member that does none of it for the session time-out loses its partitions to
    the others. A round:

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
        """The name that `Transport.member` was given; for logs and metrics."""

    def assignment(self) -> Mapping[TopicPartition, int]:
        """Return what this member owns, as of the last `poll` or `wait`: partition -> number of its assignment.

        The loop compares it with what it knew before: a partition with another number was away meanwhile, and the work
        for it that is under way is dropped."""

    def poll(self, max_records: int = 1000, max_bytes: int = 16 << 20) -> list[Record]:
        """Return records of the owned partitions that are not paused, as `Reader.poll` does. It keeps the member alive.

        A newly owned partition delivers nothing until `seek` has positioned it: its owner first asks `committed`, then
        says where to begin."""

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Make `offset` the next one to deliver. The loop calls it for each newly owned partition.

        AssignmentLost if `assignment` does not have the partition."""

    def position(self, partition: TopicPartition) -> int:
        """Return the next offset to be delivered.

        It moves over gaps, so that the loop can commit it where none of the partition's records is open.
        PositionMissing if `seek` was never called for the partition."""

    def committed(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, Position]:
        """Return the group's stable positions, with no commit of them pending.

        The loop asks for newly owned partitions, before `seek`. It may wait for another member's open transaction.
        PositionMissing if a position was never committed (`Admin.commit_initial` commits the first ones)."""

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        """Deliver nothing from these partitions until `resume`; membership goes on, and others are not given them."""

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        """Deliver from these partitions again. Ignored for those that are not owned or not paused."""

    def snapshot(self) -> Snapshot:
        """Return what is owned now, for a later `Producer.commit`. Taken before results are collected (promise 5)."""

    def working(self) -> AbstractContextManager[None]:
        """Return a context in which the member lives on though nobody calls it, for as long as its process does.

        The loop works in it: a step may take longer than the session time-out. Others may join meanwhile, and get their
        share: the next `poll` tells what is owned then."""

    def close(self) -> None:
        """Leave the group at once, so that the others get the partitions without waiting for the session time-out."""


class Producer(Protocol):
    """Writes transactions under a transactional id; the newest producer of an id is the only one that can commit.

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
        """Fence every earlier producer of this transactional id, and end what it had open.

        A role calls it before it reads where it stands, so that nothing can be committed after that reading. Afterwards
        `commit` may be called. ConfigError or TransportError if the log cannot be reached."""

    def commit(
        self,
        records: Sequence[NewRecord],
        *,
        positions: Mapping[TopicPartition, Position] | None = None,
        group: str | None = None,
        snapshot: Snapshot | None = None,
    ) -> None:
        """Make one transaction: all records and positions become visible, or nothing does (promise 3).

        The loop calls it with what a step has decided. `positions` are committed for `group` (single roles) or for
        `snapshot.group` (members; then each partition must still be under the snapshot's assignment). RecordTooLarge
        for a record over its topic's limit and for metadata over MAX_METADATA_BYTES: then nothing was sent."""

    def close(self) -> None:
        """Give back what the producer holds. `start` may be called again."""


class Admin(Protocol):
    """The operations on a log beside reading and writing: topics, offsets, positions, and deletion.

    Each transport has one, as `Transport.admin`. A new run is made so:

        admin.ensure_topics({"tasks": TopicSettings(partitions=4)})
        admin.commit_initial("explorer", ["tasks"])
        assert admin.lag("explorer", "tasks") == {TopicPartition("tasks", n): 0 for n in range(4)}
    """

    def ensure_topics(self, topics: Mapping[str, TopicSettings]) -> None:
        """Make the topics that are missing. ConfigError if a topic exists with other settings.

        A run's creation calls it first; it may be called again at any time."""

    def topics(self) -> dict[str, TopicSettings]:
        """Return the run's topics with their settings; empty for a run that was never made, or was deleted."""

    def begin_offsets(self, topic: str) -> dict[TopicPartition, int]:
        """Return the first offset kept in each partition. Readers of a whole topic begin there."""

    def end_offsets(
        self, topic: str, *, settled: bool = False, partitions: Collection[int] | None = None
    ) -> dict[TopicPartition, int]:
        """Return the offset after the last committed record that can be read, of each partition or of some.

        Readers up to the end call it first. On Kafka, an open transaction hides what others committed after it began.
        With `settled`, the call raises TransportError while there is an open transaction, and the caller asks again;
        that is for callers that must know the newest record, such as a role that looks for its successor."""

    def committed(self, group: str) -> dict[TopicPartition, Position]:
        """Return all positions of a group. A single role asks it after `Producer.start`, to go on from there."""

    def commit_initial(self, group: str, topics: Collection[str]) -> None:
        """Commit position 0 for every partition of the topics that has no position in the group yet.

        A run's creation calls it for each group, before any role starts. Positions that exist are left as they are."""

    def lag(self, group: str, topic: str) -> dict[TopicPartition, int]:
        """Count the *records* of each partition from the group's committed position on; gaps do not count."""

    def delete_before(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Delete the records before these offsets; the offsets of the others stay as they are.

        Trimming calls it with offsets that nobody needs any more. PositionMissing for an offset beyond the end."""

    def compact(self, topic: str) -> None:
        """Keep only the newest record of each key now, where a log does not do so by itself.

        Trimming calls it. A tombstone is kept like any newest record, for a day at least. ConfigError for a topic that
        is not compacted."""

    def delete_topics(self, topics: Collection[str]) -> None:
        """Delete topics with all their records. `delete` of a run calls it when no role runs any more."""

    def make_durable(self) -> None:
        """Make everything that was committed so far survive the loss of power.

        A caller that is about to delete records that the commit replaces, or to use up a name for good, calls it first.
        TransportError if the log cannot be made durable now."""


class Transport(Protocol):
    """A run's log, as one process uses it; it makes readers, members and producers, and closes them with itself.

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
        """Return, each once, the jumps that its readers and members have made over deleted records.

        The service loop asks in each round: what was deleted without a word on `control` is lost."""

    def reader(self, positions: Mapping[TopicPartition, int], *, bodies: bool = True) -> Reader:
        """Make a reader of these partitions, each from its offset on.

        Without `bodies`, the records' values are None, for callers that need keys, headers and offsets only.
        ConfigError for a partition that does not exist."""

    def member(self, group: str, topics: Collection[str], *, name: str, session_timeout_s: float = 10.0) -> Member:
        """Join a group that reads these topics. The member owns nothing until a later `poll` or `wait`.

        `name` tells the group's members apart for people. A member that does not poll for `session_timeout_s` is put
        out of the group."""

    def producer(self, transactional_id: str, *, timeout_s: float = 10.0) -> Producer:
        """Make a producer; its owner calls `start` before the first `commit`.

        A transaction that is open for longer than `timeout_s`, because its process was killed, is aborted."""

    def wait(self, sources: Collection[Reader | Member], timeout_s: float) -> None:
        """Block until one of the sources may have something for `poll` (records, another assignment), or time is up.

        The loop calls it between rounds, with the sources that it would poll. It keeps members alive, may return early,
        and does not spin. The sources must come from this transport."""

    def close(self) -> None:
        """Close everything that this transport made. Further calls of `close` do nothing."""
