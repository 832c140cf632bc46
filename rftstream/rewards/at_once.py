"""Scores rollouts at the same time in a child of the scorer, each in a thread of its own, and says what the child does.

An answer of a served model takes seconds, some take minutes, and the child does nothing meanwhile. So each rollout of
a reward that asks such a model has a thread of its own, and its result leaves as soon as it is there. Other rewards of
the same rollout are called in the main thread, one after the other: users' functions need not be safe in threads, and
libraries set alarms, which only the main thread may do.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rftstream.rewards.event_loop import caught
from rftstream.rewards.frames import IDLE, At, waited_s, write_page

NOTHING = At(IDLE, 0, 0.0)


class WorkPage:
    """Tells the parent which item the child works on, through the page that they share (frames.py).

    The child makes it. Its main thread calls `begin` and `rest`; a thread that scores a rollout is `inside` meanwhile.
    The page shows the work of the main thread, or else that of the thread whose time is up first: if the parent kills
    the child, what the page shows is to blame. So a thread whose time is up is shown before a main thread that is busy.
    """

    def __init__(self, page: mmap.mmap, timeout_s: float = math.inf) -> None:
        """`timeout_s`: time limit of a call."""
        self._page = page
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._main = NOTHING
        self._threads: dict[int, At] = {}
        """Identifier of a thread -> its work."""

    def begin(self, number: int, num_items: int, *, delay_s: float) -> None:
        """Show that the main thread begins with this item, or with a call for so many."""
        self._show_main(At(number, num_items, time.monotonic(), delay_s=delay_s))

    def rest(self) -> None:
        """Show that the main thread has nothing to do."""
        self._show_main(NOTHING)

    def evaluates(self, part: int) -> None:
        """Show that this part of a reward evaluates an answer in the main thread; 0: no longer."""
        self._show_main(self._main._replace(part=part, cpu_s=time.process_time()))

    def allow(self, seconds: float) -> None:
        """Let the time limit of what the calling thread works on begin `seconds` from now."""
        since, delay_s = time.monotonic() + seconds, waited_s()
        with self._lock:
            thread = threading.get_ident()
            if thread in self._threads:
                self._threads[thread] = self._threads[thread]._replace(since=since, delay_s=delay_s)
            else:
                self._main = self._main._replace(since=since, delay_s=delay_s)
            self._show()

    @contextlib.contextmanager
    def inside(self, number: int) -> Iterator[None]:
        """Show that the calling thread works on this item."""
        thread = threading.get_ident()
        with self._lock:
            self._threads[thread] = At(number, 1, time.monotonic(), delay_s=waited_s())
            self._show()
        try:
            yield
        finally:
            with self._lock:
                del self._threads[thread]
                self._show()

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Show that the calling thread waits for the main thread meanwhile. Its time limit begins anew afterwards."""
        thread = threading.get_ident()
        with self._lock:
            at = self._threads.pop(thread)
            self._show()
        try:
            yield
        finally:
            with self._lock:
                self._threads[thread] = at._replace(since=time.monotonic(), delay_s=waited_s())
                self._show()

    def _show_main(self, at: At) -> None:
        with self._lock:
            self._main = at
            self._show()

    def _show(self) -> None:
        at = self._main
        if self._threads:
            first = min(self._threads.values(), key=lambda one: one.since)
            if at.number == IDLE or time.monotonic() - first.since > self._timeout_s:
                at = first
        write_page(self._page, at)


class ScoringThreads:
    """The threads of a child that score rollouts, and the calls that they leave to the main thread.

    The child makes it. It calls `submit` for each rollout, and `wait_for` before it reads: that makes the calls which
    threads ask for with `in_main` until there is something to read.
    """

    def __init__(self, page: WorkPage) -> None:
        self._page = page
        self._pools: dict[str, ThreadPoolExecutor] = {}
        self._calls: deque[tuple[int, Callable[[], Any], Future[Any]]] = deque()
        self._asked, self._ask = os.pipe()
        os.set_blocking(self._asked, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._asked, selectors.EVENT_READ)

    def submit(self, reward: str, num_threads: int, score: Callable[[], None]) -> None:
        """Call `score` in a thread of this reward, of which there are so many."""
        if reward not in self._pools:
            self._pools[reward] = ThreadPoolExecutor(num_threads, thread_name_prefix=f"reward of {reward}")
        self._pools[reward].submit(score)

    def in_main(self, number: int, call: Callable[[], Any]) -> Any:
        """Return what `call` returns or raises in the main thread, where it is shown as work on this item. The time
        until it begins counts for nobody."""
        done: Future[Any] = Future()
        self._calls.append((number, call, done))
        with self._page.outside():
            os.write(self._ask, b"\0")
            return done.result()

    def wait_for(self, readable: int) -> None:
        """Make the calls that threads ask for, until this file descriptor is readable."""
        if not self._pools:
            return
        if readable not in self._selector.get_map():
            self._selector.register(readable, selectors.EVENT_READ)
        while True:
            self.make_calls()
            if any(key.fd == readable for key, _ in self._selector.select()):
                return

    def leave(self) -> None:
        """End the process at once if there are threads: they may wait for answers, and nobody reads their results."""
        if self._pools:
            os._exit(0)

    def make_calls(self) -> None:
        """Make the calls that threads have asked for."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._asked, 1 << 16)
        while self._calls:
            number, call, done = self._calls.popleft()
            self._page.begin(number, 1, delay_s=waited_s())
            found = caught(call)
            self._page.rest()
            done.set_exception(found) if isinstance(found, BaseException) else done.set_result(found)
