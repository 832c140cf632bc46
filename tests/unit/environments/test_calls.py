"""Calls of environments: results, errors, time limits, one at a time for each object, and nothing is left behind."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rftstream.environments.call_workers import CallWorkers
from rftstream.environments.calls import CallLine, CallResult, EnvironmentCalls, Pause
from rftstream.testing import ManualClock

PATIENCE_S = 300.0


class Beside:
    """Calls with workers, and what the turn loop does with them."""

    def __init__(self, *, max_threads: int = 8) -> None:
        self.rung = threading.Event()
        self.later_s = 0.0
        """What the clock is ahead of the time at which calls begin."""
        self.calls = EnvironmentCalls(
            now=lambda: time.monotonic() + self.later_s,
            timeout_s=PATIENCE_S,
            workers=CallWorkers(max_threads=max_threads, ring=self.rung.set),
        )

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline
            self.rung.wait(0.01)
            self.rung.clear()
            self.calls.poll()

    def result(self, function: Callable[..., Any], *arguments: Any, line: CallLine | None = None) -> CallResult:
        found: list[CallResult] = []
        (line or self.calls.open()).call("reply", function, *arguments, then=found.append)
        assert found == [], "nothing is handed out before poll"
        self.until(lambda: bool(found))
        return found[0]

    def late_result(self, function: Callable[..., Any], *arguments: Any, line: CallLine | None = None) -> CallResult:
        """The result once the time limit is over."""
        self.later_s = PATIENCE_S
        result = self.result(function, *arguments, line=line)
        self.later_s = 0.0
        return result


@pytest.fixture
def make() -> Iterator[Callable[..., Beside]]:
    made: list[Beside] = []

    def build(**settings: Any) -> Beside:
        made.append(Beside(**settings))
        return made[-1]

    yield build
    for beside in made:
        beside.calls.close(within_s=0.0)


Make = Callable[..., Beside]


def double(number: int) -> int:
    return 2 * number


async def double_later(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


def returns_awaitable(number: int) -> Any:
    return double_later(number)


async def fail_later() -> None:
    raise KeyError("no such thing")


async def leave_later() -> None:
    sys.exit(3)


@pytest.mark.parametrize("function", [double, double_later, returns_awaitable])
def test_a_value(make: Make, function: Callable[..., Any]) -> None:
    assert make().result(function, 21) == CallResult(value=42)


@pytest.mark.parametrize("function", [{}.__getitem__, fail_later])
def test_an_error(make: Make, function: Callable[..., Any]) -> None:
    found = make().result(function, *([1] if function is not fail_later else []))
    assert isinstance(found.error, KeyError)
    assert not found.timed_out


@pytest.mark.parametrize("function", [sys.exit, leave_later])
def test_who_leaves_the_process_fails_alone(make: Make, function: Callable[..., Any]) -> None:
    beside = make()
    assert isinstance(beside.result(function).error, SystemExit)
    assert beside.result(double, 1).value == 2
    assert beside.result(double_later, 1).value == 2


def test_calls_of_one_object_run_one_at_a_time_and_in_order(make: Make) -> None:
    beside = make()
    line, running, seen = beside.calls.open(), threading.Lock(), []

    def alone(number: int) -> None:
        assert running.acquire(blocking=False)
        seen.append(number)
        running.release()

    async def alone_later(number: int) -> None:
        assert running.acquire(blocking=False)
        await asyncio.sleep(0)
        seen.append(number)
        running.release()

    found: list[CallResult] = []
    for number in range(20):
        line.call("reply", alone_later if number % 3 else alone, number, then=found.append)
    beside.until(lambda: not line.is_busy)
    assert [result.error for result in found] == [None] * 20
    assert seen == list(range(20))


@pytest.mark.parametrize("is_async", [False, True])
def test_a_call_that_blocks_holds_up_no_other(make: Make, is_async: bool) -> None:
    beside, released = make(), threading.Event()

    async def wait_async() -> str:
        while not released.is_set():
            await asyncio.sleep(0.001)
        return "at last"

    def wait() -> str:
        released.wait(PATIENCE_S)
        return "at last"

    found: list[CallResult] = []
    beside.calls.open().call("reply", wait_async if is_async else wait, then=found.append)
    for number in range(30):
        assert beside.result(double, number).value == 2 * number
        assert beside.result(double_later, number).value == 2 * number
    assert found == []
    released.set()
    beside.until(lambda: bool(found))
    assert found == [CallResult(value="at last")]


def test_a_function_that_hangs_is_given_up_and_its_object_closed(make: Make) -> None:
    beside, released, closed = make(max_threads=1), threading.Event(), threading.Event()
    line = beside.calls.open()
    assert beside.late_result(released.wait, 2 * PATIENCE_S, line=line) == CallResult(timed_out=True)
    line.close("close", closed.set)
    beside.until(lambda: not line.is_busy)
    assert closed.is_set(), "in another thread: the first one still hangs"
    assert beside.result(double, 1).value == 2
    released.set()


def test_a_coroutine_that_hangs_is_cancelled(make: Make) -> None:
    beside, cancelled = make(), threading.Event()

    async def hang() -> None:
        try:
            await asyncio.sleep(PATIENCE_S)
        finally:
            cancelled.set()

    assert beside.late_result(hang) == CallResult(timed_out=True)
    assert cancelled.wait(PATIENCE_S)


def test_a_coroutine_that_blocks_its_loop_holds_up_no_later_object(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rftstream.environments.call_workers.STUCK_S", 0.0)
    beside, released = make(), threading.Event()

    async def block() -> None:
        released.wait(PATIENCE_S)

    assert beside.late_result(block) == CallResult(timed_out=True)
    assert beside.result(double_later, 21).value == 42
    released.set()


def test_whoever_closes_a_line_hears_of_nothing_but_its_close(make: Make) -> None:
    beside, released, seen = make(), threading.Event(), []
    line, found = beside.calls.open(), list[CallResult]()

    def reply() -> None:
        released.wait(PATIENCE_S)
        seen.append("reply")

    line.call("reply", reply, then=found.append)
    line.call("save", seen.append, "save", then=found.append)
    line.close("close", lambda: seen.append("close"))
    assert line.is_busy
    released.set()
    beside.until(lambda: not line.is_busy)
    assert seen in (["reply", "close"], ["close"]), "close waits for what runs; what has not begun is dropped"
    assert found == []


def test_a_coroutine_ends_before_its_object_is_closed(make: Make) -> None:
    beside, begun, seen = make(), threading.Event(), []

    async def reply() -> None:
        begun.set()
        try:
            await asyncio.sleep(PATIENCE_S)
        finally:
            await asyncio.sleep(0.01)
            seen.append("reply ended")

    line = beside.calls.open()
    line.call("reply", reply, then=lambda result: None)
    assert begun.wait(PATIENCE_S)
    line.close("close", lambda: seen.append("close"))
    beside.until(lambda: not line.is_busy)
    assert seen == ["reply ended", "close"]


def test_threads_end_when_there_is_nothing_to_do(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rftstream.environments.call_workers.KEPT_S", 0.01)
    before = set(threading.enumerate())
    beside = make()
    assert beside.result(double, 1).value == 2
    beside.until(lambda: not set(threading.enumerate()) - before)
    assert beside.result(double, 2).value == 4


def test_without_workers_calls_are_made_at_once() -> None:
    calls, found = EnvironmentCalls(now=ManualClock().now), list[CallResult]()
    line = calls.open()
    line.call("reply", double, 21, then=found.append)
    line.call("reply", {}.__getitem__, 1, then=found.append)
    line.close("close", lambda: found.append(CallResult(value="closed")))
    assert [one.value for one in found] == [42, None, "closed"]
    assert isinstance(found[1].error, KeyError)
    assert calls.num_running == 0


def test_without_workers_coroutines_go_by_the_clock() -> None:
    clock, found = ManualClock(), list[CallResult]()
    calls = EnvironmentCalls(now=clock.now, timeout_s=10.0)

    async def wait(seconds: float) -> float:
        await Pause(seconds)
        return seconds

    for seconds in (3.0, 1.0, 30.0):
        calls.open().call("reply", wait, seconds, then=found.append)
    given_up = calls.open()
    given_up.call("reply", wait, 2.0, then=found.append)
    given_up.close("close", None)
    while calls.num_running:
        assert calls.idle_s() > 0
        clock.advance(calls.idle_s())
        calls.poll()
    assert found == [CallResult(value=1.0), CallResult(value=3.0), CallResult(timed_out=True)]


def test_a_call_may_have_more_time_than_others() -> None:
    clock, found = ManualClock(), list[CallResult]()
    calls = EnvironmentCalls(now=clock.now, timeout_s=10.0)

    async def wait(seconds: float) -> float:
        await Pause(seconds)
        return seconds

    for seconds, more_s in ((40.0, 60.0), (40.0, 20.0)):
        calls.open().call("start", wait, seconds, then=found.append, more_s=more_s)
    while calls.num_running:
        assert calls.idle_s() > 0
        clock.advance(calls.idle_s())
        calls.poll()
    assert found == [CallResult(timed_out=True), CallResult(value=40.0)]


def test_an_environment_that_says_immediate_and_waits(make: Make) -> None:
    found = list[CallResult]()
    calls = make().calls

    async def wait() -> None:
        await asyncio.Event().wait()

    calls.open(is_immediate=True).call("reply", wait, then=found.append)
    assert found[0].error is not None
