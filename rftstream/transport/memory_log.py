"""What a log in memory holds: records, positions, members; one lock round all of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rftstream.errors import ConfigError
from rftstream.transport.base import Position, Record, TopicPartition, TopicSettings
from rftstream.transport.sharing import share_out

if TYPE_CHECKING:
    from rftstream.transport.memory import MemoryTransport

Fault = Callable[[str, str], None]


@dataclass(slots=True)
class MemoryPartition:
    records: list[Record] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """Of the records, for bisection."""
    begin: int = 0
    end: int = 0

    def keep(self, wanted: Callable[[Record], bool]) -> None:
        self.records = [record for record in self.records if wanted(record)]
        self.offsets = [record.offset for record in self.records]


@dataclass(slots=True)
class Subscriber:
    topics: frozenset[str]
    heartbeat_s: float
    session_timeout_s: float


@dataclass(slots=True)
class MemoryGroup:
    positions: dict[TopicPartition, Position] = field(default_factory=dict)
    members: dict[int, Subscriber] = field(default_factory=dict)
    owners: dict[TopicPartition, int] = field(default_factory=dict)
    numbers: dict[TopicPartition, int] = field(default_factory=dict)
    generation: int = 0


class MemoryLog:
    """`clock` gives the timestamps and decides over sessions: time.time, or a manual one. `real_time`: whether `wait`
    may block, by default if the clock is time.time."""

    def __init__(self, clock: Callable[[], float] = time.time, *, real_time: bool | None = None) -> None:
        self.clock = clock
        self.real_time = clock is time.time if real_time is None else real_time
        self.fault: Fault | None = None
        """Called as fault(point, process) at "before_commit" (nothing written yet) and "after_commit" (all visible,
        the caller has not heard of it yet), "before_start" and "after_start" of a producer, and "question" when ends
        or positions are asked for, "before_delete" of each partition's records; what it raises comes out of `commit`,
        `start`, the question or `delete_before`."""
        self.changed = threading.Condition(threading.RLock())
        self.num_changes = 0
        self.settings: dict[str, TopicSettings] = {}
        self.partitions: dict[TopicPartition, MemoryPartition] = {}
        self.epochs: dict[str, int] = {}
        self.groups: dict[str, MemoryGroup] = {}
        self._num_members = 0

    def asked(self, process: str) -> None:
        if self.fault is not None:
            self.fault("question", process)

    def deleting(self, process: str) -> None:
        if self.fault is not None:
            self.fault("before_delete", process)

    def connect(self, process: str = "") -> MemoryTransport:
        """What one simulated process holds of it; `process` is what `fault` is told."""
        from rftstream.transport.memory import MemoryTransport  # It is built on this module.

        return MemoryTransport(self, process)

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
        group = self.group(name)
        subscriber = group.members.get(member)
        if subscriber is None:
            return False
        subscriber.heartbeat_s = self.clock()
        if len(group.members) > 1 and self._remove_expired(group):
            self.share_out_anew(group)
        return True

    def share_out_anew(self, group: MemoryGroup) -> None:
        subscribed = {topic for subscriber in group.members.values() for topic in subscriber.topics}
        widths = {topic: self.settings[topic].partitions for topic in subscribed if topic in self.settings}
        members = {member: subscriber.topics for member, subscriber in group.members.items()}
        shared = share_out(members, widths, group.owners)
        for place in {**group.owners, **shared}:
            if group.owners.get(place) != shared.get(place):
                group.numbers[place] = group.numbers.get(place, 0) + 1
        group.owners = shared
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
