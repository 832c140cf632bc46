"""What a run costs by its length: starts of roles, commands and pages of the studio, of a short and of a long run.

Two runs of fake engines are made, the long one out of the short one, and copies of them are measured, each time in a
process of its own. What a start or a page costs must not grow with the log. `audit` and `trace` go by all of it, and
are shown beside. RFTSTREAM_BENCH_ROLLOUTS says how many rollouts the two have, as in 30000,400000 (the default keeps
this short); RFTSTREAM_BENCH_RUN is a folder where the runs are kept, or are already. With RFTSTREAM_BENCH_SERVERS, the
address of a Kafka (`make kafka`), the runs are copied to it, record by record to the same offsets, and measured there.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks._copied_log import copy_to_kafka
from benchmarks.audit import measured
from benchmarks.studio import studio_of, until_read, until_texts_read

SIZES = (10_000, 60_000)
GROUP_SIZE, GROUPS_PER_BATCH = 4, 8
ROLLOUTS_A_STEP = GROUP_SIZE * GROUPS_PER_BATCH
LIMIT = 1.2
"""What the long run may cost, as a multiple of the short one."""
ROLES = ("feeder", "buffer", "trainer", "explorer")
COMMANDS = {
    "status": ["status"],
    "dead list": ["dead", "list"],
    "inspect": ["inspect"],
    "audit, first": ["audit"],
    "audit, later": ["audit"],
    "trace": ["trace"],
}
"""In the order in which they are given: the first audit makes the index."""
BY_LENGTH = ("audit", "trace")
"""These go by the whole log, or its whole index, and have no limit here."""
PAGES = {
    "at a glance": "",
    "groups": "/groups",
    "problems": "/problems",
    "evaluations": "/evaluations",
    "dead": "/dead",
    "charts.json": "/charts.json",
}
REPEATS = 40
ROLLOUT = "sums/0/17/0/3"

RUN_FILE = f"""
[run]
name = "{{name}}"
[model]
path = "fake"
[tasksets.sums]
source = "arithmetic"
reward = "math"
[feeder]
group_size = {GROUP_SIZE}
groups_per_batch = {GROUPS_PER_BATCH}
[explorer]
policy = "fake"
[trainer]
backend = "fake"
max_steps_without_signal = 1_000_000_000
{{transport}}"""

START = """
import re, sys, time
from rftstream.clock import SystemClock
from rftstream.contracts.records import NewRecord
from rftstream.runs.folder import open_run
from rftstream.runs.services import build_service, role_context
role, folder = sys.argv[1:]
opened = open_run(folder)
producer = opened.transport.producer("bench")
producer.start()
producer.commit([NewRecord("control", 0, key, None) for key in (b"finished", b"end")])
context = role_context(config=opened.config, folder=opened.folder, transport=opened.transport, clock=SystemClock(),
                       process="bench")
before = time.process_time()
service = build_service(role, context)
while True:
    idle_s, health = service.tick(), service.health()
    if health.get("epoch") is not None or (health.get("partitions") and health.get("version") is not None):
        break
    service.wait(min(idle_s, 0.05))
spent_s = time.process_time() - before
print(spent_s, re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
service.close()
"""
"""Has a role start, as far as it knows what it must know of the past."""


SERVERS = os.environ.get("RFTSTREAM_BENCH_SERVERS")
TRANSPORT = f'[transport]\nkind = "kafka"\nservers = "{SERVERS}"\n' if SERVERS else ""


def run() -> list[dict[str, Any]]:
    log = ", kafka" if SERVERS else ""
    sizes = (
        tuple(map(int, os.environ.get("RFTSTREAM_BENCH_ROLLOUTS", "").split(",")))
        if ("RFTSTREAM_BENCH_ROLLOUTS" in os.environ)
        else SIZES
    )
    with tempfile.TemporaryDirectory(prefix="rftstream-bench-") as scratch:
        folders = _made(Path(os.environ.get("RFTSTREAM_BENCH_RUN", scratch)), sizes)
        if SERVERS:
            folders = [_on_kafka(folder, Path(scratch) / "kafka") for folder in folders]
        short, long = (_figures(folder, Path(scratch) / "copy" / folder.name) for folder in folders)
    return [
        {
            "name": f"growth: {name}, {sizes[1]:,} rollouts{log}",
            "unit": unit,
            "ours": amount,
            "reference": short[name, unit],
            "reference_name": f"{sizes[0]:,} rollouts",
            "ratio": amount / short[name, unit],
        }
        for (name, unit), amount in long.items()
    ]


def _made(base: Path, sizes: tuple[int, ...]) -> list[Path]:
    """Return the runs of these sizes on the embedded log; those that are not there are made, out of the one before."""
    folders = [base / f"grown-{size}" for size in sizes]
    for number, (folder, size) in enumerate(zip(folders, sizes, strict=True)):
        steps = f"run.steps={-(-size // ROLLOUTS_A_STEP)}"
        if folder.exists():
            continue
        if number:
            shutil.copytree(folders[number - 1], folder)
            _rftstream("resume", str(folder), "--set", steps)
            continue
        base.mkdir(parents=True, exist_ok=True)
        run_file = base / f"{folder.name}.toml"
        run_file.write_text(RUN_FILE.format(name=folder.name, transport=""), encoding="utf-8")
        _rftstream("run", str(run_file), "--set", steps)
        shutil.move(base / "runs" / folder.name, folder)
    return folders


def _on_kafka(folder: Path, base: Path) -> Path:
    """Return a run with the same records on Kafka."""
    base.mkdir(exist_ok=True)
    run_file = base / f"{folder.name}.toml"
    run_file.write_text(RUN_FILE.format(name=folder.name, transport=TRANSPORT), encoding="utf-8")
    steps = re.search(r"^steps = (\d+)", (folder / "config.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert steps is not None, folder
    _rftstream("run", str(run_file), "--no-workers", "--set", f"run.steps={steps[1]}")
    made = base / "runs" / folder.name
    for part in set(os.listdir(folder)) - {"log", "logs", "index", "config.toml"}:
        if (folder / part).is_dir():
            shutil.copytree(folder / part, made / part, dirs_exist_ok=True)
    copy_to_kafka(folder, made)
    return made


def _rftstream(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "rftstream", *arguments], stdout=subprocess.DEVNULL, check=True)


def _figures(folder: Path, copy: Path) -> dict[tuple[str, str], float]:
    """Return what a run costs, by name and unit. Who writes has a copy of its own, except on Kafka."""
    found: dict[tuple[str, str], float] = {}
    if SERVERS:
        copy = folder

    def fresh() -> str:
        if SERVERS:
            shutil.rmtree(folder / "index", ignore_errors=True)
            return str(folder)
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("index"))
        os.sync()  # else the first commit of the run waits until the disk has the copy
        return str(copy)

    for role in ROLES:
        answer = subprocess.run(
            [sys.executable, "-c", START, role, fresh()], capture_output=True, text=True, check=True
        ).stdout.split()
        found[f"start of the {role}", "s of CPU"] = float(answer[0])
        found[f"start of the {role}", "MiB"] = int(answer[1]) / 1024
    fresh()
    for name, (command, *rest) in COMMANDS.items():
        _, cpu_s, peak_mib, _ = measured([command, *rest, str(copy), *([ROLLOUT] if name == "trace" else [])])
        found[name, "s of CPU"], found[name, "MiB"] = cpu_s, peak_mib
    found |= _pages(copy)
    found |= _resumed(fresh())
    return found


def _pages(folder: Path) -> dict[tuple[str, str], float]:
    found = {}
    with studio_of(folder) as (url, process), httpx.Client(timeout=600) as client:
        until_read(f"{url}/runs/{folder.name}")
        until_texts_read(f"{url}/runs/{folder.name}")
        for name, path in PAGES.items():
            spent = []
            for _ in range(REPEATS):
                before = sum(process.cpu_times()[:2])
                unique = f"?unique={time.perf_counter()}"  # a page that was rendered is kept
                client.get(f"{url}/runs/{folder.name}{path}{unique}").raise_for_status()
                spent.append(sum(process.cpu_times()[:2]) - before)
            found[f"studio: {name}", "ms of CPU"] = max(1.0, 1000 * statistics.mean(spent))
    return found


def _resumed(folder: str) -> dict[tuple[str, str], float]:
    """Resume for one more step, and return what all processes together cost."""
    steps = 1 + int(
        subprocess.run(
            [sys.executable, "-c", "import sys; from rftstream.runs.folder import open_run; "
             "from rftstream.queries.curves.history import read_history; from rftstream.service.role import Log; "
             "print(read_history(Log(open_run(sys.argv[1]).transport)).version)", folder],
            capture_output=True, text=True, check=True,
        ).stdout
    )  # fmt: skip
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    _rftstream("resume", folder, "--set", f"run.steps={steps}")
    took_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {("resume for one step", "s"): took_s, ("resume for one step", "s of CPU"): cpu_s}
