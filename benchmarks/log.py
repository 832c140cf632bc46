"""The embedded log: what exactly-once costs on top of nothing but sqlite3, and what waiting costs.

The loop is a verifier's: read a batch, make one record of each, publish these together with the positions. The
reference does the same with two tables and the sqlite3 module: same file settings, batches, partitions and
transactions; no groups, fencing, headers to decode, sizes to check or processes to wake. Both are measured in turn.
"""

from __future__ import annotations

import multiprocessing
import random
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rftstream.contracts.records import NewRecord, TopicPartition
from rftstream.transport.base import Position, TopicSettings
from rftstream.transport.embedded.transport import EmbeddedTransport

NUM_PARTITIONS = 8
REPETITIONS = 7
HEADERS = tuple((name, name.encode()) for name in ("contract", "run", "group_id", "rollout_id", "sequence", "status"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    name: str
    record_bytes: int
    num_records: int
    batch: int


LOADS = (
    Load(name="64 KB", record_bytes=65_536, num_records=1_280, batch=64),
    Load(name="1 KB", record_bytes=1_024, num_records=40_960, batch=256),
)
"""At most 2 x 84 MB of records and as much in SQLite's WAL per repetition."""


def run() -> list[dict[str, Any]]:
    rows = []
    for load in LOADS:
        ours, reference = [], []
        for _ in range(REPETITIONS):
            ours.append(_in_folder(_carry_with_rftstream, load))
            reference.append(_in_folder(_carry_with_sqlite3, load))
        rows += _rate_rows(load, statistics.median(ours), statistics.median(reference))
    rows += [_idle_row(), *_wake_up_rows()]
    return rows


def _rate_rows(load: Load, ours: float, reference: float) -> list[dict[str, Any]]:
    megabytes = load.record_bytes / 1e6
    return [
        _row(f"log: {load.name} records, read-transform-publish", "records/s", ours, reference, "sqlite3 alone"),
        _row(
            f"log: {load.name} records, read-transform-publish",
            "MB/s",
            ours * megabytes,
            reference * megabytes,
            "sqlite3 alone",
        ),
    ]


def _row(
    name: str, unit: str, ours: float, reference: float | None = None, reference_name: str | None = None
) -> dict[str, Any]:
    return {
        "name": name,
        "unit": unit,
        "ours": ours,
        "reference": reference,
        "reference_name": reference_name,
        "ratio": ours / reference if reference else None,
    }


def _in_folder(carry: Callable[[Path, Load], float], load: Load) -> float:
    with tempfile.TemporaryDirectory(prefix="rftstream-bench-") as folder:
        return carry(Path(folder), load)


def _values(load: Load) -> list[bytes]:
    chance = random.Random(0)
    return [chance.randbytes(load.record_bytes) for _ in range(16)]


def _carry_with_rftstream(folder: Path, load: Load) -> float:
    """Records per second."""
    transport = EmbeddedTransport(folder)
    settings = TopicSettings(partitions=NUM_PARTITIONS)
    transport.admin.ensure_topics({"rollouts": settings, "verified": settings})
    transport.admin.commit_initial("verifier", ["rollouts"])
    producer = transport.producer("verifier")
    producer.start()
    values = _values(load)
    for start in range(0, load.num_records, load.batch):
        producer.commit(
            [
                NewRecord("rollouts", number % NUM_PARTITIONS, b"%d" % number, values[number % 16], HEADERS)
                for number in range(start, start + load.batch)
            ]
        )
    member = transport.member("verifier", ["rollouts"], name="verifier")
    for place, position in member.committed(member.assignment()).items():
        member.seek(place, position.offset)

    started = time.perf_counter()
    num_carried = 0
    while num_carried < load.num_records:
        snapshot = member.snapshot()
        records = member.poll(max_records=load.batch)
        producer.commit(
            [NewRecord("verified", record.partition, record.key, record.value, record.headers) for record in records],
            positions={place: Position(member.position(place)) for place in {record.place for record in records}},
            snapshot=snapshot,
        )
        num_carried += len(records)
    rate = num_carried / (time.perf_counter() - started)
    assert sum(transport.admin.end_offsets("verified").values()) == load.num_records
    assert sum(transport.admin.lag("verifier", "rollouts").values()) == 0
    transport.close()
    return rate


def _carry_with_sqlite3(folder: Path, load: Load) -> float:
    """Records per second."""
    db = sqlite3.connect(folder / "log.sqlite", isolation_level=None)
    for pragma in (
        "page_size=8192",
        "journal_mode=WAL",
        "synchronous=NORMAL",
        "cache_size=-16384",
        "wal_autocheckpoint=4096",
    ):
        db.execute(f"PRAGMA {pragma}")
    for table in ("rollouts", "verified"):
        db.execute(f"CREATE TABLE {table}(id INTEGER PRIMARY KEY, at REAL, key BLOB, headers BLOB, value BLOB)")
    db.execute("CREATE TABLE positions(partition INTEGER PRIMARY KEY, offset INTEGER)")
    values = _values(load)
    headers = b"".join(name.encode() + value for name, value in HEADERS)
    for start in range(0, load.num_records, load.batch):
        db.execute("BEGIN IMMEDIATE")
        db.executemany(
            "INSERT INTO rollouts VALUES (?, ?, ?, ?, ?)",
            sorted(
                (
                    (number % NUM_PARTITIONS) << 40 | number // NUM_PARTITIONS,
                    time.time(),
                    b"%d" % number,
                    values[number % 16],
                    headers,
                )
                for number in range(start, start + load.batch)
            ),
        )
        db.execute("COMMIT")
    positions = dict.fromkeys(range(NUM_PARTITIONS), 0)
    share = load.batch // NUM_PARTITIONS

    started = time.perf_counter()
    num_carried = 0
    while num_carried < load.num_records:
        records = []
        db.execute("BEGIN")
        for partition, offset in positions.items():
            base = partition << 40
            records += db.execute(
                "SELECT id, at, key, headers, value FROM rollouts WHERE id >= ? AND id < ? ORDER BY id LIMIT ?",
                (base + offset, base + (1 << 40), share),
            ).fetchall()
        db.execute("COMMIT")
        now_s = time.time()
        outputs = [(row_id, now_s, key, headers, value) for row_id, _, key, headers, value in records]
        for row_id, *_ in records:
            positions[row_id >> 40] = (row_id & (1 << 40) - 1) + 1
        db.execute("BEGIN IMMEDIATE")
        db.executemany("INSERT INTO verified VALUES (?, ?, ?, ?, ?)", outputs)
        db.executemany("INSERT OR REPLACE INTO positions VALUES (?, ?)", list(positions.items()))
        db.execute("COMMIT")
        num_carried += len(records)
    rate = num_carried / (time.perf_counter() - started)
    assert db.execute("SELECT count(*) FROM verified").fetchone() == (load.num_records,)
    db.close()
    return rate


# -- waiting


def _idle_row(seconds: float = 10.0) -> dict[str, Any]:
    """CPU of a reader with nothing to read, beside a loop that asks the file every 5 ms."""
    with tempfile.TemporaryDirectory(prefix="rftstream-bench-") as folder:
        transport = EmbeddedTransport(folder)
        transport.admin.ensure_topics({"a": TopicSettings(partitions=NUM_PARTITIONS)})
        reader = transport.reader({TopicPartition("a", number): 0 for number in range(NUM_PARTITIONS)})
        transport.wait([reader], 0.1)
        before = time.process_time()
        transport.wait([reader], seconds)
        ours = time.process_time() - before
        transport.close()
        db = sqlite3.connect(Path(folder) / "log.sqlite", isolation_level=None)
        before = time.process_time()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            db.execute("PRAGMA data_version").fetchone()
            time.sleep(0.005)
        reference = time.process_time() - before
        db.close()
    return _row(
        "log: idle CPU of a waiting reader",
        "% of a core",
        100 * ours / seconds,
        100 * reference / seconds,
        "sqlite3 asked every 5 ms",
    )


def _echo(pipe: Connection, folder: str, num: int) -> None:
    transport = EmbeddedTransport(folder)
    reader = transport.reader({TopicPartition("there", 0): 0})
    transport.wait([reader], 0.0)
    pipe.send("ready")
    arrived: list[float] = []
    while len(arrived) < num:
        transport.wait([reader], 10.0)
        found_s = time.time()
        arrived += [found_s - record.timestamp_s for record in reader.poll()]
    pipe.send(arrived)
    transport.close()


def _wake_up_rows(num: int = 300) -> list[dict[str, Any]]:
    """From just before a commit to the return of another process's wait."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory(prefix="rftstream-bench-") as folder:
        transport = EmbeddedTransport(folder)
        transport.admin.ensure_topics({"there": TopicSettings(partitions=1)})
        producer = transport.producer("caller")
        producer.start()
        process = context.Process(target=_echo, args=(theirs, folder, num))
        process.start()
        ours.recv()
        for _ in range(num):
            producer.commit([NewRecord("there", 0, b"key", b"x" * 1024)])
            time.sleep(0.005)
        latencies_ms = sorted(1000 * latency_s for latency_s in ours.recv())
        process.join()
        transport.close()
    return [
        _row("log: commit to wake-up in another process, median", "ms", latencies_ms[num // 2]),
        _row("log: commit to wake-up in another process, 99 %", "ms", latencies_ms[num * 99 // 100]),
    ]
