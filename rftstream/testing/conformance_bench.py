"""What the conformance tests work with: the harness that a transport brings, and a bench of short words."""

from __future__ import annotations

import itertools
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from rftstream.contracts.records import Headers, NewRecord, Record, TopicPartition
from rftstream.errors import AssignmentLost, TransactionAborted
from rftstream.transport.base import Member, Position, Producer, TopicSettings, Transport

Peer = Callable[..., Any]
"""A top-level function that takes a Transport first."""

PATIENCE_S = 120.0
"""Seconds for what takes moments on a quiet machine."""

_numbers = itertools.count()


class ConformanceHarness(ABC):
    """What a transport brings to be tested: one log, which lives for one test or for all of them."""

    session_timeout_s: float = 1.0
    """The shortest one that the log takes."""
    patience_s: float = PATIENCE_S
    """How long something that must happen may take (a rebalance, a compaction)."""
    wake_up_s: float = 1.0
    """How long a record may take, in the median, to another process, its answer and back."""

    @abstractmethod
    def connect(self) -> Transport:
        """A new connection, as another process would have it."""

    @abstractmethod
    def peers(self, peers: Sequence[tuple[Peer, tuple[Any, ...]]]) -> list[Any]:
        """Runs all of these functions at the same time, each in a process (or thread) and with a connection of its
        own, and gives their results. What one of them raises comes out here."""

    def expire(self, alive: Collection[tuple[Transport, Member]]) -> None:
        """Lets the session time-out pass, with a margin, for all members but these."""
        until = time.monotonic() + 1.3 * self.session_timeout_s
        while time.monotonic() < until:
            for transport, member in alive:
                transport.wait([member], 0.05)
            if not alive:
                time.sleep(0.05)


def run_in_threads(connect: Callable[[], Transport], peers: Sequence[tuple[Peer, tuple[Any, ...]]]) -> list[Any]:
    """`ConformanceHarness.peers` for a log that lives in this process."""
    results: list[Any] = [None] * len(peers)
    errors: list[BaseException] = []

    def run(index: int, peer: Peer, arguments: tuple[Any, ...]) -> None:
        try:
            results[index] = run_peer(connect, peer, arguments)
        except BaseException as error:  # Raised again in the test's own thread.
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index, *peer)) for index, peer in enumerate(peers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def run_peer(connect: Callable[[], Transport], peer: Peer, arguments: tuple[Any, ...]) -> Any:
    transport = connect()
    try:
        return peer(transport, *arguments)
    finally:
        transport.close()


def await_true(what: str, condition: Callable[[], bool], patience_s: float) -> None:
    until = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > until:
            raise AssertionError(f"not within {patience_s:g} s: {what}")
        time.sleep(0.005)


class Bench:
    """Names that no other test uses, connections that are closed in the end, and what most tests do."""

    def __init__(self, harness: ConformanceHarness) -> None:
        self.harness = harness
        self.patience_s = harness.patience_s
        self._connections: list[Transport] = []
        self.transport = self.connect()

    def close(self) -> None:
        for transport in self._connections:
            transport.close()

    def connect(self) -> Transport:
        transport = self.harness.connect()
        self._connections.append(transport)
        return transport

    def name(self, what: str) -> str:
        return f"{what}-{os.getpid()}-{next(_numbers)}"

    def topic(self, partitions: int = 1, *, compacted: bool = False, max_record_bytes: int = 8 << 20) -> str:
        name = self.name("topic")
        settings = TopicSettings(partitions=partitions, compacted=compacted, max_record_bytes=max_record_bytes)
        self.transport.admin.ensure_topics({name: settings})
        return name

    def group(self, *topics: str) -> str:
        """A group with position 0 on all partitions."""
        group = self.name("group")
        self.transport.admin.commit_initial(group, topics)
        return group

    def producer(self, transport: Transport | None = None, name: str | None = None) -> Producer:
        producer = (transport or self.transport).producer(name or self.name("producer"))
        producer.start()
        return producer

    def write(self, records: Sequence[NewRecord]) -> None:
        self.producer().commit(records)

    def join(self, group: str, *topics: str, session_timeout_s: float = 30.0) -> tuple[Transport, Member]:
        """A member with a connection of its own."""
        transport = self.connect()
        member = transport.member(group, topics, name=self.name("member"), session_timeout_s=session_timeout_s)
        return transport, member

    def settle(self, members: Collection[tuple[Transport, Member]], *topics: str) -> None:
        """Until every partition has one owner of these members and each of them has what is fair."""
        places = {place for topic in topics for place in places_of(self.transport, topic)}
        fair = len(places) // len(members)

        def settled() -> bool:
            for transport, member in members:
                transport.wait([member], 0.01)
            owned = [place for _, member in members for place in member.assignment()]
            sizes = [len(member.assignment()) for _, member in members]
            return len(owned) == len(places) and set(owned) == places and min(sizes) >= fair

        self.await_true("every partition has one owner", settled)

    def await_true(self, what: str, condition: Callable[[], bool]) -> None:
        await_true(what, condition, self.patience_s)

    def all_records(self, *topics: str, bodies: bool = True, transport: Transport | None = None) -> list[Record]:
        """Everything that stands there now."""
        return read_all(transport or self.transport, topics, bodies=bodies)


def places_of(transport: Transport, topic: str) -> list[TopicPartition]:
    return [TopicPartition(topic, number) for number in range(transport.admin.topics()[topic].partitions)]


def read_all(transport: Transport, topics: Iterable[str], *, bodies: bool = True) -> list[Record]:
    """From the first to the last record that stood there when this began."""
    ends = {place: end for topic in topics for place, end in transport.admin.end_offsets(topic).items()}
    begins = {place: begin for topic in topics for place, begin in transport.admin.begin_offsets(topic).items()}
    reader = transport.reader(begins, bodies=bodies)
    found: list[Record] = []
    until = time.monotonic() + PATIENCE_S
    try:
        while any(reader.position(place) < end for place, end in ends.items()):
            batch = reader.poll()
            found += batch
            if not batch:
                transport.wait([reader], 0.05)
            if time.monotonic() > until:
                raise AssertionError(f"the end of {', '.join(topics)} was not reached within {PATIENCE_S:g} s")
        return found
    finally:
        reader.close()


def take(transport: Transport, source: Any, num: int, patience_s: float = PATIENCE_S) -> list[Record]:
    """At least so many records from a reader or member."""
    found: list[Record] = []
    until = time.monotonic() + patience_s
    while len(found) < num:
        batch = source.poll()
        found += batch
        if not batch:
            transport.wait([source], 0.05)
        if time.monotonic() > until:
            raise AssertionError(f"{len(found)} of {num} records within {patience_s:g} s")
    return found


def position_new(member: Member, positioned: dict[TopicPartition, int]) -> None:
    """Begins newly owned partitions where the group stands. `positioned` is kept by the caller."""
    assignment = member.assignment()
    new = [place for place, number in assignment.items() if positioned.get(place) != number]
    if new:
        for place, position in member.committed(new).items():
            member.seek(place, position.offset)
    positioned.clear()
    positioned.update(assignment)


class CarryingWorker:
    """One of several that carry records from a topic to another, each exactly once."""

    def __init__(self, transport: Transport, group: str, source: str, target: str, *, name: str) -> None:
        self.transport = transport
        self.target = target
        self.member = transport.member(group, [source], name=name, session_timeout_s=10.0)
        self.producer = transport.producer(name)
        self.producer.start()
        self._positioned: dict[TopicPartition, int] = {}

    def turn(self, max_records: int = 50) -> int:
        """How many records it carried."""
        records = self.member.poll(max_records)
        position_new(self.member, self._positioned)
        if not records:
            return 0
        snapshot = self.member.snapshot()
        places = {record.place for record in records}
        outputs = [record_again(record, self.target) for record in records]
        try:
            positions = {place: Position(self.member.position(place)) for place in places}
            self.producer.commit(outputs, positions=positions, snapshot=snapshot)
        except (AssignmentLost, TransactionAborted):
            # What it still owns it does again from where the group stands.
            self.transport.wait([self.member], 0.0)
            self._positioned.clear()
            position_new(self.member, self._positioned)
            return 0
        return len(records)


def record_again(record: Record, topic: str) -> NewRecord:
    return NewRecord(topic, record.partition, record.key, record.value, record.headers)


def new(topic: str, partition: int, text: str, headers: Headers = ()) -> NewRecord:
    """A record whose key and value say the same."""
    return NewRecord(topic, partition, text.encode(), text.encode(), headers)


def texts(records: Iterable[Record]) -> list[str]:
    return [(record.key or b"").decode() for record in records]


def by_place(records: Iterable[Record]) -> Mapping[TopicPartition, list[Record]]:
    found: dict[TopicPartition, list[Record]] = defaultdict(list)
    for record in records:
        found[record.place].append(record)
    return found
