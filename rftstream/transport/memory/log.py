"""The state of a log in memory: records, positions and members. One lock protects all of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rftstream.contracts.records import Record, TopicPartition
from rftstream.errors import ConfigError
from rftstream.transport.base import Position, TopicSettings
from rftstream.transport.sharing import share_out

Fault = Callable[[str, str], None]
"""A function that is called as fault(point, process); see `LogState.fault`."""


@dataclass(slots=True)
class MemoryPartition:
    """One partition of a log in memory."""

    records: list[Record] = field(default_factory=list)
    """The committed records. Those from `end` on wait for an earlier transaction."""
    offsets: list[int] = field(default_factory=list)
    """The offsets of the records, for bisection."""
    begin: int = 0
    """The first remaining offset."""
    end: int = 0
    """The last stable offset. Readers see the records before it."""
    written: int = 0
    """The next offset to be assigned."""
    open: dict[int, int] = field(default_factory=dict)
    """The first offset of each transaction that is not marked here, by `id(transaction)`."""

    def keep(self, wanted: Callable[[Record], bool]) -> None:
        """Drop the records that are not wanted. The others keep their offsets."""
        self.records = [record for record in self.records if wanted(record)]
        self.offsets = [record.offset for record in self.records]


@dataclass(slots=True)
class Subscriber:
    """A member of a group: its topics, its last sign of life, and the seconds without one after which it is removed."""

    topics: frozenset[str]
    heartbeat_s: float
    session_timeout_s: float


@dataclass(slots=True, eq=False)
class MemoryTransaction:
    """A transaction with its records. `Coordinator.begin` makes it and leads it through its phases."""

    transactional_id: str
    began_at: float
    ends_at: float
    """Time at which an open transaction is aborted, and a decided one is marked."""
    commits_at: float | None = None
    """Time at which a commit request arrives that its producer has given up; None if there is none."""
    records: dict[TopicPartition, list[Record]] = field(default_factory=dict)
    group: str | None = None
    positions: dict[TopicPartition, Position] = field(default_factory=dict)
    committed: bool | None = None
    """Whether it was committed; None while it is open."""
    unmarked: list[TopicPartition | str] = field(default_factory=list)
    """Partitions and the group (by name) that have no marker yet."""


@dataclass(slots=True)
class MemoryGroup:
    """A consumer group: its positions, its members, and the owner of each partition."""

    positions: dict[TopicPartition, Position] = field(default_factory=dict)
    pending: list[MemoryTransaction] = field(default_factory=list)
    """Transactions with positions of the group that may still be committed."""
    members: dict[int, Subscriber] = field(default_factory=dict)
    owners: dict[TopicPartition, int] = field(default_factory=dict)
    numbers: dict[TopicPartition, int] = field(default_factory=dict)
    leaving: dict[TopicPartition, int] = field(default_factory=dict)
    """Partitions that were taken from a member that does not know it yet. Until it does, nobody owns them."""
    generation: int = 0


class LogState:
    """The state of a log in memory, which all its users share. TransactionalLog adds transactions to it.

    `clock` gives the timestamps and decides over sessions and transactions: time.time, or a manual one. `real_time`
    says whether `wait` may block; by default it may if the clock is time.time. `marks` says whether the ends of
    transactions take offsets, as on Kafka."""

    def __init__(
        self, clock: Callable[[], float] = time.time, *, real_time: bool | None = None, marks: bool = False
    ) -> None:
        self.clock = clock
        self.marks = marks
        self.real_time = clock is time.time if real_time is None else real_time
        self.fault: Fault | None = None
        """Called as fault(point, process); its exceptions are raised by the call that met the point.

        Points of a producer's start: "before_start" and "after_start". Of a member: "snapshot" before it takes one. Of
        a commit: "before_commit" (nothing written yet), "in_commit" (records and positions written, the end not
        requested), "marking" (committed, and marked in some of the partitions; a TransportError leaves the other
        markers for later, and the caller is told of success) and "after_commit" (everything visible, the caller not yet
        told). Others: "question" when ends or positions are requested, "before_delete" for each partition. A
        transaction that a fault leaves open stays open."""
        self.changed = threading.Condition(threading.RLock())
        self.num_changes = 0
        self.settings: dict[str, TopicSettings] = {}
        self.partitions: dict[TopicPartition, MemoryPartition] = {}
        self.groups: dict[str, MemoryGroup] = {}
        self._num_members = 0

    def at(self, point: str, process: str) -> None:
        """Call `fault`, if there is one, with this point."""
        if self.fault is not None:
            self.fault(point, process)

    # -- topics

    def topic(self, name: str) -> TopicSettings:
        """Return the settings of a topic. ConfigError if there is none of this name."""
        try:
            return self.settings[name]
        except KeyError:
            known = ", ".join(sorted(self.settings)) or "none"
            raise ConfigError(
                f"memory log: unknown topic {name!r}; known: {known}; make it with admin.ensure_topics"
            ) from None

    def places(self, topic: str) -> list[TopicPartition]:
        """Return the partitions of a topic."""
        return [TopicPartition(topic, partition) for partition in range(self.topic(topic).partitions)]

    def check_place(self, place: TopicPartition) -> None:
        """Raise ConfigError if there is no such partition."""
        if place not in self.partitions:
            width = self.topic(place.topic).partitions
            raise ConfigError(f"{place}: no such partition, {place.topic} has {width}; partitions are fixed for a run")

    def note_change(self) -> None:
        """Wake the threads that wait for a change of the log."""
        self.num_changes += 1
        self.changed.notify_all()

    # -- groups

    def group(self, name: str) -> MemoryGroup:
        """Return a group. The first call makes it."""
        return self.groups.setdefault(name, MemoryGroup())

    def join(self, name: str, subscriber: Subscriber) -> int:
        """Add a member to a group, assign the partitions anew, and return the member's number."""
        group = self.group(name)
        self._num_members += 1
        self._remove_expired(group)
        group.members[self._num_members] = subscriber
        self.share_out_anew(group)
        return self._num_members

    def leave(self, name: str, member: int) -> None:
        """Remove a member from a group, and assign the partitions anew."""
        group = self.group(name)
        if group.members.pop(member, None) is not None:
            self.share_out_anew(group)

    def beat(self, name: str, member: int) -> bool:
        """Record a sign of life of a member. Return False if it was removed before. With this call the member also
        gives up the partitions that were taken from it."""
        group = self.group(name)
        subscriber = group.members.get(member)
        if subscriber is None:
            return False
        subscriber.heartbeat_s = self.clock()
        expired = len(group.members) > 1 and self._remove_expired(group)
        given_up = [place for place, holder in group.leaving.items() if holder == member]
        for place in given_up:
            del group.leaving[place]
        if expired or given_up:
            self.share_out_anew(group)
        return True

    def share_out_anew(self, group: MemoryGroup) -> None:
        """Assign the partitions, and begin the next generation. A partition that another member still holds is not
        assigned until that member has given it up."""
        subscribed = {topic for subscriber in group.members.values() for topic in subscriber.topics}
        widths = {topic: self.settings[topic].partitions for topic in subscribed if topic in self.settings}
        members = {member: subscriber.topics for member, subscriber in group.members.items()}
        held = {place: holder for place, holder in {**group.owners, **group.leaving}.items() if holder in group.members}
        shared = share_out(members, widths, held)
        owners = {place: member for place, member in shared.items() if held.get(place, member) == member}
        group.leaving = {place: held[place] for place in shared if place not in owners}
        for place in {**group.owners, **owners}:
            if group.owners.get(place) != owners.get(place):
                group.numbers[place] = group.numbers.get(place, 0) + 1
        group.owners = owners
        group.generation += 1
        self.note_change()

    def _remove_expired(self, group: MemoryGroup) -> bool:
        """Remove the members without a sign of life for their session time-out. Return whether there were any."""
        now_s = self.clock()
        gone = [
            member
            for member, subscriber in group.members.items()
            if abs(now_s - subscriber.heartbeat_s) > subscriber.session_timeout_s
        ]
        for member in gone:
            del group.members[member]
        return bool(gone)
