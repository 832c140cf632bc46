"""What waiting costs: the CPU of every process of a run in which nothing can go on.

Without explorers the feeder admits no more, and verifier, buffer, trainer and evaluator have nothing to read; without
verifiers the explorers have nothing to do either. Each role is measured in the one of the two where it waits.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

LIMIT_PERCENT = 2.0
MEASURED_S = 10.0
SETTLED_S = 1.0
"""A stretch of this length in which everybody is below QUIET_PERCENT: all are up, and what there was to do is done."""
QUIET_PERCENT = 5.0
PATIENCE_S = 120.0

RUN_FILE = """
[run]
name = "idle"
steps = 1000000
[model.make]
characters = "0123456789+="
context = 16
[tasksets.sums]
source = "arithmetic"
[evaluations.sums]
source = "arithmetic"
[explorer]
policy = "fake"
[trainer]
backend = "fake"
[transport]
partitions = 64
"""

Usage = Mapping[str, float]
"""Role -> CPU seconds so far, of its processes with their children."""


def run() -> list[dict[str, Any]]:
    without_explorers = _percent_of_roles("explorer", {"feeder", "verifier", "buffer", "trainer", "evaluator"})
    without_verifiers = _percent_of_roles("verifier", {"explorer"})
    shown = {**without_verifiers, **without_explorers}
    return [
        {
            "name": f"idle: CPU of a waiting {role}",
            "unit": "% of a core",
            "ours": percent,
            "reference": LIMIT_PERCENT,
            "reference_name": "limit",
            "ratio": LIMIT_PERCENT / percent if percent else None,
        }
        for role, percent in sorted(shown.items())
    ]


def _percent_of_roles(absent: str, expected: set[str]) -> dict[str, float]:
    """Share of a core, of each role and of the supervisor, in a run without the role `absent`."""
    with _waiting_run(absent) as supervisor:
        _settle(supervisor, expected)
        return _percent_over(supervisor, MEASURED_S)


@contextlib.contextmanager
def _waiting_run(absent: str) -> Iterator[psutil.Process]:
    with tempfile.TemporaryDirectory(prefix="rftstream-bench-") as folder:
        (Path(folder) / "idle.toml").write_text(RUN_FILE, encoding="utf-8")
        command = [sys.executable, "-m", "rftstream", "run", f"{folder}/idle.toml", "--run-dir", f"{folder}/run"]
        process = subprocess.Popen(
            [*command, "--set", f"{absent}.count=0", "--progress", "none"],
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _settle(supervisor: psutil.Process, expected: set[str]) -> None:
    until = time.monotonic() + PATIENCE_S
    percent: Mapping[str, float] = {}
    while time.monotonic() < until:
        percent = _percent_over(supervisor, SETTLED_S)
        if expected <= percent.keys() and max(percent.values()) < QUIET_PERCENT:
            return
    raise TimeoutError(f"idle: got {dict(percent)} after {PATIENCE_S:g} s, expected {sorted(expected)} to be quiet")


def _percent_over(supervisor: psutil.Process, seconds: float) -> dict[str, float]:
    before, began = _usage(supervisor), time.perf_counter()
    time.sleep(seconds)
    after, took_s = _usage(supervisor), time.perf_counter() - began
    return {role: 100 * (used - before.get(role, 0.0)) / took_s for role, used in after.items()}


def _usage(supervisor: psutil.Process) -> Usage:
    """By the command line; children without a role are counted with their parent, down from the supervisor."""
    used: dict[str, float] = {}
    roles: dict[int, str] = {}
    for process in [supervisor, *supervisor.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = process.ppid()
            roles[process.pid] = _role(process.cmdline()) or roles.get(parent, "supervisor")
            times = process.cpu_times()
            role = roles[process.pid]
            used[role] = used.get(role, 0.0) + times.user + times.system
    return used


def _role(command: list[str]) -> str | None:
    return command[command.index("--role") + 1] if "--role" in command else None
