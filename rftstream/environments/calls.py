"""Calls of environments' methods, outside the sampling thread.

An environment is user code: it may be slow, hang, or raise. Each environment object has a `CallLine`, which makes its
calls one at a time, in order. Calls of different objects run at the same time (call_workers.py).
`EnvironmentCalls.poll` hands out the results in the turn loop's thread, so that nothing else has to be thread-safe:

    line = calls.open()
    line.call("reply", environment.reply, said, then=lambda result: print(result.value, result.error))
    while line.is_busy:
        calls.poll()
    line.close("close", environment.close)

A call that exceeds the time limit is abandoned. A coroutine is cancelled. A plain function cannot be stopped: its
thread is abandoned, and its later result is ignored.

Without workers, calls run at once in the caller's thread, as for environments that declare `is_immediate` and in
simulations. A coroutine is then stepped manually: `await Pause(seconds)` makes it wait by the given clock.
"""

from __future__ import annotations

import inspect
import math
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

LOOK_EVERY_S = 0.05
"""Seconds between two checks of time limits."""
CLOSE_S = 2.0
"""Seconds for environments to close when the process ends."""


class CallResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a call: a value, an error, or the fact that it exceeded its time."""

    value: Any = None
    error: BaseException | None = None
    timed_out: bool = False


Then = Callable[[CallResult], None]
"""A function that gets the result of a call, in the polling thread."""


@dataclass(slots=True, eq=False)
class EnvironmentCall:
    """A call of a method. A CallLine makes it; its runner sets `started_at`."""

    line: CallLine
    method: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    then: Then | None
    """The function for the result; None if nobody needs the result any more."""
    more_s: float = 0.0
    """Seconds in addition to the time limit of all calls."""
    started_at: float | None = None
    """Time at which it began to run; None while it waits for a thread."""


class CallRunner(Protocol):
    """Runs calls outside the sampling thread: `call_workers.CallWorkers`."""

    def run(self, call: EnvironmentCall) -> None:
        """Begin the call. `take_ended` reports its end."""

    def cancel(self, call: EnvironmentCall) -> None:
        """End the call early if possible. `take_ended` still reports its end."""

    def abandon(self, call: EnvironmentCall) -> None:
        """Abandon the call: its end does not matter."""

    def take_ended(self) -> list[tuple[EnvironmentCall, CallResult]]:
        """Return the calls that ended since the last call of this method. Abandoned calls may be among them."""

    def close(self) -> None:
        """End all threads that can be ended."""


class Pause:
    """A pause in a coroutine of a simulated environment: `await Pause(0.5)` takes half a second by the clock."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __await__(self) -> Generator[float]:
        yield self._seconds


class CallLine:
    """The calls of one environment object, one at a time. `EnvironmentCalls.open` makes it. Its owner uses `call` any
    number of times, and `close` once."""

    def __init__(self, calls: EnvironmentCalls, *, is_immediate: bool) -> None:
        self.is_immediate = is_immediate
        self.running: EnvironmentCall | None = None
        self.waiting: deque[EnvironmentCall] = deque()
        self.place: object = None
        """The place where workers run the line's coroutines. Only the workers use it."""
        self._calls = calls
        self._is_closed = False

    @property
    def is_busy(self) -> bool:
        """Whether a call has no result yet."""
        return self.running is not None or bool(self.waiting)

    def call(self, method: str, function: Callable[..., Any], *arguments: Any, then: Then, more_s: float = 0.0) -> None:
        """Make a call after the earlier ones. `method`: its name in metrics. `then` gets the result, unless the line is
        closed first. `more_s`: seconds in addition to the time limit."""
        assert not self._is_closed, f"{method}: the line is closed"
        self._add(EnvironmentCall(self, method, function, arguments, then, more_s))

    def close(self, method: str, function: Callable[[], Any] | None, *, then: Then | None = None) -> None:
        """Make a last call, if one is given. Waiting calls are dropped. A running call is cancelled or waited for, and
        its result is dropped."""
        self._is_closed = True
        self.waiting.clear()
        if (running := self.running) is not None:
            running.then = None
            self._calls.cancel(running)
        if function is not None:
            self._add(EnvironmentCall(self, method, function, (), then))

    def _add(self, call: EnvironmentCall) -> None:
        if self.running is None and not self.waiting:
            self._calls.begin(call)
        else:
            self.waiting.append(call)


class EnvironmentCalls:
    """All calls of a turn loop. The composition root makes it; the turn loop opens a line for each rollout, polls, and
    closes it at the end. Only one thread may use it."""

    def __init__(
        self,
        *,
        now: Callable[[], float],
        timeout_s: float = math.inf,
        workers: CallRunner | None = None,
        observe: Callable[[str, float, bool], None] | None = None,
    ) -> None:
        """`timeout_s`: time limit of each call, by the clock `now`. `workers`: None to make all calls in the caller's
        thread. `observe`: gets the method of each ended call, its seconds, and whether it was abandoned."""
        self._now = now
        self._timeout_s = timeout_s
        self._workers = workers
        self._observe = observe
        self._beside: set[EnvironmentCall] = set()
        """Calls that run in workers."""
        self._stepped: dict[EnvironmentCall, tuple[Any, float]] = {}
        """Coroutines that are stepped manually, with the time of their next step."""
        self._look_at = 0.0

    def open(self, *, is_immediate: bool = False) -> CallLine:
        """Return the line of another environment object. `is_immediate`: the object never blocks, so its calls run at
        once in this thread."""
        return CallLine(self, is_immediate=is_immediate or self._workers is None)

    @property
    def num_running(self) -> int:
        """Number of calls without a result."""
        return len(self._beside) + len(self._stepped)

    def poll(self) -> None:
        """Hand out the results of ended calls, and abandon calls that exceed the time limit."""
        if self._beside and self._workers is not None:
            for call, result in self._workers.take_ended():
                self._end(call, result)
        now = self._now()
        for call in [call for call, (_, due) in self._stepped.items() if due <= now]:
            if call in self._stepped:
                self._step(call)
        if now >= self._look_at:
            self._look_at = now + LOOK_EVERY_S
            for call in [*self._beside, *self._stepped]:
                if call.started_at is not None and now - call.started_at >= self._timeout_s + call.more_s:
                    self._give_up(call)

    def idle_s(self) -> float:
        """Return the seconds until `poll` has work; infinite if nothing runs. Calls in workers may end earlier: then
        they ring."""
        now = self._now()
        dues = [due for _, due in self._stepped.values()]
        ends = [
            call.started_at + self._timeout_s + call.more_s
            for call in (*self._beside, *self._stepped)
            if call.started_at is not None
        ]
        return max(0.0, min([*dues, *ends], default=math.inf) - now)

    def close(self, within_s: float = CLOSE_S) -> None:
        """End all calls. Calls in workers get `within_s` seconds. The owner must have closed all lines before."""
        deadline = time.monotonic() + within_s
        while self._beside and time.monotonic() < deadline:
            self.poll()
            time.sleep(0.001)
        for call in [*self._beside, *self._stepped]:
            self._drop(call)
        if self._workers is not None:
            self._workers.close()

    # ------------------------------------------------------------------------------------------ for lines

    def begin(self, call: EnvironmentCall) -> None:
        """Begin a call of a line of which no call runs."""
        line = call.line
        line.running = call
        if self._workers is not None and not line.is_immediate:
            self._beside.add(call)
            self._workers.run(call)
            return
        call.started_at = self._now()
        try:
            value = call.function(*call.arguments)
        except (Exception, SystemExit) as error:
            self._end(call, CallResult(error=error))
            return
        if value is not None and type(value) is not tuple and inspect.isawaitable(value):
            self._stepped[call] = value.__await__(), call.started_at
            self._step(call)
        else:
            self._end(call, CallResult(value=value))

    def cancel(self, call: EnvironmentCall) -> None:
        """End a call whose result nobody needs, as soon as possible."""
        if call in self._stepped:
            self._end(call, CallResult())
        elif self._workers is not None:
            self._workers.cancel(call)

    # ------------------------------------------------------------------------------------------ inside

    def _step(self, call: EnvironmentCall) -> None:
        steps, _ = self._stepped[call]
        try:
            waits = steps.send(None)
        except StopIteration as end:
            self._end(call, CallResult(value=end.value))
        except (Exception, SystemExit) as error:
            self._end(call, CallResult(error=error))
        else:
            if isinstance(waits, int | float):
                self._stepped[call] = steps, self._now() + waits
            else:
                text = f"{call.method} awaits {type(waits).__name__}, expected an environment without is_immediate"
                self._end(call, CallResult(error=TypeError(text)))

    def _give_up(self, call: EnvironmentCall) -> None:
        self._drop(call)
        self._end(call, CallResult(timed_out=True))

    def _drop(self, call: EnvironmentCall) -> None:
        if call in self._beside and self._workers is not None:
            self._beside.discard(call)
            self._workers.abandon(call)
        elif call in self._stepped:
            _close_steps(self._stepped.pop(call)[0])

    def _end(self, call: EnvironmentCall, result: CallResult) -> None:
        line, then = call.line, call.then
        if line.running is not call:
            return  # it was abandoned
        self._beside.discard(call)
        if self._stepped and (stepped := self._stepped.pop(call, None)) is not None:
            _close_steps(stepped[0])
        if call.started_at is not None and self._observe is not None:
            self._observe(call.method, self._now() - call.started_at, result.timed_out)
        line.running = None
        if line.waiting:
            self.begin(line.waiting.popleft())
        if then is not None:
            then(result)


def _close_steps(steps: Any) -> None:
    with suppress(Exception):  # user code: a coroutine may refuse to end
        steps.close()
