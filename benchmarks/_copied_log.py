"""Copies a run's records from the embedded log to a Kafka, to the same offsets, and the positions of its groups."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from kafka import KafkaProducer

from rftstream.contracts import codec
from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.summaries import Summary
from rftstream.roles import role_specs
from rftstream.runs.folder import open_run
from rftstream.service.reading import read_between
from rftstream.transport.base import Transport

AT_ONCE = 10_000
"""Records that are sent before the copy waits for all of them."""


def copy_to_kafka(source: Path, target: Path) -> None:
    """Copy the log of a run to that of another one, which was only just made. Records are written without transactions,
    whose markers would take offsets. What was deleted is deleted there, too."""
    theirs, ours = open_run(source).transport, open_run(target)
    servers = ours.config.transport.servers
    producer = KafkaProducer(bootstrap_servers=servers, linger_ms=20, compression_type="zstd", max_request_size=9 << 20)
    with closing(producer):
        for topic, settings in theirs.admin.topics().items():
            _copy_topic(theirs, topic, f"{ours.run_id}.{topic}", producer)
            if not settings.compacted:  # brokers delete nothing there
                ours.transport.admin.delete_before(theirs.admin.begin_offsets(topic))
    committing = ours.transport.producer("copy")
    committing.start()
    for spec in role_specs():
        if positions := theirs.admin.committed(spec.name):
            committing.commit([], positions=positions, group=spec.name)
    committing.close()


def _copy_topic(source: Transport, topic: str, name: str, producer: Any) -> None:
    begins, ends = source.admin.begin_offsets(topic), source.admin.end_offsets(topic)
    next_offset, sent = dict.fromkeys(begins, 0), []

    def fill(place: TopicPartition, offset: int) -> None:
        """Take the place of records that are gone."""
        for _ in range(next_offset[place], offset):
            sent.append(producer.send(name, key=b"compacted", value=None, partition=place.partition))
        next_offset[place] = offset

    for record in read_between(source, begins, ends):
        fill(record.place, record.offset)
        sent.append(
            producer.send(name, key=record.key, value=_value_of(record), headers=list(record.headers),
                          partition=record.partition, timestamp_ms=int(record.timestamp_s * 1000))
        )  # fmt: skip
        next_offset[record.place] = record.offset + 1
        if len(sent) >= AT_ONCE:
            _wait(sent)
    for place, end in ends.items():
        fill(place, end)
    _wait(sent)


def _value_of(record: Record) -> bytes | None:
    """Return the record's value. A summary of `control` has records as they were, whose times brokers cut to
    milliseconds."""
    summary = codec.from_record(record) if record.topic == "summaries" and record.value is not None else None
    if not isinstance(summary, Summary) or summary.control is None:
        return record.value
    kept = tuple(replace(one, timestamp_s=int(one.timestamp_s * 1000) / 1000) for one in summary.control.records)
    return codec.encode(replace(summary, control=replace(summary.control, records=kept)))


def _wait(sent: list[Any]) -> None:
    for one in sent:
        one.get(timeout=120)
    sent.clear()
