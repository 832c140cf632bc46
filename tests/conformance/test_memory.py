"""The log in memory passes the suite, and is deterministic under a manual clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rftstream.errors import AssignmentLost, ProducerLost
from rftstream.testing.conformance import (
    ConformanceHarness,
    TransportConformance,
    run_in_threads,
)
from rftstream.transport.base import NewRecord, Position, TopicPartition, TopicSettings, Transport
from rftstream.transport.memory import MemoryLog


class MemoryHarness(ConformanceHarness):
    session_timeout_s = 0.3

    def __init__(self) -> None:
        self._log = MemoryLog()

    def connect(self) -> Transport:
        return self._log.connect()

    def peers(self, peers: Sequence[tuple[Any, tuple[Any, ...]]]) -> list[Any]:
        return run_in_threads(self.connect, peers)


class TestMemory(TransportConformance):
    @pytest.fixture
    def harness(self) -> ConformanceHarness:
        return MemoryHarness()


class ManualClock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def log(clock: ManualClock) -> MemoryLog:
    log = MemoryLog(clock)
    log.connect().admin.ensure_topics({"a": TopicSettings(partitions=2)})
    log.connect().admin.commit_initial("g", ["a"])
    return log


def test_sessions_run_out_by_the_clock_alone(log: MemoryLog, clock: ManualClock) -> None:
    first = log.connect().member("g", ["a"], name="first")
    second = log.connect().member("g", ["a"], name="second")
    first.poll()
    assert len(first.assignment()) == len(second.assignment()) == 1
    old = second.snapshot()
    clock.now_s += 9.0
    first.poll()
    assert len(first.assignment()) == 1
    clock.now_s += 2.0
    first.poll()
    assert len(first.assignment()) == 2
    producer = log.connect().producer("p")
    producer.start()
    with pytest.raises(AssignmentLost):
        producer.commit([], positions={place: Position(0) for place in old.assignment}, snapshot=old)
    second.poll()
    first.poll()
    assert len(second.assignment()) == len(first.assignment()) == 1


def test_wait_returns_at_once_with_a_manual_clock(log: MemoryLog) -> None:
    transport = log.connect()
    transport.wait([transport.reader({TopicPartition("a", 0): 0})], 1e9)


class CrashError(Exception):
    pass


@pytest.mark.parametrize(("point", "visible"), [("before_commit", 0), ("after_commit", 1)])
def test_a_fault_at_a_commit(log: MemoryLog, point: str, visible: int) -> None:
    heard: list[tuple[str, str]] = []

    def fault(at: str, process: str) -> None:
        heard.append((at, process))
        if at == point:
            raise CrashError

    transport = log.connect("explorer-0")
    producer = transport.producer("p")
    producer.start()
    log.fault = fault
    with pytest.raises(CrashError):
        producer.commit([NewRecord("a", 0, b"k", b"v")], positions={TopicPartition("a", 0): Position(1)}, group="g")
    log.fault = None
    assert heard[-1] == (point, "explorer-0")
    assert transport.admin.end_offsets("a")[TopicPartition("a", 0)] == visible
    assert transport.admin.committed("g")[TopicPartition("a", 0)].offset == visible


def test_a_takeover_during_a_commit_fences_it(log: MemoryLog) -> None:
    producer = log.connect("old").producer("p")
    producer.start()

    def take_over(point: str, process: str) -> None:
        if point == "before_commit":
            log.connect("new").producer("p").start()

    log.fault = take_over
    with pytest.raises(ProducerLost):
        producer.commit([NewRecord("a", 0, b"k", b"v")])
    assert log.connect().admin.end_offsets("a")[TopicPartition("a", 0)] == 0
