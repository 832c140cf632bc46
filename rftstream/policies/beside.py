"""What policies have in common whose engines work beside them: in threads or processes of their own."""

from __future__ import annotations

import math
import queue
from typing import Generic, TypeVar

from rftstream.contracts.versions import VersionName
from rftstream.policies.base import Completion

STEP_S = 0.02
"""Longest time in seconds that a step waits for something to finish."""

Active = TypeVar("Active")
Result = TypeVar("Result")


class EngineBeside(Generic[Active, Result]):
    """A base of policies that collect what their engine has finished. The engine puts results into a queue, from any
    thread; `step` takes them out, in the thread of the policy."""

    def __init__(self) -> None:
        self._version: VersionName | None = None
        self._active: dict[str, Active] = {}
        """Request id -> the request, from `submit` until its completion is returned."""
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()

    @property
    def version(self) -> VersionName | None:
        """The version that new requests begin with. What runs may still be sampled by an older one."""
        return self._version

    @property
    def num_active(self) -> int:
        """Number of requests that were submitted and neither returned nor aborted."""
        return len(self._active)

    def step(self) -> list[Completion]:
        """Wait at most STEP_S for the engine, and return the requests that finished. Raises the engine's error if it
        failed."""
        done: list[Completion] = []
        wait_s = 0.0 if self.idle_s() else STEP_S
        while True:
            try:
                result = self._results.get(timeout=wait_s) if wait_s else self._results.get_nowait()
            except queue.Empty:
                self._go_on()
                return done
            wait_s = 0.0
            if (completion := self._collect(result)) is not None:
                done.append(completion)

    def idle_s(self) -> float:
        """Return 0 while there is something to do, else infinity."""
        return 0.0 if self._active and self._version is not None else math.inf  # `step` waits for what is under way

    def _collect(self, result: Result) -> Completion | None:
        """Return the completion that a result is, or None if no request has finished by it."""
        raise NotImplementedError

    def _go_on(self) -> None:
        """Begin what can be begun after all results were collected."""
