"""What `make test` says of the machine's load, and the processes that add to it."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.load import LoadReport, busy

ROOT = Path(__file__).parents[2]


def test_the_mean_is_weighed_by_time() -> None:
    loads, times = iter([1.0, 1.0, 9.0, 1.0, 1.0]), iter([0.0, 10.0, 10.0, 11.0, 21.0])
    report = LoadReport(lambda: next(loads), lambda: next(times))
    for _ in range(4):
        report.look()
    text = report.to_text()
    assert text.startswith("load average 1.0 at the start, 1.2 in the mean, 9.0 at most, 1.0 at the end, on ")


@pytest.mark.slow
def test_the_output_of_a_session_has_it_once() -> None:
    """The process that was started prints it, and its worker does not."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "1",
         "tests/unit/roles/test_completed_groups.py"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    number = r"\d+\.\d"
    line = f"load average {number} at the start, {number} in the mean, {number} at most, {number} at the end, on "
    assert len(re.findall(line, done.stdout)) == 1, done.stdout


def test_busy_processes_are_ended() -> None:
    before = set(psutil.Process().children())
    with busy(2):
        mine = [one for one in psutil.Process().children() if one not in before]
        assert len(mine) == 2
        while not all(one.cpu_times().user > 0 for one in mine):
            pass
    assert not any(one.is_running() for one in mine)


@pytest.mark.slow
def test_busy_processes_end_with_whoever_started_them() -> None:
    code = (
        "import os, signal\nfrom tests.load import busy\nimport psutil\n"
        "with busy(1):\n"
        "    print(*(one.pid for one in psutil.Process().children()), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    pid = int(done.stdout)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(300)
