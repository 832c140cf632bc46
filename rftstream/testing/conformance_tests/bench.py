"""The tools of the conformance tests: the harness that a transport provides, and a bench of short functions."""

from __future__ import annotations

import itertools
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any

from rftstream.contracts.records import Headers, NewRecord, Record, TopicPartition
from rftstream.errors import AssignmentLost, TransactionAborted
from rftstream.service.reading import read_to_ends
from rftstream.transport.base import Member, Position, Producer, TopicSettings, Transport

Peer = Callable[..., Any]
"""A top-level function whose first argument is a Transport."""

PATIENCE_S = 120.0
"""Seconds to wait for something that takes moments on a quiet machine."""

_numbers = itertools.count()


class ConformanceHarness(ABC):
    """The harness that a transport provides for its tests: one log, which lives for one test or for all of them.

    A fixture makes it. The tests call `connect` and `peers`, and `expire` to silence members.
    """

    session_timeout_s: float = 1.0
    """The shortest session time-out that the log accepts, in seconds."""
    patience_s: float = PATIENCE_S
    """Seconds that something which must happen may take (a rebalance, a compaction)."""
    wake_up_s: float = 1.0
    """Seconds, for the quickest of several calls, from a record to another process's answer and back. A busy machine
    delays many of them, and a log that only polls delays all."""

    lives_on_while_working: bool = True
    """Whether members stay alive while they are `working`. False for a log with the test's clock."""

    @abstractmethod
    def connect(self) -> Transport:
        """Return a new connection, as for another process."""

    @abstractmethod
    def peers(self, peers: Sequence[tuple[Peer, tuple[Any, ...]]]) -> list[Any]:
        """Run all of these functions at the same time, and return their results. Each runs in a separate process (or
        thread) with its own connection. An error in one of them is raised here."""

    def expire(self, alive: Collection[tuple[Transport, Member]]) -> None:
        """Let the session time-out pass, with a margin, for all members but these."""
        until = time.monotonic() + 1.3 * self.session_timeout_s
        while time.monotonic() < until:
            for transport, member in alive:
                transport.wait([member], 0.05)
            if not alive:
                time.sleep(0.05)


def run_in_threads(connect: Callable[[], Transport], peers: Sequence[tuple[Peer, tuple[Any, ...]]]) -> list[Any]:
    """Run peers as `ConformanceHarness.peers` does, for a log that lives in this process."""
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
    """Run one peer with its own connection, which is closed at the end."""
    with closing(connect()) as transport:
        return peer(transport, *arguments)


def await_true(what: str, condition: Callable[[], bool], patience_s: float) -> None:
    """Wait until the condition is true. After `patience_s` seconds, AssertionError with the text `what`."""
    until = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > until:
            raise AssertionError(f"not within {patience_s:g} s: {what}")
        time.sleep(0.005)


class Bench:
    """Unique names, connections that are closed at the end, and the common steps of tests. A fixture makes it."""

    def __init__(self, harness: ConformanceHarness) -> None:
        self.harness = harness
        self.patience_s = harness.patience_s
        self._connections: list[Transport] = []
        self.transport = self.connect()

    def close(self) -> None:
        """Close all connections."""
        for transport in self._connections:
            transport.close()

    def connect(self) -> Transport:
        """Return a new connection. The bench closes it."""
        transport = self.harness.connect()
        self._connections.append(transport)
        return transport

    def name(self, what: str) -> str:
        """Return a name that no other test uses."""
        return f"{what}-{os.getpid()}-{next(_numbers)}"

    def topic(self, partitions: int = 1, *, compacted: bool = False, max_record_bytes: int = 8 << 20) -> str:
        """Make a topic, and return its name."""
        name = self.name("topic")
        settings = TopicSettings(partitions=partitions, compacted=compacted, max_record_bytes=max_record_bytes)
        self.transport.admin.ensure_topics({name: settings})
        return name

    def group(self, *topics: str) -> str:
        """Make a group with position 0 on all partitions, and return its name."""
        group = self.name("group")
        self.transport.admin.commit_initial(group, topics)
        return group

    def producer(self, transport: Transport | None = None, name: str | None = None) -> Producer:
        """Return a started producer, by default with a unique name. The time limit of its transactions is long enough
        for a large one on a busy machine."""
        producer = (transport or self.transport).producer(name or self.name("producer"), timeout_s=PATIENCE_S)
        producer.start()
        return producer

    def write(self, records: Sequence[NewRecord]) -> None:
        """Write the records in one transaction."""
        self.producer().commit(records)

    def join(self, group: str, *topics: str, session_timeout_s: float = 30.0) -> tuple[Transport, Member]:
        """Return a member of the group, with its own connection."""
        transport = self.connect()
        member = transport.member(group, topics, name=self.name("member"), session_timeout_s=session_timeout_s)
        return transport, member

    def joined(
        self,
        group: str,
        *topics: str,
        beside: Collection[tuple[Transport, Member]] = (),
        begins: bool = False,
        session_timeout_s: float = 30.0,
    ) -> tuple[Transport, Member]:
        """Return a member of the group that has its share `beside` the others. `begins`: it starts at the group's
        positions."""
        new = self.join(group, *topics, session_timeout_s=session_timeout_s)
        self.settle([*beside, new], *topics)
        if begins:
            begin(new[1])
        return new

    def settle(self, members: Collection[tuple[Transport, Member]], *topics: str) -> None:
        """Wait until these members own every partition, each partition once, and each member has a fair share."""
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
        """Wait until the condition is true, for as long as the harness's patience."""
        await_true(what, condition, self.patience_s)

    def all_records(self, *topics: str, bodies: bool = True, transport: Transport | None = None) -> list[Record]:
        """Return all records that are on the topics now."""
        return read_all(transport or self.transport, topics, bodies=bodies)


def begin(member: Member) -> None:
    """Seek every owned partition to the group's position."""
    for place, position in member.committed(member.assignment()).items():
        member.seek(place, position.offset)


def places_of(transport: Transport, topic: str) -> list[TopicPartition]:
    """Return all partitions of a topic."""
    return [TopicPartition(topic, number) for number in range(transport.admin.topics()[topic].partitions)]


def read_all(transport: Transport, topics: Iterable[str], *, bodies: bool = True) -> list[Record]:
    """Return the records of the topics, up to the end at the time of the call."""
    ends = {place: end for topic in topics for place, end in transport.admin.end_offsets(topic).items()}
    begins = {place: begin for topic in topics for place, begin in transport.admin.begin_offsets(topic).items()}
    reader = transport.reader(begins, bodies=bodies)
    found: list[Record] = []
    until = time.monotonic() + PATIENCE_S
    try:
        for batch in read_to_ends(transport, reader, ends):
            found += batch
            if time.monotonic() > until:
                raise AssertionError(f"the end of {', '.join(topics)} was not reached within {PATIENCE_S:g} s")
        return found
    finally:
        reader.close()


def take(transport: Transport, source: Any, num: int, patience_s: float = PATIENCE_S) -> list[Record]:
    """Return at least `num` records from a reader or member."""
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
    """Seek newly owned partitions to the group's position. The caller keeps `positioned`."""
    assignment = member.assignment()
    new = [place for place, number in assignment.items() if positioned.get(place) != number]
    if new:
        for place, position in member.committed(new).items():
            member.seek(place, position.offset)
    positioned.clear()
    positioned.update(assignment)


class CarryingWorker:
    """One of several workers that carry records from one topic to another, each record exactly once."""

    def __init__(self, transport: Transport, group: str, source: str, target: str, *, name: str) -> None:
        self.transport = transport
        self.target = target
        self.member = transport.member(group, [source], name=name, session_timeout_s=10.0)
        self.producer = transport.producer(name)
        self.producer.start()
        self._positioned: dict[TopicPartition, int] = {}

    def turn(self, max_records: int = 50) -> int:
        """Carry up to `max_records`, and return their number."""
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
            # The worker carries its own partitions again, from the group's positions.
            self.transport.wait([self.member], 0.0)
            self._positioned.clear()
            position_new(self.member, self._positioned)
            return 0
        return len(records)


def record_again(record: Record, topic: str) -> NewRecord:
    """Return a record with the same contents, for another topic."""
    return NewRecord(topic, record.partition, record.key, record.value, record.headers)


def new(topic: str, partition: int, text: str, headers: Headers = ()) -> NewRecord:
    """Return a record whose key and value are both `text`."""
    return NewRecord(topic, partition, text.encode(), text.encode(), headers)


def texts(records: Iterable[Record]) -> list[str]:
    """Return the keys of the records as texts."""
    return [(record.key or b"").decode() for record in records]


def by_place(records: Iterable[Record]) -> Mapping[TopicPartition, list[Record]]:
    """Return the records of each partition, in order."""
    found: dict[TopicPartition, list[Record]] = defaultdict(list)
    for record in records:
        found[record.place].append(record)
    return found
