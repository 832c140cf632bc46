"""The two scripts that run inside of the chart's pods, with a rftstream that says what the test has it say."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.deploy.chart import CHART

LONG_S = 240.0


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Where `rftstream` is the test's own."""
    fake = tmp_path / "rftstream"
    fake.write_text('#!/bin/sh\n. "$FAKE"\n')
    fake.chmod(0o755)
    return f"{tmp_path}:{os.environ['PATH']}"


def start(script: str, path: str, fake: str, tmp_path: Path) -> subprocess.Popen[str]:
    (tmp_path / "fake.sh").write_text(fake)
    return subprocess.Popen(
        ["/bin/sh", "-c", (CHART / "files" / script).read_text(), "rftstream", "worker", "--role", "trainer"],
        env={"PATH": path, "FAKE": str(tmp_path / "fake.sh"), "RFTSTREAM_CONFIG": "/work/run.toml",
             "SEEN": str(tmp_path / "seen")},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
    )  # fmt: skip


@pytest.mark.parametrize("script", ["single.sh", "make.sh"])
def test_shellcheck_finds_nothing(script: str) -> None:
    done = subprocess.run(
        ["shellcheck", "--shell=sh", str(CHART / "files" / script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("code", [0, 1, 2, 5, 6])
def test_a_worker_that_leaves_by_itself_leaves_with_its_code(code: int, path: str, tmp_path: Path) -> None:
    process = start("single.sh", path, f'echo "$@"; exit {code}', tmp_path)
    out, _ = process.communicate(timeout=LONG_S)
    assert (out, process.returncode) == ("worker --role trainer\n", code)


@pytest.mark.parametrize(("code", "expected"), [(0, 75), (3, 3)])
def test_a_worker_that_is_told_to_leave_is_not_done(code: int, expected: int, path: str, tmp_path: Path) -> None:
    """It is told, finishes what is in hand, and its 0 does not count as the end of the run."""
    fake = f"trap 'echo told; sleep 0.2; exit {code}' TERM; : >\"$SEEN\"; while :; do sleep 0.05; done"
    process = start("single.sh", path, fake, tmp_path)
    until = time.monotonic() + LONG_S
    while not (tmp_path / "seen").exists():
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=LONG_S)
    assert (out, process.returncode) == ("told\n", expected)


FINISHED = 'echo \'{"run": "sums", "state": "finished"}\''
RUNNING = 'echo \'{"run": "sums", "state": "running"}\''


@pytest.mark.parametrize(
    ("status", "expected", "made"),
    [
        ("exit 2", 0, True),
        (f"{RUNNING}; exit 0", 0, True),
        (f"{FINISHED}; exit 0", 2, False),
        ("exit 3", 3, False),
    ],
    ids=["none yet", "one that goes on", "one that has ended", "nobody knows"],
)
def test_a_run_is_made_once(status: str, expected: int, made: bool, path: str, tmp_path: Path) -> None:
    fake = f'case $1 in status) {status} ;; *) echo "$@"; exit 0 ;; esac'
    process = start("make.sh", path, fake, tmp_path)
    out, err = process.communicate(timeout=LONG_S)
    assert process.returncode == expected
    assert ("run --no-workers" in out) == made
    assert ("has ended" in err) == (expected == 2)
