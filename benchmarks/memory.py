"""Bounded memory: peak RSS of every role with the trainer stopped, and ten times the backlog in front of it.

The trainer gets a SIGSTOP as soon as there are weights; the others work until admission stops the feeder and nothing
is left to do. A backlog is max_staleness + 1 batches of large records. RFTSTREAM_BENCH_HELD_S: how long the trainer
stays stopped afterwards. With `large`, records are near the size limit, and the buffer may hold few of their bodies.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.idle import _role
from rftstream.runs.folder import OpenRun, open_run

PATIENCE_S = 600.0
SETTLED_S = 5.0
"""Nothing was written for so long: everybody waits."""
HELD_S = 5.0

RUN_FILE = """
[run]
name = "memory"
steps = 1000000
[model.make]
characters = "0123456789+= "
context = {context}
[tasksets.sums]
source = "arithmetic"
[sampling]
max_tokens = {tokens}
[feeder]
groups_per_batch = 4
group_size = {group_size}
max_staleness = {max_staleness}
[explorer]
policy = "fake"
max_concurrent = 8
[verifier]
max_concurrent = 8
[policies.fake]
mean_tokens = {tokens}
sigma = 0.0
[buffer]
max_body_bytes = {body_bytes}
[trainer]
backend = "fake"
[transport]
partitions = 4
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    name: str
    tokens: int
    """Of each completion; a record has some 10 bytes for each."""
    group_size: int
    body_bytes: int


LOADS = (
    Load(name="records of 0.3 MB", tokens=30_000, group_size=4, body_bytes=8 << 20),
    Load(name="records near the limit", tokens=600_000, group_size=2, body_bytes=32 << 20),
)


def run() -> list[dict[str, Any]]:
    rows = []
    for load in LOADS:
        few, few_records = _peaks(load, max_staleness=0)
        many, many_records = _peaks(load, max_staleness=9)
        name = f"memory: {load.name}, {few_records} or {many_records} in front of a stopped trainer"
        rows += [
            {
                "name": f"{name}, peak of the {role}",
                "unit": "MiB",
                "ours": many[role],
                "reference": few[role],
                "reference_name": "a tenth of the backlog",
                "ratio": many[role] / few[role],
            }
            for role in sorted(many.keys() & few.keys() - {"trainer"})
        ]
    return rows


def _peaks(load: Load, *, max_staleness: int) -> tuple[Mapping[str, float], int]:
    """Peak MiB by role, and records on `rollouts`."""
    with (
        tempfile.TemporaryDirectory(prefix="rftstream-bench-") as folder,
        _run(Path(folder), load, max_staleness) as (
            supervisor,
            opened,
        ),
    ):
        _until(lambda: _ends(opened, "weights") > 0, supervisor, "weights")
        trainer = next(one for one in supervisor.children(recursive=True) if _role_of(one) == "trainer")
        trainer.suspend()
        try:
            _settle(supervisor, opened)
            time.sleep(float(os.environ.get("RFTSTREAM_BENCH_HELD_S", HELD_S)))
            return _peak_by_role(supervisor), _ends(opened, "rollouts")
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                trainer.resume()


@contextlib.contextmanager
def _run(folder: Path, load: Load, max_staleness: int) -> Iterator[tuple[psutil.Process, OpenRun]]:
    (folder / "memory.toml").write_text(
        RUN_FILE.format(
            tokens=load.tokens,
            context=load.tokens + 64,
            group_size=load.group_size,
            body_bytes=load.body_bytes,
            max_staleness=max_staleness,
        ),
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "rftstream", "run", f"{folder}/memory.toml", "--run-dir", f"{folder}/run"]
    process = subprocess.Popen([*command, "--progress", "none"], stdout=subprocess.DEVNULL, start_new_session=True)
    supervisor = psutil.Process(process.pid)
    try:
        _until((folder / "run" / "config.toml").exists, supervisor, "the run")
        _until((folder / "run" / "log" / "log.sqlite").exists, supervisor, "the log")
        opened = open_run(folder / "run")
        try:
            yield supervisor, opened
        finally:
            opened.transport.close()
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _settle(supervisor: psutil.Process, opened: OpenRun) -> None:
    """Until all that was admitted is in batches, and nobody has written for a while."""
    seen, since = -1, time.monotonic()

    def quiet() -> bool:
        nonlocal seen, since
        tasks, rollouts, verified, batches = (_ends(opened, x) for x in ("tasks", "rollouts", "verified", "batches"))
        if (total := tasks + rollouts + verified + batches) != seen:
            seen, since = total, time.monotonic()
        return 0 < tasks == rollouts == verified <= batches and time.monotonic() - since > SETTLED_S

    _until(quiet, supervisor, "everybody to wait")


def _until(condition: Any, supervisor: psutil.Process, what: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > until or not supervisor.is_running() or supervisor.status() == psutil.STATUS_ZOMBIE:
            raise TimeoutError(f"memory: expected {what} within {PATIENCE_S:g} s")
        time.sleep(0.1)


def _ends(opened: OpenRun, topic: str) -> int:
    return sum(opened.transport.admin.end_offsets(topic).values())


def _peak_by_role(supervisor: psutil.Process) -> dict[str, float]:
    """Of one process of each role; what processes share counts in each."""
    found: dict[str, float] = {}
    for process in [supervisor, *supervisor.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            role = "supervisor" if process == supervisor else _role_of(process)
            status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
            if role is not None and (peak := re.search(r"VmHWM:\s+(\d+) kB", status)):
                found[role] = max(found.get(role, 0.0), int(peak[1]) / 1024)
    return found


def _role_of(process: psutil.Process) -> str | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        return _role(process.cmdline())
    return None
