"""The reference of `long.py` on Kafka: the same bytes with kafka-python alone, in a process that imports nothing of
rftstream, which changes classes of kafka-python."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer
from kafka.admin import NewTopic
from kafka.structs import OffsetAndMetadata, TopicPartition

PARTITIONS = 8
WAY = ((None, "rollouts"), ("rollouts", "verified"), ("verified", "batches"), ("batches", None))


def carry(
    servers: str, name: str, *, values: str, transaction_bytes: int, backoff_ms: int, batch_bytes: int
) -> dict[str, float]:
    """Return the seconds on the clock and of processors that all hops took."""
    kept = kept_values(Path(values))
    admin = KafkaAdminClient(bootstrap_servers=servers)
    topics = [f"{name}.{topic}" for topic in kept]
    config = {"max.message.bytes": str(16 << 20)}
    admin.create_topics([NewTopic(topic, PARTITIONS, 1, topic_configs=config) for topic in topics])
    took = {"wall": 0.0, "cpu": 0.0, "mib": 0.0}
    for source, target in WAY:
        made = {"bootstrap_servers": servers, "retry_backoff_ms": backoff_ms}
        producer = consumer = None
        if target is not None:
            producer = KafkaProducer(transactional_id=f"{name}.{target}", compression_type="zstd", linger_ms=50,
                                     batch_size=batch_bytes, max_request_size=64 << 20, **made)  # fmt: skip
            producer.init_transactions()
        if source is not None:
            consumer = KafkaConsumer(bootstrap_servers=servers, group_id=f"{name}.{source}",
                                     isolation_level="read_committed", enable_auto_commit=False,
                                     auto_offset_reset="earliest", fetch_max_bytes=16 << 20,
                                     max_partition_fetch_bytes=2 << 20)  # fmt: skip
            consumer.assign([TopicPartition(f"{name}.{source}", number) for number in range(PARTITIONS)])
        cpu_s, began = time.process_time(), time.perf_counter()
        _hop(name, kept, source, target, consumer, producer, transaction_bytes)
        took["wall"] += time.perf_counter() - began
        took["cpu"] += time.process_time() - cpu_s
        for client in (consumer, producer):
            if client is not None:
                client.close()
    admin.delete_topics(topics)
    admin.close()
    return took


def _hop(
    name: str,
    kept: dict[str, list[bytes]],
    source: str | None,
    target: str | None,
    consumer: Any,
    producer: Any,
    transaction_bytes: int,
) -> None:
    """Read the records of one topic, and write those of the next one: a batch in one transaction, others in several."""
    num_read = num_written = 0
    num = len(kept[source or "rollouts"])
    each = max(1, transaction_bytes // len(kept["rollouts"][0]))
    positions: dict[TopicPartition, Any] = {}
    while num_read < num:
        if consumer is None:
            num_read = min(num_read + each, num)
        else:
            for place, records in consumer.poll(timeout_ms=1000, max_records=each).items():
                num_read += len(records)
                positions[place] = OffsetAndMetadata(records[-1].offset + 1, "", -1)
        if target is None or (target == "batches" and num_read < num):
            continue
        producer.begin_transaction()
        stop = len(kept[target]) if num_read == num else num_read
        for number in range(num_written, stop):
            headers = [("name", bytes(200))]
            producer.send(
                f"{name}.{target}", kept[target][number], b"%d" % number, headers, partition=number % PARTITIONS
            )
        num_written = stop
        if positions:
            producer.send_offsets_to_transaction(positions, consumer.group_metadata())
        producer.commit_transaction()


def kept_values(values: Path) -> dict[str, list[bytes]]:
    found = {}
    for topic, sizes in json.loads(values.with_suffix(".json").read_text()).items():
        with values.with_suffix(f".{topic}").open("rb") as file:
            found[topic] = [file.read(size) for size in sizes]
    return found


if __name__ == "__main__":
    print(json.dumps(carry(sys.argv[1], sys.argv[2], **json.loads(sys.argv[3]))))
