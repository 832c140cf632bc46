"""Kafka: what exactly-once costs on top of a bare loop of kafka-python on the same broker.

The loop is that of `log.py`: read a batch, make one record of each, publish these together with the positions, in
transactions. The reference is written as one would by hand, with the same client, compression, back-off and batches;
it has no bounds in bytes, watchdog, fencing by ownership, sizes to check or records to make. It runs in a process of
its own, with kafka-python as it is (`_kafka_bare.py`). Both are measured in turn, on topics of their own, on a broker
that is started for it (Java 17, Maven).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.log import HEADERS, NUM_PARTITIONS, Load
from rftstream.config.sections import TransportSection
from rftstream.contracts.records import NewRecord
from rftstream.transport.base import Position, TopicSettings
from rftstream.transport.kafka.connection import BACKOFF_MS
from rftstream.transport.kafka.producer import BATCH_BYTES
from rftstream.transport.kafka.transport import KafkaTransport

SCRIPT = Path(__file__).parents[1] / "scripts" / "kafka"
REPETITIONS = 5
LOADS = (
    Load(name="64 KB", record_bytes=65_536, num_records=1_280, batch=64),
    Load(name="1 KB", record_bytes=1_024, num_records=20_480, batch=256),
)
NUM_TRANSACTIONS = 400
"""Of one record of 1 KB each."""

_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What carrying a load took."""

    rate: float
    """Records per second."""
    cpu_ms: float
    """Milliseconds of CPU for each record, in all threads of the process."""


def run() -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="rftstream-bench-") as folder, brokers(Path(folder) / "kafka") as servers:
        for load in LOADS:
            ours, bare = _in_turn(lambda name: _carry(servers, name, load), lambda name: _bare(servers, name, load))  # noqa: B023
            name = f"kafka: {load.name} records, read-transform-publish"
            megabytes = load.record_bytes / 1e6
            rows.append(_row(name, "records/s", ours.rate, bare.rate))
            rows.append(_row(name, "MB/s", ours.rate * megabytes, bare.rate * megabytes))
        one = Load(name="1 KB", record_bytes=1_024, num_records=NUM_TRANSACTIONS, batch=1)
        ours, bare = _in_turn(lambda name: _carry(servers, name, one), lambda name: _bare(servers, name, one))
        name = "kafka: transactions, of one 1 KB record and its position"
        rows.append(_row(name, "transactions/s", ours.rate, bare.rate))
        rows.append(_row(f"{name}, of the client", "ms of CPU", ours.cpu_ms, bare.cpu_ms))
    return rows


@contextlib.contextmanager
def brokers(folder: Path, nodes: int = 1, settings: Mapping[str, object] | None = None) -> Iterator[str]:
    """Start brokers of this process's own, let them make their own topics, and stop them at the end. `settings` are
    theirs. Yield their addresses."""
    options = ["--dir", str(folder), "--nodes", str(nodes), "--owner", str(os.getpid())]
    options += [word for name, value in (settings or {}).items() for word in ("--set", f"{name}={value}")]
    command = [sys.executable, str(SCRIPT)]
    started = subprocess.run([*command, "start", *options], stdout=subprocess.PIPE, text=True, check=True)
    try:
        servers = started.stdout.splitlines()[-1]
        transport = KafkaTransport("warm", TransportSection(kind="kafka", servers=servers))
        transport.admin.ensure_topics({"tasks": TopicSettings(partitions=1)})
        transport.admin.commit_initial("explorer", ["tasks"])
        transport.producer("bench").start()
        transport.close()
        yield servers
    finally:
        subprocess.run([*command, "stop", "--dir", str(folder)], capture_output=True)


def _in_turn(ours: Callable[[str], Carried], bare: Callable[[str], Carried]) -> tuple[Carried, Carried]:
    """Medians; the first of each warms the broker up."""
    found: list[tuple[Carried, Carried]] = []
    for _ in range(REPETITIONS + 1):
        found.append((ours(f"ours{next(_numbers)}"), bare(f"bare{next(_numbers)}")))
    return _median([one for one, _ in found[1:]]), _median([other for _, other in found[1:]])


def _median(found: list[Carried]) -> Carried:
    return Carried(
        rate=statistics.median(one.rate for one in found), cpu_ms=statistics.median(one.cpu_ms for one in found)
    )


def _row(name: str, unit: str, ours: float, bare: float) -> dict[str, Any]:
    return {
        "name": name,
        "unit": unit,
        "ours": ours,
        "reference": bare,
        "reference_name": "kafka-python alone",
        "ratio": ours / bare,
    }


def _values(load: Load) -> list[bytes]:
    chance = random.Random(0)
    return [chance.randbytes(load.record_bytes) for _ in range(16)]


def _filled(servers: str, name: str, load: Load) -> KafkaTransport:
    """With topics, positions, and records to read."""
    transport = KafkaTransport(name, TransportSection(kind="kafka", servers=servers))
    settings = TopicSettings(partitions=NUM_PARTITIONS)
    transport.admin.ensure_topics({"rollouts": settings, "verified": settings})
    transport.admin.commit_initial("verifier", ["rollouts"])
    producer = transport.producer("filler")
    producer.start()
    values = _values(load)
    for start in range(0, load.num_records, 256):
        producer.commit(
            [
                NewRecord("rollouts", number % NUM_PARTITIONS, b"%d" % number, values[number % 16], HEADERS)
                for number in range(start, min(start + 256, load.num_records))
            ]
        )
    return transport


def _carry(servers: str, name: str, load: Load) -> Carried:
    transport = _filled(servers, name, load)
    producer = transport.producer("verifier")
    producer.start()
    member = transport.member("verifier", ["rollouts"], name="verifier")
    while len(member.assignment()) < NUM_PARTITIONS:
        transport.wait([member], 0.1)
        member.poll(max_records=0)
    for place, position in member.committed(member.assignment()).items():
        member.seek(place, position.offset)
    transport.wait([member], 5.0)
    before_s, started = time.process_time(), time.perf_counter()
    num_carried = 0
    while num_carried < load.num_records:
        snapshot = member.snapshot()
        records = member.poll(max_records=load.batch)
        if not records:
            transport.wait([member], 1.0)
            continue
        producer.commit(
            [NewRecord("verified", record.partition, record.key, record.value, record.headers) for record in records],
            positions={place: Position(member.position(place)) for place in {record.place for record in records}},
            snapshot=snapshot,
        )
        num_carried += len(records)
    rate, cpu_s = num_carried / (time.perf_counter() - started), time.process_time() - before_s
    assert sum(transport.admin.lag("verifier", "rollouts").values()) == 0
    transport.close()
    return Carried(rate=rate, cpu_ms=1000 * cpu_s / load.num_records)


def _bare(servers: str, name: str, load: Load) -> Carried:
    transport = _filled(servers, name, load)
    given = {
        "num_records": load.num_records,
        "batch": load.batch,
        "backoff_ms": BACKOFF_MS,
        "batch_bytes": BATCH_BYTES,
    }
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks._kafka_bare", servers, name, json.dumps(given)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    transport.close()
    rate, cpu_s = json.loads(done.stdout)
    return Carried(rate=rate, cpu_ms=1000 * cpu_s / load.num_records)
