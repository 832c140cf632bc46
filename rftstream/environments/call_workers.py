"""Threads in which environments' methods run: one for each running plain function, and one for all coroutines.

Threads start when they are needed, and end after a time without work. All are daemon threads, since a hanging function
cannot be stopped.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rftstream.environments.calls import CallResult, EnvironmentCall

KEPT_S = 10.0
"""Seconds without work after which a thread ends."""
STUCK_S = 1.0
"""Seconds after which an event loop that does not answer counts as stuck: a coroutine blocks it."""
CLOSE_S = 1.0
"""Largest number of seconds to wait for the coroutines' thread at the end."""


class CallWorkers:
    """Runs calls in threads. The composition root makes it for one `EnvironmentCalls`, its only user.

    A plain function gets a thread while there are fewer than `max_threads`; others wait. An `async def` runs on the
    event loop of its line. A loop that a coroutine blocks keeps its lines; later lines get a new loop."""

    def __init__(self, *, max_threads: int, ring: Callable[[], None] = lambda: None) -> None:
        """`ring`: called in any thread whenever a call has ended."""
        self._ring = ring
        self._ended: queue.SimpleQueue[tuple[EnvironmentCall, CallResult]] = queue.SimpleQueue()
        self._threads = _PlainThreads(max_threads, self._run_plain)
        self._loop: _LoopThread | None = None
        """The event loop for new lines."""
        self._loops: list[_LoopThread] = []
        self._tasks: dict[EnvironmentCall, _LoopTask] = {}
        """Running coroutines, by their call."""
        self._lock = threading.Lock()
        self._is_closed = False

    def run(self, call: EnvironmentCall) -> None:
        """Begin the call in a thread, or on the event loop."""
        if inspect.iscoroutinefunction(call.function):
            self._run_on_loop(call, lambda: call.function(*call.arguments))
        else:
            self._threads.put(call)

    def cancel(self, call: EnvironmentCall) -> None:
        """Cancel a coroutine. A running plain function continues to its end; a waiting one is never started."""
        self._threads.skip(call)
        with self._lock:
            task = self._tasks.get(call)
        if task is not None:
            task.cancel()

    def abandon(self, call: EnvironmentCall) -> None:
        """Cancel a coroutine, or abandon a hanging thread."""
        with self._lock:
            task = self._tasks.get(call)
        if task is not None:
            task.cancel()
            task.loop.ask()
        else:
            self._threads.abandon(call)

    def take_ended(self) -> list[tuple[EnvironmentCall, CallResult]]:
        """Return the calls that ended since the last call of this method, with their results."""
        ended = []
        while True:
            try:
                ended.append(self._ended.get_nowait())
            except queue.Empty:
                return ended

    def close(self) -> None:
        """End idle threads, and loops that are not stuck. `ring` is not called afterwards."""
        with self._lock:
            self._is_closed = True
        self._threads.close()
        for loop in self._loops:
            loop.close()

    # ------------------------------------------------------------------------------------------ in threads

    def _run_plain(self, call: EnvironmentCall) -> None:
        call.started_at = time.monotonic()
        try:
            value = call.function(*call.arguments)
        except BaseException as error:  # user code: it may even call sys.exit
            self._end(call, CallResult(error=error))
            return
        if inspect.isawaitable(value):
            self._run_on_loop(call, lambda: value)
        else:
            self._end(call, CallResult(value=value))

    def _run_on_loop(self, call: EnvironmentCall, begin: Callable[[], Awaitable[Any]]) -> None:
        with self._lock:
            loop = call.line.place if isinstance(call.line.place, _LoopThread) else self._fresh_loop()
            call.line.place = loop
            if call.started_at is None:
                call.started_at = time.monotonic()
            self._tasks[call] = task = _LoopTask(loop, begin, lambda result: self._task_ended(call, result))
        task.begin_soon()

    def _fresh_loop(self) -> _LoopThread:
        """Return the event loop for a new line. The caller holds the lock."""
        if self._loop is None or self._loop.is_stuck:
            self._loop = _LoopThread()
            self._loops.append(self._loop)
        return self._loop

    def _task_ended(self, call: EnvironmentCall, result: CallResult) -> None:
        with self._lock:
            self._tasks.pop(call, None)
        self._end(call, result)

    def _end(self, call: EnvironmentCall, result: CallResult) -> None:
        with self._lock:
            if not self._is_closed:
                self._ended.put((call, result))
                self._ring()


class _LoopTask:
    """A coroutine on an event loop. Any thread may begin and cancel it; its end is reported in the loop's thread."""

    def __init__(
        self, loop: _LoopThread, begin: Callable[[], Awaitable[Any]], ended: Callable[[CallResult], None]
    ) -> None:
        self.loop = loop
        self._begin = begin
        self._ended = ended
        self._task: asyncio.Task[CallResult] | None = None

    def begin_soon(self) -> None:
        self.loop.call(self._create)

    def cancel(self) -> None:
        self.loop.call(lambda: self._task.cancel() if self._task is not None else None)

    def _create(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(lambda task: self._ended(CallResult() if task.cancelled() else task.result()))

    async def _run(self) -> CallResult:
        try:
            return CallResult(value=await self._begin())
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # user code, as above; it must not end the loop
            return CallResult(error=error)


@dataclass(slots=True, eq=False)
class _Thread:
    call: EnvironmentCall | None = None
    is_abandoned: bool = False


class _PlainThreads:
    """Threads that take calls from one queue."""

    def __init__(self, limit: int, run: Callable[[EnvironmentCall], None]) -> None:
        self._limit = limit
        self._run = run
        self._waiting: deque[EnvironmentCall] = deque()
        self._changed = threading.Condition()
        self._threads: set[_Thread] = set()
        """Threads that were not abandoned."""
        self._num_idle = 0
        self._is_closed = False

    def put(self, call: EnvironmentCall) -> None:
        with self._changed:
            self._waiting.append(call)
            if self._num_idle < len(self._waiting) and len(self._threads) < self._limit:
                self._begin_thread()
            self._changed.notify()

    def skip(self, call: EnvironmentCall) -> None:
        """Let a call that has not begun end without running."""
        with self._changed:
            if call in self._waiting:
                call.function, call.arguments = _nothing, ()

    def abandon(self, call: EnvironmentCall) -> None:
        with self._changed:
            for thread in [thread for thread in self._threads if thread.call is call]:
                thread.is_abandoned = True
                self._threads.remove(thread)
                if self._waiting:
                    self._begin_thread()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _begin_thread(self) -> None:
        thread = _Thread()
        self._threads.add(thread)
        threading.Thread(target=self._work, args=(thread,), name="environment", daemon=True).start()

    def _work(self, thread: _Thread) -> None:
        while (call := self._next(thread)) is not None:
            self._run(call)

    def _next(self, thread: _Thread) -> EnvironmentCall | None:
        """Return the next call for a thread, or None if the thread is to end."""
        with self._changed:
            thread.call = None
            if not thread.is_abandoned:
                self._num_idle += 1
                self._changed.wait_for(lambda: self._waiting or self._is_closed, KEPT_S)
                self._num_idle -= 1
                if self._waiting and not self._is_closed:
                    thread.call = self._waiting.popleft()
                    return thread.call
                self._threads.discard(thread)
            return None


def _nothing() -> None:
    """Replace a call that is not made."""


@dataclass(slots=True, eq=False)
class _LoopThread:
    """An asyncio event loop in its own thread."""

    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _asked_at: float | None = None
    """Time since which the loop has not answered; None if it has."""
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._serve, name="environments", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], object]) -> None:
        """Call a function in the loop's thread."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function)

    def ask(self) -> None:
        """Send the loop a test call, which it answers if nothing blocks it."""
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            self.call(self._answer)

    @property
    def is_stuck(self) -> bool:
        """Whether the loop has not answered for too long."""
        return self._asked_at is not None and time.monotonic() - self._asked_at > STUCK_S

    def close(self) -> None:
        """End the loop and everything that runs on it, unless it is stuck."""
        self.call(self._loop.stop)
        self._thread.join(CLOSE_S)

    def _answer(self) -> None:
        self._asked_at = None

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.wait(tasks, timeout=CLOSE_S) if tasks else asyncio.sleep(0))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()
