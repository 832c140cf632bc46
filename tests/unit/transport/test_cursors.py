"""Reading positions, over a log that only says where it begins and ends."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pytest

from rftstream.contracts.records import TopicPartition
from rftstream.errors import PositionMissing
from rftstream.transport.cursors import Cursors

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
