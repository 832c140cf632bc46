"""Clocks: the source of time for a process. A caller passes the clock in, so tests can drive a run step by step."""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol

log = logging.getLogger(__name__)

JUMP_S = 5.0
"""Seconds by which the machine's clock must be set for a warning."""
STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""The machine's clock that nobody sets. It should count the time in which the machine is suspended."""


class Clock(Protocol):
    """A source of time. A process gets one when it starts; tests give one that they move themselves."""

    def now(self) -> float:
        """Return the seconds since the Unix epoch, for waits and deadlines."""

    def stamp(self) -> float:
        """Return the same by the machine's own clock, which others compare with theirs."""

    def sleep(self, seconds: float) -> None:
        """Wait for a number of seconds of this clock."""


class SystemClock:
    """The machine's own clock without its jumps, which every process outside of tests uses.

    Somebody may set the machine's clock while a process works. Waits and deadlines would then be over at once, or last
    for hours. So this clock never jumps: it follows the machine's at half its speed or twice as fast."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = self._machine = time.time()
        self._steady = time.clock_gettime(STEADY)

    def now(self) -> float:
        """Return the time in seconds since the Unix epoch, which never goes back. Log a warning when the machine's
        clock has jumped."""
        with self._lock:
            machine, steady = time.time(), time.clock_gettime(STEADY)
            passed_s = steady - self._steady
            jump_s = machine - self._machine - passed_s
            self._now = now = min(max(machine, self._now + passed_s / 2), self._now + 2 * passed_s)
            self._machine, self._steady = machine, steady
        if abs(jump_s) > JUMP_S:
            log.warning(
                "the clock of this machine was set %s by %.0f s; this process follows it slowly, so that no wait ends "
                "early or lasts for as long",
                "ahead" if jump_s > 0 else "back",
                abs(jump_s),
            )
        return now

    def stamp(self) -> float:
        """Return what the machine's clock shows."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Block the thread for a number of seconds."""
        time.sleep(seconds)
