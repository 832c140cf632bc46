"""An engine on a trainer's device, which sleeps while the trainer has the device (`trainer.colocate`)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from rftstream import metrics
from rftstream.models.device_lock import LOOK_S, DeviceLock
from rftstream.policies.base import Policy

if TYPE_CHECKING:
    from rftstream.models.offload import DeviceState


class SleepingPolicy(Policy, Protocol):
    """A policy that can free its device's memory while requests are active.

    while not policy.sleep():
        ...
    while not policy.wake():
        ...
    """

    def sleep(self) -> bool:
        """Begin to fall asleep; return whether the memory is free. The caller repeats the call until it is.

        From the first call until `wake` has returned True nothing is sampled: `step` returns only requests that had
        already finished, new requests wait, and `load` is not called."""

    def wake(self) -> bool:
        """Begin to wake; return whether the policy is awake. Active requests then continue from their tokens, with the
        same weights as before."""


class SleepsByMoving:
    """A base of policies that hold all of the device's memory as tensors. Asleep, the tensors are in main memory;
    awake, they are back, to the bit. On a CPU there is nothing to free, and nothing is moved."""

    _state: DeviceState
    """State on the device that is moved. The policy makes it."""
    is_asleep = False
    """Whether sampling is suspended now."""

    def sleep(self) -> bool:
        """Move everything to main memory."""
        self.is_asleep = True
        if not self._state.is_on_cpu:
            self._state.leave()
        return True

    def wake(self) -> bool:
        """Move everything back."""
        self._state.come()
        self.is_asleep = False
        return True


class EngineShare:
    """One explorer's or evaluator's share of a device that a trainer also uses.

    Its worker makes it while it holds the device. The step calls `poll` first in each slice of work, and loads weights
    and begins rollouts only if `poll` allows it. The lock ends with the process, as does the memory that libraries keep
    after a policy is closed."""

    def __init__(self, policy: SleepingPolicy, lock: DeviceLock, *, role: str) -> None:
        """`lock`: already held."""
        self._policy, self._lock, self._role = policy, lock, role
        self._state = "awake"
        self._since = time.perf_counter()

    @property
    def is_awake(self) -> bool:
        """Whether the policy samples."""
        return self._state == "awake"

    def poll(self) -> bool:
        """Give way to the trainer, or resume after it, as far as that is possible now. Return whether the policy is
        awake."""
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
        """Seconds until `poll` has to be called again."""
        return LOOK_S

    def health(self) -> dict[str, object]:
        """Return its entries for the health report."""
        return {"engine": self._state}

    def _enter(self, state: str) -> None:
        now = time.perf_counter()
        metrics.DEVICE_SECONDS.labels(self._role, self._state).inc(now - self._since)
        self._state, self._since = state, now
