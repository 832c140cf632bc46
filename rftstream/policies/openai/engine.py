"""One of the servers that `openai` calls: its waiting and running requests, its version, and whether it may be
called."""

from __future__ import annotations

import functools
import math
import queue
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from rftstream import metrics
from rftstream.contracts.versions import VersionName
from rftstream.errors import PolicyError
from rftstream.http.client import Call
from rftstream.policies.base import Completion
from rftstream.policies.openai.asking import ServedCall, ServerAsker, ServerFailure
from rftstream.policies.openai.routing import CircuitBreaker

T = TypeVar("T")

Answer = Completion | ServerFailure | PolicyError
"""The result of a request at a server."""


class ServedEngine:
    """A server. `OpenAiPolicy` makes one for each url, puts calls into `waiting`, and calls `go_on` in each step.
    Threads then send the requests that may be sent now, or give the server its next version. The handling of their
    results comes into a queue, since it runs in the policy's thread."""

    def __init__(
        self,
        asker: ServerAsker,
        threads: ThreadPoolExecutor,
        num_places: int,
        results: queue.SimpleQueue[Callable[[], Completion | None]],
        on_answer: Callable[[ServedEngine, ServedCall, Answer], Completion | None],
    ) -> None:
        """`num_places`: requests at the server at once. `on_answer`: gets the result of each request, and returns the
        completion of a finished one."""
        self.url, self.where = asker.url, asker.where
        self._asker, self._threads, self._num_places = asker, threads, num_places
        self._results, self._on_answer = results, on_answer
        self.breaker = CircuitBreaker(time.monotonic)
        self.error = ""
        """Error of the last failure."""
        self.version: VersionName | None = None
        """The version that the server has."""
        self.next: VersionName | None = None
        """The version that the server gets as soon as no request is running there."""
        self.sending: VersionName | None = None
        """The version that is being sent to the server."""
        self.waiting: deque[ServedCall] = deque()
        self._tried_at = -math.inf
        """Time at which the last update or probe of the server began."""
        self._num_asked = 0
        """Number of running requests, aborted ones included."""
        self._is_probed = False
        self._own_call = Call()
        """The call of the running update or probe."""
        metrics.SERVER_UP.labels(self.url).set(1)
        metrics.SERVER_IN_FLIGHT.labels(self.url).set(0)

    @property
    def num_full(self) -> int:
        """Number of answers so far by which the server said that it has too many requests."""
        return self._asker.num_full

    @property
    def load(self) -> int:
        """Number of requests that wait or run at the server."""
        return len(self.waiting) + self._num_asked

    @property
    def is_draining(self) -> bool:
        """Whether the server still has to get a version; until then no request is sent."""
        return self.next is not None or self.sending is not None

    def is_away(self, tries: int, since: float) -> bool:
        """Return whether the last `tries` tries all failed and the latest of them began after `since`."""
        is_tried = self.sending is not None or self._is_probed
        return self.breaker.num_pauses >= tries and self.breaker.is_open and not is_tried and self._tried_at >= since

    def go_on(self) -> None:
        """Send all requests that may be sent now, give the server its next version, or probe whether it answers
        again."""
        if self.sending is not None or self._is_probed or (self.next or self.version) is None:
            return
        if self.breaker.is_open and not self.breaker.is_due:
            return
        if self.next is None and self.waiting and self._asker.may_have_lost_version():
            self.next = self.version
        if self.next is not None:
            if not self._num_asked:
                self.sending, self._own_call, self._tried_at = self.next, Call(), time.monotonic()
                update = functools.partial(self._asker.update, self.sending, self._own_call)
                self._begin(update, functools.partial(self._on_update, self.sending))
        elif self.breaker.is_open:
            self._is_probed, self._own_call, self._tried_at = True, Call(), time.monotonic()
            self._begin(functools.partial(self._asker.probe, self._own_call), self._on_probe)
        else:
            assert self.version is not None
            while self.waiting and self._num_asked < self._num_places:
                call = self.waiting.popleft()
                self._count(1)
                sample = functools.partial(self._asker.sample, call, self.version)
                self._begin(sample, functools.partial(self._on_answer, self, call))

    def _begin(self, work: Callable[[], T], then: Callable[[T], Completion | None]) -> None:
        """Run `work` in a thread, and have the policy call `then` with its result."""
        self._threads.submit(lambda: self._results.put(functools.partial(then, work())))

    def on_answer(self, call: ServedCall, result: Answer) -> None:
        """Record the result of a request. A server that lost a request may have restarted, so it gets its weights again
        before the next request. An aborted request shows nothing."""
        self._count(-1)
        if call.cancelled.is_set():
            return
        if isinstance(result, ServerFailure):
            self._failed(result.text, is_enough=result.is_enough, after_s=result.after_s)
            if self._asker.takes_versions and result.is_lost:
                self.next = self.next or self.version
        elif isinstance(result, Completion):
            self._count_result("answered" if result.error is None else "refused")
            self.breaker.answered()

    def _on_update(self, name: VersionName, error: PolicyError | None) -> None:
        """Record that the server has the version, or that the update failed. After a failure the update is still due;
        the only server's error is raised."""
        self.sending = None
        if error is not None:
            self._probe_failed(str(error))
            if self._asker.is_only:
                raise error
            return
        self.version = name
        if self.next == name:
            self.next = None
        self._is_back()

    def _on_probe(self, failure: ServerFailure | None) -> None:
        """Note whether the server answers again."""
        self._is_probed = False
        if failure is not None:
            self._probe_failed(failure.text, failure.after_s)
        else:
            self._is_back()

    def forget(self, call: ServedCall) -> None:
        """Remove a request that waits here."""
        self.waiting = deque(one for one in self.waiting if one is not call)

    def take_waiting(self) -> list[ServedCall]:
        """Remove and return all waiting requests, for other servers."""
        taken, self.waiting = list(self.waiting), deque()
        return taken

    def close(self) -> None:
        """Close the connections. No thread may be working any more."""
        self._asker.close()

    def cancel(self) -> None:
        """Cancel the running update or probe."""
        self._own_call.cancel()

    def _failed(self, error: str, *, is_enough: bool, after_s: float) -> None:
        self._count_result("failed")
        self.error = error
        if not self._asker.is_only:
            self.breaker.failed(is_enough=is_enough, after_s=after_s)
            self._show_up()

    def _probe_failed(self, error: str, after_s: float = 0.0) -> None:
        self._count_result("failed")
        self.error = error
        if not self._asker.is_only:
            self.breaker.probe_failed(after_s)
            self._show_up()

    def _is_back(self) -> None:
        self.breaker.probe_answered()
        self._show_up()

    def _show_up(self) -> None:
        metrics.SERVER_UP.labels(self.url).set(0 if self.breaker.is_open else 1)

    def _count_result(self, result: str) -> None:
        metrics.SERVER_REQUESTS.labels(self.url, result).inc()

    def _count(self, change: int) -> None:
        self._num_asked += change
        metrics.SERVER_IN_FLIGHT.labels(self.url).set(self._num_asked)
