"""Reading a log up to ends that are known beforehand. Everybody who does so uses this loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rftstream.contracts.records import Record, TopicPartition
from rftstream.transport.base import Reader, Transport

WAIT_S = 0.05
"""Seconds to wait for records when a poll had none. A reader that is woken earlier polls earlier."""

MAX_RECORDS = 1000
"""Most records of one poll, unless the caller says otherwise."""


def read_to_ends(
    transport: Transport, reader: Reader, ends: Mapping[TopicPartition, int], *, max_records: int = MAX_RECORDS
) -> Iterator[list[Record]]:
    """Yield what each poll brings (possibly nothing), until the reader has reached `ends` in all these partitions.

    A poll may also bring records of other partitions of the reader, and records at or above `ends`: the caller
    decides what becomes of them. The reader stays open.
    """
    while any(reader.position(place) < end for place, end in ends.items()):
        records = reader.poll(max_records=max_records)
        yield records
        if not records:
            transport.wait([reader], WAIT_S)


def begin_positions(transport: Transport, topics: Sequence[str]) -> dict[TopicPartition, int]:
    """Return the first offsets of all partitions of some topics."""
    positions: dict[TopicPartition, int] = {}
    for topic in topics:
        positions.update(transport.admin.begin_offsets(topic))
    return positions
