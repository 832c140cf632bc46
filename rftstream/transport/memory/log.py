"""What a log in memory holds: records, positions, members; one lock round all of it."""

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


@dataclass(slots=True)
class MemoryPartition:
    records: list[Record] = field(default_factory=list)
    """Committed; those from `end` on wait for a transaction before them."""
    offsets: list[int] = field(default_factory=list)
    """Of the records, for bisection."""
    begin: int = 0
    end: int = 0
    """The last stable offset: readers see what is before it."""
    written: int = 0
    """The next offset to be given."""
    open: dict[int, int] = field(default_factory=dict)
    """First offset of each transaction that is not marked here, by its identity."""

    def keep(self, wanted: Callable[[Record], bool]) -> None:
        self.records = [record for record in self.records if wanted(record)]
        self.offsets = [record.offset for record in self.records]


@dataclass(slots=True)
class Subscriber:
    topics: frozenset[str]
    heartbeat_s: float
    session_timeout_s: float


@dataclass(slots=True, eq=False)
class MemoryTransaction:
    transactional_id: str
    began_at: float
    ends_at: float
    """Open: it is aborted then. Decided: it is marked then."""
    commits_at: float | None = None
    """Its producer has given it up, and its word to commit is under way."""
    records: dict[TopicPartition, list[Record]] = field(default_factory=dict)
    group: str | None = None
    positions: dict[TopicPartition, Position] = field(default_factory=dict)
    committed: bool | None = None
    """None: open."""
    unmarked: list[TopicPartition | str] = field(default_factory=list)
    """Partitions, and the group."""


@dataclass(slots=True)
class MemoryGroup:
    positions: dict[TopicPartition, Position] = field(default_factory=dict)
    pending: list[MemoryTransaction] = field(default_factory=list)
    """With positions of the group that may still come to be."""
    members: dict[int, Subscriber] = field(default_factory=dict)
    owners: dict[TopicPartition, int] = field(default_factory=dict)
    numbers: dict[TopicPartition, int] = field(default_factory=dict)
    leaving: dict[TopicPartition, int] = field(default_factory=dict)
    """Taken from a member that has not heard of it yet: nobody's until then."""
    generation: int = 0


class LogState:
    """What a log in memory holds, for all who use it.

    `clock` gives the timestamps and decides over sessions and transactions: time.time, or a manual one. `real_time`:
    whether `wait` may block, by default if the clock is time.time. `marks`: whether the ends of transactions take
    offsets, as on Kafka."""

    def __init__(
        self, clock: Callable[[], float] = time.time, *, real_time: bool | None = None, marks: bool = False
    ) -> None:
        self.clock = clock
        self.marks = marks
        self.real_time = clock is time.time if real_time is None else real_time
        self.fault: Fault | None = None
        """Called as fault(point, process); what it raises comes out of the call. "before_start" and "after_start" of a
        producer; "snapshot" before a member takes one; of a commit "before_commit" (nothing written yet), "in_commit"
        (records and positions written, the end not asked for), "marking" (committed, and marked in a part of the
        partitions; a TransportError leaves the other marks for later and the caller is told of success) and
        "after_commit" (all visible, the caller has not heard of it yet); "question" when ends or positions are asked
        for, "before_delete" of each partition's records. A transaction that a fault leaves open stays so."""
        self.changed = threading.Condition(threading.RLock())
        self.num_changes = 0
        self.settings: dict[str, TopicSettings] = {}
        self.partitions: dict[TopicPartition, MemoryPartition] = {}
        self.groups: dict[str, MemoryGroup] = {}
        self._num_members = 0

    def at(self, point: str, process: str) -> None:
        if self.fault is not None:
            self.fault(point, process)

    # -- topics

    def topic(self, name: str) -> TopicSettings:
        try:
            return self.settings[name]
        except KeyError:
            known = ", ".join(sorted(self.settings)) or "none"
            raise ConfigError(
                f"memory log: unknown topic {name!r}; known: {known}; make it with admin.ensure_topics"
            ) from None

    def places(self, topic: str) -> list[TopicPartition]:
        return [TopicPartition(topic, partition) for partition in range(self.topic(topic).partitions)]

    def check_place(self, place: TopicPartition) -> None:
        if place not in self.partitions:
            width = self.topic(place.topic).partitions
            raise ConfigError(f"{place}: no such partition, {place.topic} has {width}; partitions are fixed for a run")

    def note_change(self) -> None:
        self.num_changes += 1
        self.changed.notify_all()

    # -- groups

    def group(self, name: str) -> MemoryGroup:
        return self.groups.setdefault(name, MemoryGroup())

    def join(self, name: str, subscriber: Subscriber) -> int:
        group = self.group(name)
        self._num_members += 1
        self._remove_expired(group)
        group.members[self._num_members] = subscriber
        self.share_out_anew(group)
        return self._num_members

    def leave(self, name: str, member: int) -> None:
        group = self.group(name)
        if group.members.pop(member, None) is not None:
            self.share_out_anew(group)

    def beat(self, name: str, member: int) -> bool:
        """A sign of life, by which the member also hears of what was taken from it and gives it up."""
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
        """The next generation. Nobody gets what another still holds: that one has to give it up first."""
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
        now_s = self.clock()
        gone = [
            member
            for member, subscriber in group.members.items()
            if abs(now_s - subscriber.heartbeat_s) > subscriber.session_timeout_s
        ]
        for member in gone:
            del group.members[member]
        return bool(gone)
