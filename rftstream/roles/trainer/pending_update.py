"""Computations in another thread while a role goes on reading and writing: an update of the trainer, or the fetching of
a version by an explorer. Also the executors that replace the thread in a simulation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Executor, Future, wait
from typing import Any

from rftstream.backends.base import Update
from rftstream.clock import Clock
from rftstream.roles.trainer.assembly import Batch
from rftstream.roles.trainer.progress import TrainerProgress
from rftstream.roles.trainer.training import TrainedStaleness

Computed = tuple[Update, dict[str, float], TrainedStaleness]


class Inline(Executor):
    """Computes at once in the caller's thread, so that the order is always the same."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call the function; return its result or its error."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class DeferredExecutor(Executor):
    """Computes in the thread that takes the result, or that has asked `done` often enough. This is like the slowest
    possible thread, with an order that is always the same."""

    LOOKS = 2
    """How often `done` returns False before the function is called."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Return a future that calls the function later."""
        return _LaterFuture(lambda: Inline().submit(fn, *args, **kwargs), self.LOOKS)


class _LaterFuture(Future[Any]):
    def __init__(self, compute: Callable[[], Future[Any]], looks: int) -> None:
        super().__init__()
        self._compute, self._looks = compute, looks

    def done(self) -> bool:
        self._looks -= 1
        if self._looks < 0:
            self._settle()
        return super().done()

    def result(self, timeout: float | None = None) -> Any:
        self._settle()
        return super().result(timeout)

    def _settle(self) -> None:
        if super().done():
            return
        found = self._compute()
        if (error := found.exception()) is not None:
            self.set_exception(error)
        else:
            self.set_result(found.result())


def ends_within(future: Future[Any], seconds: float) -> bool:
    """Wait at most the given seconds. Return whether the future has ended. A simulation does not wait."""
    return future.done() if isinstance(future, _LaterFuture) else bool(wait([future], seconds).done)


def abandon(future: Future[Any]) -> None:
    """Cancel the future and wait until its thread has stopped computing."""
    future.cancel()
    with contextlib.suppress(CancelledError):
        future.exception()


class PendingUpdate:
    """The update that makes a version from `batch` and `progress`. UpdateCycle makes it, which starts the update. The
    step asks `ends_within`. UpdateCycle takes the `result` once, or calls `abandon`."""

    def __init__(
        self,
        batch: Batch,
        progress: TrainerProgress,
        update: Callable[[], Computed],
        *,
        compute: Executor,
        clock: Clock,
        waited_s: float,
    ) -> None:
        self.batch, self.progress, self.waited_s = batch, progress, waited_s

        def timed() -> tuple[Update, dict[str, float], TrainedStaleness, float]:
            began = clock.now()
            return *update(), clock.now() - began

        self._future = compute.submit(timed)

    def ends_within(self, seconds: float) -> bool:
        """Wait at most the given seconds. Return whether the update has ended."""
        return ends_within(self._future, seconds)

    def result(self) -> tuple[Update, dict[str, float], TrainedStaleness, float]:
        """Return the result of `Training.update`, and the seconds that it took. Errors of the update are raised."""
        return self._future.result()

    def speeds(self, values: Mapping[str, float], *, step_s: float, publish_s: float) -> dict[str, float]:
        """Return as metrics the seconds of all work that delays training, and the rollouts and tokens trained per
        second."""
        times = {"step_s": step_s, "publish_s": publish_s, "wait_s": self.waited_s}
        if (total := sum(times.values())) <= 0:
            return times
        return times | {"rollouts_per_s": self.batch.num_rollouts / total, "tokens_per_s": values["tokens"] / total}

    def abandon(self) -> None:
        """Cancel the update and wait until its thread has stopped computing."""
        abandon(self._future)
