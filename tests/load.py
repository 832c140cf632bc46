"""How busy the machine is while tests run, and how to keep it busy."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

BUSY = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    for _ in range(100_000):
        pass
"""
"""A process that computes until it is killed, or whoever started it is gone."""


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes compute meanwhile; each is ended by its process id."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            command = [sys.executable, "-c", BUSY, str(os.getpid())]
            processes.append(
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
            )
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


class LoadReport:
    """A pytest plugin: the load average while the tests ran, as a line below them.

    conftest.py registers one in the process that reports, which is none of the workers of xdist. It looks after every
    part of a test; an average over a minute does not lose what happened in between."""

    def __init__(
        self,
        load: Callable[[], float] = lambda: os.getloadavg()[0],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._clock = clock
        self._began = self._looked = clock()
        self._first = self._last = self._highest = load()
        self._sum = 0.0
        """Of load times seconds."""

    def look(self) -> None:
        now, load = self._clock(), self._load()
        self._sum += (now - self._looked) * (self._last + load) / 2
        self._looked, self._last, self._highest = now, load, max(self._highest, load)

    def to_text(self) -> str:
        took_s = self._looked - self._began
        mean = self._sum / took_s if took_s > 0 else self._last
        return (
            f"load average {self._first:.1f} at the start, {mean:.1f} in the mean, {self._highest:.1f} at most, "
            f"{self._last:.1f} at the end, on {os.cpu_count()} cores"
        )

    def pytest_runtest_logreport(self) -> None:
        self.look()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        self.look()
        terminalreporter.write_line(self.to_text())
