"""Which results make a transaction: the oldest, in their order, whatever their sizes."""

from __future__ import annotations

import pytest

from rftstream.contracts.records import NewRecord, TopicPartition
from rftstream.service.loops import results
from rftstream.service.loops.results import InHand, PendingResults
from rftstream.testing import ManualClock

PLACE = TopicPartition("rollouts", 0)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((10, 10, 10), [0, 1, 2]),
        ((60, 60, 10), [0]),  # the third would fit, but what comes after a result waits for it
        ((200, 10), [0]),  # alone, since no transaction would hold it otherwise
        ((40, 60, 1), [0, 1]),
    ],
)
def test_a_transaction_takes_the_oldest_in_order(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], expected: list[int]
) -> None:
    pending = PendingResults(ManualClock())
    monkeypatch.setattr(results, "MAX_TRANSACTION_BYTES", 100)
    for number, size in enumerate(sizes):
        work = InHand(PLACE, assignment=1, offset=number)
        pending.add(number, work, [NewRecord("rollouts", 0, None, b" " * size)])
    assert [result.number for result in pending.choose({PLACE: 1})] == expected
    assert pending.choose({PLACE: 2}) == []
