"""An engine on the device of a trainer: it sleeps while the trainer has the device (`trainer.colocate`)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from rftstream import metrics
from rftstream.models.device_lock import LOOK_S, DeviceLock
from rftstream.policies.base import Policy

if TYPE_CHECKING:
    from rftstream.models.offload import DeviceState


class SleepingPolicy(Policy, Protocol):
    """A policy that can give its device's memory free, in the middle of requests.

    while not policy.sleep():
        ...
    while not policy.wake():
        ...
    """

    def sleep(self) -> bool:
        """Begin to fall asleep; return whether the memory is free. Called again until it is, and nothing else is called
        meanwhile but `so_far`, `abort` and `close`; so is it until `wake` has returned True. Active requests stand
        still."""

    def wake(self) -> bool:
        """Begin to wake; return whether `step` may be called. Active requests then go on, with the weights that there
        were, from the tokens that they had."""


class SleepsByMoving:
    """A base of policies that hold all of the device's memory as tensors: asleep, these are in main memory, and awake
    again they are the same, to the bit. On a CPU there is nothing to give free, and nothing is moved."""

    _state: DeviceState
    """What is moved. The policy makes it."""

    def sleep(self) -> bool:
        """Move everything to main memory."""
        if not self._state.is_on_cpu:
            self._state.leave()
        return True

    def wake(self) -> bool:
        """Move everything back."""
        self._state.come()
        return True


class EngineShare:
    """What an explorer or evaluator knows of the device that it shares with a trainer. Its worker makes it while it
    holds the device; the step calls `poll` first in each slice of work, and leaves the policy alone if that says so."""

    def __init__(self, policy: SleepingPolicy, lock: DeviceLock, *, role: str) -> None:
        """`lock`: held already."""
        self._policy, self._lock, self._role = policy, lock, role
        self._state = "awake"
        self._since = time.perf_counter()

    @property
    def is_awake(self) -> bool:
        """Whether the policy may be used."""
        return self._state == "awake"

    def poll(self) -> bool:
        """Give way to the trainer, or come back after it, as far as that can be done now. Return whether the policy may
        be used."""
        if self._state == "awake" and self._lock.is_wanted():
            self._enter("falls asleep")
        if self._state == "falls asleep" and self._policy.sleep():
            self._lock.release()
            self._enter("asleep")
        if self._state == "asleep" and self._lock.share():
            self._enter("wakes")
        if self._state == "wakes" and self._policy.wake():
            self._enter("awake")
        return self.is_awake

    @property
    def idle_s(self) -> float:
        """Seconds after which `poll` is to be called again."""
        return LOOK_S

    def health(self) -> dict[str, object]:
        """Return what people see of it."""
        return {"engine": self._state}

    def close(self) -> None:
        """Release the device. The policy is closed already."""
        self._lock.release()

    def _enter(self, state: str) -> None:
        now = time.perf_counter()
        metrics.DEVICE_SECONDS.labels(self._role, self._state).inc(now - self._since)
        self._state, self._since = state, now
