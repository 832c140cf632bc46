"""The trainer's part of a device that it shares with engines (`trainer.colocate`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from rftstream import metrics
from rftstream.clock import Clock
from rftstream.models.device_lock import DeviceLock
from rftstream.roles.trainer import TRAINER
from rftstream.roles.trainer.backend_thread import BackendThread

TAKE_LOOK_S = 0.02
"""Seconds between two checks while engines leave the device."""


class TrainerShare:
    """The device as the trainer's step uses it. The step makes it, recovers within `recovering`, asks `take` before
    each update, and calls `leave` when no update follows. If the trainer has the device to itself, all calls do
    nothing.

    The log determines the times: a trainer asks for the device as soon as a batch is complete on `batches`, and leaves
    when there is none. The lock shows who has the device: a dying process releases it, and a new process learns its
    state by asking. A trainer that ends need not release anything: the memory that its libraries still hold is freed
    with the process, and so is the lock."""

    def __init__(self, lock: DeviceLock | None, backend: BackendThread, clock: Clock) -> None:
        """`lock` is None if the trainer has the device to itself."""
        self._lock, self._backend, self._clock = lock, backend, clock
        self._asked_at: float | None = None
        """Time when the device was requested; None if the trainer does not wait for it."""
        self._held_since: float | None = None
        self._waited_s = 0.0

    @property
    def is_waiting(self) -> bool:
        """Whether the trainer waits for the device while engines have it."""
        return self._asked_at is not None

    @property
    def idle_s(self) -> float:
        """Seconds after which `take` must be called again."""
        return TAKE_LOOK_S

    @contextlib.contextmanager
    def recovering(self) -> Iterator[None]:
        """Hold the device while the backend is opened and loaded. The call waits for the device.

        After an error the trainer leaves the device as after an update. If that fails, the device stays held, since the
        backend still uses it, until the next try or the end of the process."""
        if self._lock is None:
            yield
            return
        self._lock.wait_taken()
        self._asked_at, self._held_since = None, self._clock.now()
        try:
            yield
        except Exception:
            with contextlib.suppress(Exception):  # the original error says more
                self.leave()
            raise
        self.leave()

    def take(self) -> bool:
        """Return whether the trainer has the device. If not, request it, so that engines leave."""
        if self._lock is None or self._held_since is not None:
            return True
        now = self._clock.now()
        if self._asked_at is None:
            self._asked_at = now
        if not self._lock.take():
            return False
        self._waited_s, self._asked_at, self._held_since = now - self._asked_at, None, now
        metrics.DEVICE_SECONDS.labels(TRAINER.name, "waits").inc(self._waited_s)
        return True

    def leave(self) -> None:
        """Give the device to the engines, or withdraw the request for it."""
        if self._lock is None or (self._asked_at is None and self._held_since is None):
            return
        if self._held_since is not None:
            backend: Any = self._backend.backend
            self._backend.asked(backend.leave_device)()
            metrics.DEVICE_SECONDS.labels(TRAINER.name, "trains").inc(self._clock.now() - self._held_since)
        self._lock.release()
        self._asked_at = self._held_since = None

    def wait_no_more(self) -> None:
        """Withdraw the request for the device, since there is nothing to train."""
        if self.is_waiting:
            self.leave()

    def metrics(self) -> dict[str, float]:
        """Return the seconds that a step waited for the device, as metrics; empty if the trainer has the device to
        itself."""
        if self._lock is None:
            return {}
        waited_s, self._waited_s = self._waited_s, 0.0  # later updates in the same turn did not wait
        return {"device_wait_s": waited_s}

    def health(self) -> dict[str, object]:
        """Return whether the trainer has the device or waits for it."""
        if self._lock is None:
            return {}
        if self.is_waiting:
            return {"device": "waits for the device"}
        return {"device": "engines have the device" if self._held_since is None else "has the device"}
