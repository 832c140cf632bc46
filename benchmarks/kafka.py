"""Kafka: what exactly-once costs on top of a bare loop of kafka-python on the same broker.

The loop is that of `log.py`: read a batch, make one record of each, publish these together with the positions, in
transactions. The reference is written as one would by hand, with the same client, compression, back-off and batches;
it has no bounds in bytes, watchdog, fencing by ownership, sizes to check or records to make. Both are measured in
turn, on topics of their own, on a broker that is started for it (Java 17, Maven).
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kafka import KafkaConsumer, KafkaProducer
from kafka.structs import OffsetAndMetadata
from kafka.structs import TopicPartition as KafkaPartition

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


def run() -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="rftstream-bench-") as folder:
        servers = _start(Path(folder) / "kafka")
        try:
            for load in LOADS:
                ours, bare = _in_turn(lambda name: _carry(servers, name, load), lambda name: _bare(servers, name, load))  # noqa: B023
                name = f"kafka: {load.name} records, read-transform-publish"
                megabytes = load.record_bytes / 1e6
                rows += [_row(name, "records/s", ours, bare), _row(name, "MB/s", ours * megabytes, bare * megabytes)]
            one = Load(name="1 KB", record_bytes=1_024, num_records=NUM_TRANSACTIONS, batch=1)
            ours, bare = _in_turn(lambda name: _carry(servers, name, one), lambda name: _bare(servers, name, one))
            rows.append(_row("kafka: transactions, of one 1 KB record and its position", "transactions/s", ours, bare))
        finally:
            subprocess.run([sys.executable, str(SCRIPT), "stop", "--dir", f"{folder}/kafka"], capture_output=True)
    return rows


def _start(folder: Path) -> str:
    started = subprocess.run(
        [sys.executable, str(SCRIPT), "start", "--dir", str(folder), "--owner", str(os.getpid())],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return started.stdout.splitlines()[-1]


def _in_turn(ours: Callable[[str], float], bare: Callable[[str], float]) -> tuple[float, float]:
    """Medians; the first of each warms the broker up."""
    found: list[tuple[float, float]] = []
    for _ in range(REPETITIONS + 1):
        found.append((ours(f"ours{next(_numbers)}"), bare(f"bare{next(_numbers)}")))
    return statistics.median(one for one, _ in found[1:]), statistics.median(other for _, other in found[1:])


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


def _carry(servers: str, name: str, load: Load) -> float:
    """Records per second."""
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
    started = time.perf_counter()
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
    rate = num_carried / (time.perf_counter() - started)
    assert sum(transport.admin.lag("verifier", "rollouts").values()) == 0
    transport.close()
    return rate


def _bare(servers: str, name: str, load: Load) -> float:
    """Records per second."""
    transport = _filled(servers, name, load)
    source, target = f"{name}.rollouts", f"{name}.verified"
    consumer = KafkaConsumer(
        source,
        bootstrap_servers=servers,
        group_id=f"{name}.verifier",
        isolation_level="read_committed",
        enable_auto_commit=False,
        auto_offset_reset="none",
        fetch_max_bytes=16 << 20,
        max_partition_fetch_bytes=2 << 20,
    )
    producer = KafkaProducer(
        bootstrap_servers=servers,
        transactional_id=f"{name}.bare",
        compression_type="zstd",
        retry_backoff_ms=BACKOFF_MS,
        batch_size=BATCH_BYTES,
        max_request_size=64 << 20,
    )
    producer.init_transactions()
    waiting: list[Any] = []

    def read(timeout_ms: int) -> None:
        for records in consumer.poll(timeout_ms=timeout_ms, max_records=load.batch).values():
            waiting.extend(records)

    while not waiting:
        read(1000)
    started = time.perf_counter()
    num_carried = 0
    while num_carried < load.num_records:
        if not waiting:
            read(1000)
            continue
        records, waiting = waiting, []
        producer.begin_transaction()
        positions = {}
        for record in records:
            producer.send(target, record.value, record.key, list(record.headers), partition=record.partition)
            positions[KafkaPartition(source, record.partition)] = OffsetAndMetadata(record.offset + 1, "", -1)
        producer.send_offsets_to_transaction(positions, consumer.group_metadata())
        producer.commit_transaction()
        num_carried += len(records)
    rate = num_carried / (time.perf_counter() - started)
    consumer.close()
    producer.close()
    transport.close()
    return rate
