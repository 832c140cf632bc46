"""The reference of `kafka.py`: the loop with kafka-python alone, in a process that imports nothing of rftstream.

rftstream changes classes of kafka-python (`rftstream.transport.kafka.client.compat`), so that in its process the
client alone cannot be had.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from kafka import KafkaConsumer, KafkaProducer
from kafka.structs import OffsetAndMetadata
from kafka.structs import TopicPartition as KafkaPartition


def carry(
    servers: str, name: str, *, num_records: int, batch: int, backoff_ms: int, batch_bytes: int
) -> tuple[float, float]:
    """Return records per second, and the seconds of CPU that all of them took."""
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
        retry_backoff_ms=backoff_ms,
        batch_size=batch_bytes,
        max_request_size=64 << 20,
    )
    producer.init_transactions()
    waiting: list[Any] = []

    def read(timeout_ms: int) -> None:
        for records in consumer.poll(timeout_ms=timeout_ms, max_records=batch).values():
            waiting.extend(records)

    while not waiting:
        read(1000)
    before_s, started = time.process_time(), time.perf_counter()
    num_carried = 0
    while num_carried < num_records:
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
    rate, cpu_s = num_carried / (time.perf_counter() - started), time.process_time() - before_s
    consumer.close()
    producer.close()
    return rate, cpu_s


if __name__ == "__main__":
    print(json.dumps(carry(sys.argv[1], sys.argv[2], **json.loads(sys.argv[3]))))
