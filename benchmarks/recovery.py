"""How long a run stands still: from SIGKILL of each role to what its successor commits, from the loss of a broker.

A whole run with fake engine and backend, one process of each role, restarted by its supervisor. Measured is until a
reader of committed records sees the successor's first record (of the trainer: the first step that it trained), so the
supervisor's pause, the start of the process, a dead one's session and what it had left open are all in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from rftstream.contracts.records import Record
from rftstream.runs.folder import RunFolder, open_run
from rftstream.transport.base import Reader, Transport

SCRIPT = Path(__file__).parents[1] / "scripts" / "kafka"
REPETITIONS = 3
AIM_S = {"embedded": 5.0, "kafka": 15.0}
LIMIT_S = 120.0
"""Then it has not recovered."""

WRITES = {
    "feeder": "tasks",
    "explorer": "rollouts",
    "verifier": "verified",
    "buffer": "batches",
    "trainer": "steps",
    "evaluator": "evals",
}
"""Role -> the topic that only it writes."""

RUN_FILE = """
[run]
name = "{name}"
steps = 1000000
[model]
path = "fake"
[tasksets.sums]
source = "arithmetic"
[evaluations.held-out]
source = "arithmetic"
options = {{ size = 4 }}
every = 1
[sampling]
max_tokens = 40
[feeder]
groups_per_batch = 4
group_size = 4
[explorer]
policy = "fake"
[trainer]
backend = "fake"
[policies.fake]
tokens_per_s = 60.0
mean_tokens = 14.0
[transport]
partitions = 4
session_timeout_s = 6.0
"""


def run() -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="rftstream-bench-") as folder:
        with _run(Path(folder), "embedded") as (run_dir, transport):
            rows += _role_rows("embedded", run_dir, transport)
        with (
            _cluster(Path(folder) / "kafka") as servers,
            _run(Path(folder), "kafka", f'kind = "kafka"\nservers = "{servers}"\n') as (run_dir, transport),
        ):
            rows += _role_rows("kafka", run_dir, transport)
            rows += _broker_rows(Path(folder) / "kafka", transport)
    return rows


def _role_rows(log: str, run_dir: Path, transport: Transport) -> list[dict[str, Any]]:
    rows = []
    for role, topic in WRITES.items():
        found = [_after_kill(run_dir, transport, role, topic) for _ in range(REPETITIONS)]
        rows.append(_row(f"recovery: SIGKILL of the {role} to its next record, {log}", statistics.median(found), log))
    return rows


def _after_kill(run_dir: Path, transport: Transport, role: str, topic: str) -> float:
    """Seconds."""
    seen = _Seen(transport, (topic,))
    try:
        seen.wait_for((topic,), since=time.time())  # it works
        process = _worker(run_dir, f"{role}-0")
        process.kill()
        process.wait()
        return seen.wait_for((topic,), since=time.time())
    finally:
        seen.close()


def _broker_rows(folder: Path, transport: Transport) -> list[dict[str, Any]]:
    """The loss of each broker in turn, which comes back before the next one goes."""
    first, all_of_them = [], []
    for number in (1, 2, 3):
        topics = tuple(WRITES.values())
        seen = _Seen(transport, topics)
        try:
            seen.wait_for(topics, since=time.time())
            psutil.Process(json.loads((folder / "nodes.json").read_text())[number - 1]).kill()
            lost_at = time.time()
            first.append(seen.wait_for(topics, since=lost_at, any_of_them=True))
            all_of_them.append(first[-1] + seen.wait_for(topics, since=lost_at, seen=seen.last))
        finally:
            seen.close()
        subprocess.run([sys.executable, str(SCRIPT), "start-node", str(number), "--dir", str(folder)], check=True)
        time.sleep(10.0)  # its partitions catch up
    return [
        _row("recovery: loss of a broker of three to the next record, kafka", max(first), "kafka"),
        _row("recovery: loss of a broker of three until all roles have committed, kafka", max(all_of_them), "kafka"),
    ]


class _Seen:
    """What a reader of committed records sees from now on."""

    def __init__(self, transport: Transport, topics: Sequence[str]) -> None:
        self._transport = transport
        ends = {place: offset for topic in topics for place, offset in transport.admin.end_offsets(topic).items()}
        self._reader: Reader = transport.reader(ends)
        self.last: set[str] = set()
        """Topics on which something was seen by the last wait."""

    def wait_for(
        self, topics: Sequence[str], *, since: float, any_of_them: bool = False, seen: set[str] | None = None
    ) -> float:
        """Seconds until a record that was made after `since` (time.time) has been seen on all of them."""
        began = time.monotonic()
        self.last = set(seen or ())
        while not (self.last if any_of_them else self.last >= set(topics)):
            if time.monotonic() - began > LIMIT_S:
                raise RuntimeError(f"recovery: nothing on {set(topics) - self.last} for {LIMIT_S:g} s; see the logs")
            self._transport.wait([self._reader], 0.05)
            self.last |= {one.topic for one in self._reader.poll() if one.timestamp_s > since and _is_work(one)}
        return time.monotonic() - began

    def close(self) -> None:
        self._reader.close()


def _is_work(record: Record) -> bool:
    """Not a trainer's word from where it starts."""
    return record.topic != "steps" or record.header("resumed") is None


def _worker(run_dir: Path, name: str) -> psutil.Process:
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                arguments = process.cmdline()
                if name in arguments and str(run_dir) in arguments:
                    return process
        time.sleep(0.05)
    raise RuntimeError(f"recovery: no process {name} of {run_dir}")


@contextlib.contextmanager
def _run(folder: Path, name: str, more: str = "") -> Iterator[tuple[Path, Transport]]:
    file = folder / f"{name}.toml"
    file.write_text(RUN_FILE.format(name=name) + more, encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", "rftstream", "run", str(file), "--progress", "none", "--json"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    run_dir = folder / "runs" / name
    try:
        while not RunFolder(run_dir).exists():
            if process.poll() is not None:
                raise RuntimeError(
                    f"recovery: the run ended at once with exit {process.returncode}; see {run_dir}/logs"
                )
            time.sleep(0.05)
        transport = open_run(run_dir).transport
        try:
            yield run_dir, transport
        finally:
            transport.close()
    finally:
        process.kill()  # its workers end with it
        process.wait()


@contextlib.contextmanager
def _cluster(folder: Path) -> Iterator[str]:
    command = [sys.executable, str(SCRIPT)]
    started = subprocess.run(
        [*command, "start", "--nodes", "3", "--dir", str(folder), "--owner", str(os.getpid())],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    try:
        yield started.stdout.splitlines()[-1]
    finally:
        subprocess.run([*command, "stop", "--dir", str(folder)], capture_output=True, check=False)


def _row(name: str, seconds: float, log: str) -> dict[str, Any]:
    return {
        "name": name,
        "unit": "s",
        "ours": seconds,
        "reference": AIM_S[log],
        "reference_name": "aim",
        "ratio": AIM_S[log] / seconds,
    }
