"""The trainer's part in a device that it shares with engines (`trainer.colocate`)."""

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
"""Seconds from one look to the next while engines leave."""


class TrainerShare:
    """The device as the trainer's step uses it. The step makes it, recovers within `recovering`, asks `take` before
    each update, and calls `leave` when no update follows. Where the trainer has the device alone, nothing happens.

    The log decides when: a trainer asks as soon as a batch is complete on `batches`, and leaves when none is. The lock
    tells who has the device: a process that dies releases it, and a process that starts finds out by asking. A trainer
    that ends releases nothing by itself: what its libraries still have of the memory goes with the process, and so does
    the lock."""

    def __init__(self, lock: DeviceLock | None, backend: BackendThread, clock: Clock) -> None:
        """`lock`: None where the device is the trainer's alone."""
        self._lock, self._backend, self._clock = lock, backend, clock
        self._asked_at: float | None = None
        """When the device was asked for; None unless it is waited for."""
        self._held_since: float | None = None
        self._waited_s = 0.0

    @property
    def is_waiting(self) -> bool:
        """Whether the trainer asks for the device, and engines have it."""
        return self._asked_at is not None

    @property
    def idle_s(self) -> float:
        """Seconds after which `take` is to be called again."""
        return TAKE_LOOK_S

    @contextlib.contextmanager
    def recovering(self) -> Iterator[None]:
        """Hold the device while the backend is opened and loaded. Waits for the device.

        After an error it is left as after an update. If that cannot be done it is held, since something is on it: until
        the next try, or the process ends."""
        if self._lock is None:
            yield
            return
        self._lock.wait_taken()
        self._asked_at, self._held_since = None, self._clock.now()
        try:
            yield
        except Exception:
            with contextlib.suppress(Exception):  # the one that is raised says more
                self.leave()
            raise
        self.leave()

    def take(self) -> bool:
        """Return whether the trainer has the device; if not, ask for it, so that engines give way."""
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
        """Give the device to the engines, or stop asking for it."""
        if self._lock is None or (self._asked_at is None and self._held_since is None):
            return
        if self._held_since is not None:
            backend: Any = self._backend.backend
            self._backend.asked(backend.leave_device)()
            metrics.DEVICE_SECONDS.labels(TRAINER.name, "trains").inc(self._clock.now() - self._held_since)
        self._lock.release()
        self._asked_at = self._held_since = None

    def wait_no_more(self) -> None:
        """Stop asking for the device, since there is nothing to train."""
        if self.is_waiting:
            self.leave()

    def metrics(self) -> dict[str, float]:
        """Return the seconds that a step waited for the device, as metrics; nothing if the device is the trainer's
        alone."""
        if self._lock is None:
            return {}
        waited_s, self._waited_s = self._waited_s, 0.0  # batches that follow in one go did not wait
        return {"device_wait_s": waited_s}

    def health(self) -> dict[str, object]:
        """Return for people whether the trainer has the device or waits for it."""
        if self._lock is None:
            return {}
        if self.is_waiting:
            return {"device": "waits for the device"}
        return {"device": "engines have the device" if self._held_since is None else "has the device"}
