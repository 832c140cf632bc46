"""Clocks: the source of time for a process. A caller passes the clock in, so tests can drive a run step by step."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time. A process gets one when it starts; tests give one that they move themselves."""

    def now(self) -> float:
        """Return the seconds since the Unix epoch."""

    def sleep(self, seconds: float) -> None:
        """Wait for a number of seconds of this clock."""


class SystemClock:
    """The machine's own clock, which every process outside of tests uses."""

    def now(self) -> float:
        """Return the machine's time in seconds since the Unix epoch."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Block the thread for a number of seconds."""
        time.sleep(seconds)
