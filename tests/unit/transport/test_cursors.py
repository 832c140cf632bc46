"""Reading positions, over a log that only says where it begins and ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import pytest

from rftstream.contracts.records import NewRecord, TopicPartition
from rftstream.errors import PositionMissing
from rftstream.transport.base import TopicSettings
from rftstream.transport.cursors import Cursors
from rftstream.transport.memory.transport import MemoryLog

PLACE = TopicPartition("tasks", 0)


class Ends:
    def spans(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, tuple[int, int]]:
        return dict.fromkeys(partitions, (0, 5))

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name}: nothing is read here")


def test_a_partition_that_comes_back_is_not_paused_any_more() -> None:
    cursors = Cursors({PLACE: 3})
    cursors.pause([PLACE])
    assert not cursors.ready(Ends())
    cursors.forget([PLACE])
    cursors.seek(PLACE, 3)
    assert cursors.ready(Ends())


def test_a_position_beyond_the_end_is_not_waited_for() -> None:
    """Whoever waits for records would wait for ever."""
    cursors = Cursors({PLACE: 9})
    assert cursors.ready(Ends())
    with pytest.raises(PositionMissing, match="beyond the end"):
        cursors.poll(Ends(), 1, 1)
    assert not Cursors({PLACE: 5}).ready(Ends()), "all is read"


@pytest.mark.parametrize("num_partitions", [1, 2, 4])
def test_partitions_share_the_bytes_of_a_poll(num_partitions: int) -> None:
    """No partition has more than its share, records that are left come next, and a large record alone comes whole."""
    transport = MemoryLog(lambda: 0.0).connect()
    transport.admin.ensure_topics({"tasks": TopicSettings(partitions=num_partitions)})
    producer = transport.producer("feeder")
    producer.start()
    records = [
        NewRecord("tasks", partition, b"k", bytes([partition]) * 1000)
        for partition in range(num_partitions) for _ in range(12)
    ]  # fmt: skip
    producer.commit(records)
    reader = transport.reader({TopicPartition("tasks", partition): 0 for partition in range(num_partitions)})
    for _ in range(2):
        found = reader.poll(max_bytes=4 * records[0].num_bytes * num_partitions)
        assert Counter(record.partition for record in found) == dict.fromkeys(range(num_partitions), 4)
    assert len(reader.poll(max_bytes=1)) == 1, "one record, however large, or nothing would ever come"
