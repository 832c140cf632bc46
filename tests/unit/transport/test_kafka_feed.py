"""What a feed of fetched records takes in memory."""

from __future__ import annotations

import tracemalloc

import pytest

from rftstream.contracts.records import Record
from rftstream.transport.kafka.feed import _size


@pytest.mark.parametrize(("num_headers", "num_bytes"), [(0, 0), (14, 0), (14, 5_000), (0, 5_000)])
def test_records_count_as_what_they_take(num_headers: int, num_bytes: int) -> None:
    """A feed stops fetching by these counts. Records without bodies are mostly headers."""

    def made(number: int) -> Record:
        headers = tuple((f"header_{one}"[:10], b"%d" % (number * one)) for one in range(num_headers))
        return Record("rollouts", 3, number, number / 1000, b"key%d" % number, bytes(num_bytes) or None, headers)

    tracemalloc.start()
    records = [made(number) for number in range(1_000, 3_000)]
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 0.6 < sum(map(_size, records)) / taken < 1.6
