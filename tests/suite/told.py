"""What ran for real and how long it took, as a table: the end of `make containers`, `kubernetes` and `slurm`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def say(record_property: Callable[[str, object], None]) -> Iterator[list[str]]:
    """What a test found: the table has it."""
    lines: list[str] = []
    yield lines
    for line in lines:
        record_property("said", line)


class Table:
    """A plugin of pytest that keeps what the tests said, were skipped for, and took."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, list[str]]] = []
        self._setup_s = 0.0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("::test_")[2].replace("_", " ")
        if report.when == "setup":
            self._setup_s = report.duration
        if report.skipped and isinstance(report.longrepr, tuple):
            self.rows.append((f"not run: {name}", report.duration, [report.longrepr[2].removeprefix("Skipped: ")]))
        elif report.when == "call" or (report.when == "setup" and report.failed):
            word = "failed: " if report.failed else ""
            self.rows.append((word + name, self._setup_s + report.duration, []))
        elif report.when == "teardown" and self.rows and not self.rows[-1][2]:
            self.rows[-1][2].extend(str(value) for key, value in report.user_properties if key == "said")


def run_and_tell(tests: Path, *closing: str) -> int:
    """Run the long and the sampled tests of a folder or a file until one fails, with what the command line says, and
    print the table. Return pytest's exit code. `closing`: what could not run at all, and why."""
    table = Table()
    begun = time.monotonic()
    code = pytest.main(["-q", "-x", "-m", "long", str(tests), *sys.argv[1:]], plugins=[table])
    print(f"\non {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}; {time.monotonic() - begun:.0f} s in all")
    for name, seconds, said in table.rows:
        print(f"{seconds:6.0f} s  {name}")
        for line in said:
            print(f"          {line}")
    for line in closing:
        print(f"   not run: {line}")
    return int(code)
