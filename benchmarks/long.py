"""Long rollouts: a step of rollouts of many tokens through all roles, beside the same bytes through bare clients.

The engines cost nothing (policy `fake`, and a backend that trains nothing), so what is left is the way of a rollout
from the policy to the trainer's arrays. Each role works alone, in a process of its own, over the real log: feeder,
explorer, verifier, buffer, trainer. The reference writes the records of `rollouts`, reads them and writes those of
`verified`, reads these and writes those of `batches`, and reads these: the same bytes, in transactions as large. Starts
of processes are not counted, and neither are the reward's process and the broker. Processor time is that of all threads
of a process.

RFTSTREAM_BENCH_ROLLOUTS: rollouts of the step, in groups of 8. RFTSTREAM_BENCH_LOG: embedded or kafka; empty for both.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks._long_kafka import WAY, kept_values
from benchmarks.kafka import brokers
from rftstream import metrics
from rftstream.algorithms.base import Algorithm, TrainingRow
from rftstream.backends.base import Update, UpdatePlan
from rftstream.backends.fake import FakeBackend
from rftstream.clock import SystemClock
from rftstream.config import loader
from rftstream.config.placement import Machine, place
from rftstream.config.sections import RunConfig
from rftstream.runs.folder import RunFolder, create_log, open_transport
from rftstream.runs.services import build_service, role_context
from rftstream.service.role import Log
from rftstream.transport.kafka.connection import BACKOFF_MS
from rftstream.transport.kafka.producer import BATCH_BYTES

NUM_ROLLOUTS = int(os.environ.get("RFTSTREAM_BENCH_ROLLOUTS", "512"))
NUM_TOKENS = 32_000
GROUP_SIZE = 8
REPETITIONS = 3
TRANSACTION_BYTES = 8 << 20
"""Of the reference's transactions; those of the concurrent roles are as large (service/loops/results.py)."""
TOPICS = ("rollouts", "verified", "batches")
PARTS = (("feeder", "tasks", NUM_ROLLOUTS), ("trainer", "weights", 1), ("explorer", "rollouts", NUM_ROLLOUTS),
         ("verifier", "verified", NUM_ROLLOUTS), ("buffer", "batches", NUM_ROLLOUTS + 1),
         ("trainer", "steps", 2))  # fmt: skip
"""Who works, and which topic has got how many records of it when it has done its part."""
PATIENCE_S = 600.0


class IdleBackend(FakeBackend):
    """A backend whose updates cost nothing. It does not look at the rows that it is given."""

    def update(self, rows: Sequence[TrainingRow], algorithm: Algorithm, plan: UpdatePlan) -> Update:
        return Update(metrics={"loss": 0.0, "grad_norm": 0.0, "num_tokens": float(len(rows))})


Took = Mapping[str, float]
"""Seconds of a role on the clock (`wall`) and of processors (`cpu`), and its memory above that of an idle one in MiB
(`mib`)."""


def run() -> list[dict[str, Any]]:
    """Measure on both logs, with the memory that bodies of open groups have by default, and with a tenth of them."""
    only = os.environ.get("RFTSTREAM_BENCH_LOG", "")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="rftstream-bench-") as folder:
        if only in ("", "embedded"):
            rows += _rows(Path(folder), "sqlite3", {})
        if only in ("", "kafka"):
            with brokers(Path(folder) / "kafka") as servers:
                rows += _rows(Path(folder), "kafka-python", {"kind": "kafka", "servers": servers})
    return rows


def _rows(folder: Path, client: str, transport: Mapping[str, Any]) -> list[dict[str, Any]]:
    whole, few, bare = [], [], []
    for number in range(REPETITIONS):
        with _made(folder, f"whole{number}", transport, {}) as (config, run_folder):
            whole.append(_work(config, run_folder))
            values = folder / "values"
            num_bytes = _in_child(_keep_values, config, run_folder, values)
            servers = transport.get("servers")
            bare.append(_bare_sqlite3(folder, values) if servers is None else _bare_kafka(servers, number, values))
        with _made(folder, f"few{number}", transport, {"max_body_bytes": num_bytes // 10}) as (config, run_folder):
            few.append(_work(config, run_folder))
    name = f"long: {NUM_ROLLOUTS} rollouts of {NUM_TOKENS:,} tokens"
    rows = []
    for what, found in ((name, whole), (f"{name}, a tenth of them in the buffer's memory", few)):
        for kind, unit in (("cpu", "rollouts/s of a core"), ("wall", "rollouts/s, roles one after another")):
            ours, theirs = (
                NUM_ROLLOUTS / statistics.median(_total(one, kind) for one in many) for many in (found, bare)
            )
            rows.append(_row(what, unit, ours, theirs, f"{client} alone"))
        for role in dict.fromkeys(role for role, *_ in PARTS):
            seconds = statistics.median(_total(one, "cpu", role) for one in found)
            rows.append(_row(f"{what}, of the {role}", "ms of CPU a rollout", 1000 * seconds / NUM_ROLLOUTS))
        for role in dict.fromkeys(role for role, *_ in PARTS):
            most = max(took["mib"] for one in found for part, took in one if part == role)
            rows.append(_row(f"{what}, memory of the {role}", "MiB", most))
    return rows


def _row(
    name: str, unit: str, ours: float, reference: float | None = None, reference_name: str | None = None
) -> dict[str, Any]:
    return {"name": name, "unit": unit, "ours": ours, "reference": reference, "reference_name": reference_name,
            "ratio": ours / reference if reference else None}  # fmt: skip


def _total(took: Sequence[tuple[str, Took]], kind: str, role: str = "") -> float:
    return sum(one[kind] for part, one in took if role in ("", part))


# ------------------------------------------------------------------------------------------ ours


@contextmanager
def _made(
    folder: Path, name: str, transport: Mapping[str, Any], buffer: Mapping[str, Any]
) -> Iterator[tuple[RunConfig, RunFolder]]:
    config = loader.from_dict(
        {
            "run": {"name": name, "steps": 1},
            "model": {"path": "fake", "dtype": "float32"},
            "tasksets": {"sums": {"source": "arithmetic"}},
            "sampling": {"max_tokens": NUM_TOKENS},
            "feeder": {"groups_per_batch": NUM_ROLLOUTS // GROUP_SIZE, "group_size": GROUP_SIZE, "max_staleness": 0},
            "explorer": {"policy": "fake"},
            "policies": {"fake": {"mean_tokens": NUM_TOKENS, "sigma": 0.0}},
            "buffer": dict(buffer),
            "trainer": {"backend": "benchmarks.long:IdleBackend"},
            "transport": {"partitions": 8, **transport},
        }
    )
    config = place(Machine(), config).config
    run_folder = RunFolder(folder / name)
    run_folder.path.mkdir()
    _in_child(_create, config, run_folder)
    yield config, run_folder
    _in_child(_delete, config, run_folder)


def _work(config: RunConfig, folder: RunFolder) -> list[tuple[str, Took]]:
    return [(role, _in_child(_do_part, config, folder, role, topic, num)) for role, topic, num in PARTS]


def _do_part(config: RunConfig, folder: RunFolder, role: str, topic: str, num: int) -> Took:
    transport = open_transport(config, folder)
    context = role_context(config=config, folder=folder, transport=transport, clock=SystemClock(), process=role)
    service = build_service(role, context)
    written = metrics.RECORDS_OUT.labels(role, topic)
    until, before_mib = time.monotonic() + PATIENCE_S, _peak_mib()
    cpu_s, began = time.process_time(), time.perf_counter()
    while written._value.get() < num:
        idle_s = service.tick()
        if idle_s > 0:
            service.wait(min(idle_s, 0.25))
        if time.monotonic() > until:
            raise TimeoutError(f"long: expected {num} records on {topic} within {PATIENCE_S:g} s")
    took = {"wall": time.perf_counter() - began, "cpu": time.process_time() - cpu_s, "mib": _peak_mib() - before_mib}
    service.close()
    transport.close()
    return took


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _create(config: RunConfig, folder: RunFolder) -> None:
    transport = open_transport(config, folder, create=True)
    create_log(transport, config)
    transport.close()


def _delete(config: RunConfig, folder: RunFolder) -> None:
    transport = open_transport(config, folder)
    if config.transport.kind == "embedded":
        transport.close()
        subprocess.run(["rm", "-rf", str(folder.path)], check=True)
    else:
        transport.admin.delete_topics(list(transport.admin.topics()))
        transport.close()


def _in_child(work: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns in a process of its own, which has imported everything already."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_answer, args=(theirs, work, arguments))
    child.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        raise RuntimeError(f"long: {work.__name__} failed, see above") from None
    finally:
        child.join()


def _answer(pipe: Connection, work: Callable[..., Any], arguments: Sequence[Any]) -> None:
    pipe.send(work(*arguments))


# ------------------------------------------------------------------------------------------ bare clients


def _keep_values(config: RunConfig, folder: RunFolder, values: Path) -> int:
    """Write the records' values of each topic into a file, with their lengths in another. Return the bytes of
    `verified`."""
    transport = open_transport(config, folder)
    sizes = {}
    for topic in TOPICS:
        with values.with_suffix(f".{topic}").open("wb") as file:
            sizes[topic] = [file.write(record.value or b"") for record in Log(transport).read(topic)]
    values.with_suffix(".json").write_text(json.dumps(sizes))
    transport.close()
    return sum(sizes["verified"])


def _bare_sqlite3(folder: Path, values: Path) -> list[tuple[str, Took]]:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        return [("bare", _in_child(_carry_with_sqlite3, Path(place), values))]


def _carry_with_sqlite3(folder: Path, values: Path) -> Took:
    db = sqlite3.connect(folder / "log.sqlite", isolation_level=None)
    for pragma in ("page_size=8192", "journal_mode=WAL", "synchronous=NORMAL", "cache_size=-16384",
                   "wal_autocheckpoint=4096"):  # fmt: skip
        db.execute(f"PRAGMA {pragma}")
    for topic in TOPICS:
        db.execute(f"CREATE TABLE {topic}(id INTEGER PRIMARY KEY, at REAL, key BLOB, headers BLOB, value BLOB)")
    kept = kept_values(values)

    def write(topic: str, start: int, stop: int) -> None:
        rows = [(n, time.time(), b"%d" % n, bytes(200), kept[topic][n]) for n in range(start, stop)]
        db.execute("BEGIN IMMEDIATE")
        db.executemany(f"INSERT INTO {topic} VALUES (?, ?, ?, ?, ?)", rows)
        db.execute("COMMIT")

    def read(topic: str, start: int, stop: int) -> None:
        rows = db.execute(f"SELECT * FROM {topic} WHERE id >= ? AND id < ? ORDER BY id", (start, stop)).fetchall()
        assert sum(len(row[4]) for row in rows) == sum(map(len, kept[topic][start:stop]))

    cpu_s, began = time.process_time(), time.perf_counter()
    for source, target in WAY:
        each = max(1, TRANSACTION_BYTES // len(kept["rollouts"][0]))
        for start in range(0, len(kept[source or "rollouts"]), each):
            if source is not None:
                read(source, start, start + each)
            if target is not None and target != "batches":
                write(target, start, min(start + each, len(kept[target])))
        if target == "batches":  # a batch is one transaction
            write(target, 0, len(kept[target]))
    took = {"wall": time.perf_counter() - began, "cpu": time.process_time() - cpu_s, "mib": 0.0}
    db.close()
    return took


def _bare_kafka(servers: str, number: int, values: Path) -> list[tuple[str, Took]]:
    given = {"values": str(values), "transaction_bytes": TRANSACTION_BYTES, "backoff_ms": BACKOFF_MS,
             "batch_bytes": BATCH_BYTES}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks._long_kafka", servers, f"bare{number}", json.dumps(given)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [("bare", json.loads(done.stdout))]
