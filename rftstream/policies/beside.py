"""The common base of policies whose engines run beside them, in their own threads or processes."""

from __future__ import annotations

import math
import queue
from typing import Generic, TypeVar

from rftstream.contracts.versions import VersionName
from rftstream.policies.base import Completion

STEP_S = 0.02
"""Longest time in seconds that a step waits for a result."""

Active = TypeVar("Active")
Result = TypeVar("Result")


class EngineBeside(Generic[Active, Result]):
    """A base of policies that collect the results of their engine. The engine puts results into a queue, from any
    thread; `step` takes them out in the policy's thread."""

    def __init__(self) -> None:
        self._version: VersionName | None = None
        self._active: dict[str, Active] = {}
        """Request id -> the request, from `submit` until its completion is returned."""
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()

    @property
    def version(self) -> VersionName | None:
        """The version for new requests. Running requests may still use an older one."""
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
        """Return 0 while there is work, else infinity."""
        return 0.0 if self._active and self._version is not None else math.inf  # `step` waits for running requests

    def _collect(self, result: Result) -> Completion | None:
        """Return the completion in a result, or None if the result finishes no request."""
        raise NotImplementedError

    def _go_on(self) -> None:
        """Begin all work that can begin after the results were collected."""
