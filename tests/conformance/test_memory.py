"""The log in memory passes the suite, and is deterministic under a manual clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rftstream.contracts.records import NewRecord, TopicPartition
from rftstream.errors import AssignmentLost, ProducerLost, TransactionAborted, TransportError
from rftstream.testing.conformance import ConformanceHarness, TransportConformance, run_in_threads
from rftstream.testing.memory_run import ManualClock
from rftstream.transport.base import Position, Snapshot, TopicSettings, Transport
from rftstream.transport.memory.transport import MemoryLog

pytestmark = pytest.mark.law("lost", "twice", "fencing")

PLACE = TopicPartition("a", 0)


class MemoryHarness(ConformanceHarness):
    session_timeout_s = 0.3
    lives_on_while_working = False

    def __init__(self, *, marks: bool) -> None:
        self._log = MemoryLog(marks=marks)

    def connect(self) -> Transport:
        return self._log.connect()

    def peers(self, peers: Sequence[tuple[Any, tuple[Any, ...]]]) -> list[Any]:
        return run_in_threads(self.connect, peers)


class TestMemory(TransportConformance):
    @pytest.fixture
    def harness(self) -> ConformanceHarness:
        return MemoryHarness(marks=False)


class TestMemoryWithMarks(TransportConformance):
    @pytest.fixture
    def harness(self) -> ConformanceHarness:
        return MemoryHarness(marks=True)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def log(clock: ManualClock) -> MemoryLog:
    log = MemoryLog(clock.now, marks=True)
    log.connect().admin.ensure_topics({"a": TopicSettings(partitions=2)})
    log.connect().admin.commit_initial("g", ["a"])
    return log


def test_sessions_run_out_by_the_clock_alone(log: MemoryLog, clock: ManualClock) -> None:
    first = log.connect().member("g", ["a"], name="first")
    second = log.connect().member("g", ["a"], name="second")
    first.poll()
    second.poll()
    assert len(first.assignment()) == len(second.assignment()) == 1
    old = second.snapshot()
    clock.advance(9.0)
    first.poll()
    assert len(first.assignment()) == 1
    clock.advance(2.0)
    first.poll()
    assert len(first.assignment()) == 2
    producer = log.connect().producer("p")
    producer.start()
    with pytest.raises(AssignmentLost):
        producer.commit([], positions={place: Position(0) for place in old.assignment}, snapshot=old)
    second.poll()
    first.poll()
    second.poll()
    assert len(second.assignment()) == len(first.assignment()) == 1


def test_what_is_taken_from_a_member_is_nobodys_until_it_has_heard_of_it(log: MemoryLog) -> None:
    log.connect().admin.ensure_topics({"b": TopicSettings(partitions=1)})
    first = log.connect().member("g", ["a"], name="first")
    second = log.connect().member("g", ["a"], name="second")
    assert len(first.assignment()) == 2
    second.poll()
    assert second.assignment() == {}
    (taken,) = first.assignment().keys() - first.snapshot().assignment.keys()
    producer = log.connect().producer("p")
    producer.start()
    # The log looks at the generation alone: who commits what was taken from him has to look himself.
    snapshot = first.snapshot()
    careless = Snapshot(snapshot.group, first.assignment(), snapshot.token)
    producer.commit([], positions={taken: Position(0, "careless")}, snapshot=careless)
    with pytest.raises(AssignmentLost, match="not owned"):
        producer.commit([], positions={taken: Position(0)}, snapshot=snapshot)
    first.poll()
    second.poll()
    assert second.assignment().keys() == {taken}
    assert second.committed([taken]) == {taken: Position(0, "careless")}
    with pytest.raises(AssignmentLost, match="generation"):
        producer.commit([], positions={taken: Position(0)}, snapshot=careless)


def test_wait_returns_at_once_with_a_manual_clock(log: MemoryLog) -> None:
    transport = log.connect()
    transport.wait([transport.reader({TopicPartition("a", 0): 0})], 1e9)


class CrashError(Exception):
    pass


def failing_at(log: MemoryLog, point: str, error: Exception) -> None:
    def fault(at: str, process: str) -> None:
        if (at, process) == (point, "explorer-0"):
            raise error

    log.fault = fault


def seen(log: MemoryLog) -> list[bytes | None]:
    return [record.key for record in log.connect().reader({PLACE: 0}).poll()]


@pytest.mark.parametrize(
    ("point", "visible"), [("before_commit", False), ("in_commit", False), ("marking", True), ("after_commit", True)]
)
def test_a_crash_in_a_commit_leaves_it_to_time(log: MemoryLog, clock: ManualClock, point: str, visible: bool) -> None:
    producer = log.connect("explorer-0").producer("p", timeout_s=10.0)
    producer.start()
    failing_at(log, point, CrashError())
    with pytest.raises(CrashError):
        producer.commit([NewRecord("a", 0, b"k", b"v")], positions={PLACE: Position(1)}, group="g")
    other = log.connect().producer("other")
    other.start()
    other.commit([NewRecord("a", 0, b"after", b"v")])
    if point == "in_commit":
        # What others commit after it is not seen before it ends; positions are not told.
        clock.advance(9.9)
        assert seen(log) == []
        with pytest.raises(TransportError, match="pending"):
            log.connect().admin.committed("g")
        assert log.connect().admin.end_offsets("a")[PLACE] == 0
        with pytest.raises(TransportError, match="hides"):
            log.connect().admin.end_offsets("a", settled=True)
        clock.advance(0.2)
    else:
        clock.advance(0.6)
    assert seen(log) == [b"k", b"after"] if visible else [b"after"]
    assert log.connect().admin.committed("g")[PLACE].offset == int(visible)
    assert log.connect().admin.end_offsets("a", settled=True)[PLACE] > 1
    if point == "in_commit":
        with pytest.raises(ProducerLost, match="timed out"):
            producer.commit([NewRecord("a", 0, b"late", b"v")])


def test_a_refused_commit_leaves_nothing_but_offsets(log: MemoryLog) -> None:
    producer = log.connect("explorer-0").producer("p")
    producer.start()
    failing_at(log, "in_commit", TransactionAborted("refused"))
    with pytest.raises(TransactionAborted):
        producer.commit([NewRecord("a", 0, b"k", b"v")], positions={PLACE: Position(1)}, group="g")
    log.fault = None
    producer.commit([NewRecord("a", 0, b"again", b"v")])
    reader = log.connect().reader({PLACE: 0})
    assert [record.key for record in reader.poll()] == [b"again"]
    # A record and a mark, each twice.
    assert reader.position(PLACE) == log.connect().admin.end_offsets("a")[PLACE] == 4
    assert log.connect().admin.committed("g")[PLACE] == Position(0)


def test_marks_come_one_by_one(log: MemoryLog, clock: ManualClock) -> None:
    """A reader may see a part of what was committed; who asks for an end or a position waits for the rest."""
    places = log.places("a")
    partial = set()
    for number in range(12):
        producer = log.connect("explorer-0").producer(f"p{number}")
        producer.start()
        failing_at(log, "marking", TransportError("later"))
        before = [log.partitions[place].end for place in places]
        producer.commit([NewRecord("a", 0, b"k", b"v"), NewRecord("a", 1, b"k", b"v")],
                        positions={PLACE: Position(number)}, group="g")  # fmt: skip
        log.fault = None
        readers = [log.connect().reader({place: end}) for place, end in zip(places, before, strict=True)]
        partial.add(tuple(len(reader.poll()) for reader in readers))
        assert log.connect().admin.committed("g")[PLACE].offset == number
        assert sum(len(log.connect().reader({place: 0}).poll()) for place in places) == 2 * (number + 1)
    assert (1, 1) in partial
    assert partial & {(0, 0), (1, 0)}


@pytest.mark.parametrize("point", ["in_commit", "marking"])
def test_a_commit_with_an_unknown_result_is_one_or_the_other(log: MemoryLog, clock: ManualClock, point: str) -> None:
    results = set()
    for number in range(1, 30):
        producer = log.connect("explorer-0").producer(f"p{number}", timeout_s=10.0)
        producer.start()
        failing_at(log, point, ProducerLost("unknown"))
        with pytest.raises(ProducerLost):
            producer.commit([NewRecord("a", 0, b"%d" % number, b"v")], positions={PLACE: Position(number)}, group="g")
        log.fault = None
        with pytest.raises(ProducerLost, match="not started"):
            producer.commit([NewRecord("a", 0, b"k", b"v")])
        clock.advance(11.0)
        committed = log.connect().admin.committed("g")[PLACE].offset == number
        assert committed == (b"%d" % number in seen(log))
        results.add(committed)
    assert results == ({True, False} if point == "in_commit" else {True})


def test_a_takeover_during_a_commit_fences_it(log: MemoryLog) -> None:
    for at in ("before_commit", "in_commit"):
        producer = log.connect("old").producer("p")
        producer.start()

        def take_over(point: str, process: str, at: str = at) -> None:
            if (point, process) == (at, "old"):
                log.connect("new").producer("p").start()

        log.fault = take_over
        with pytest.raises(ProducerLost):
            producer.commit([NewRecord("a", 0, b"k", b"v")])
        log.fault = None
    assert seen(log) == []
