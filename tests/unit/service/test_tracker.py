"""Out-of-order finish: the committed position says exactly what is finished, over any number of successors."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftstream.errors import ContractError
from rftstream.service.loops.tracker import PartitionTracker, decode_finished, encode_position
from rftstream.transport.base import MAX_METADATA_BYTES, Position

pytestmark = pytest.mark.law("lost", "twice")


def test_metadata_by_hand() -> None:
    position = encode_position([2, 4, 5, 9], {3, 6, 7, 8, 12}, 10)
    assert position == Position(2, "1,1,2,3,3,1")
    assert decode_finished(position) == {3, 6, 7, 8, 12}


def test_nothing_open_commits_the_delivery_position() -> None:
    tracker = PartitionTracker(Position(0))
    for offset in (0, 1, 4):  # 2 and 3 were transaction markers, as is 5
        tracker.deliver(offset)
    assert tracker.position_after([(0,), (1,), (4,)], 6) == (Position(6, "0"), [])


def test_damaged_metadata_is_named() -> None:
    with pytest.raises(ContractError, match="run lengths in base 36"):
        decode_finished(Position(0, "1,?"))


@pytest.mark.slow
def test_results_that_do_not_fit_are_held() -> None:
    tracker = PartitionTracker(Position(0))
    for offset in range(40_000):
        tracker.deliver(offset)
    odd = [(offset,) for offset in range(1, 40_000, 2)]
    position, held = tracker.position_after(odd, 40_000)
    assert held and len(position.metadata) <= MAX_METADATA_BYTES
    assert decode_finished(position) == {offset for (offset,) in odd} - {offset for (offset,) in held}
    tracker.committed(position, sorted(decode_finished(position)))
    together = (0, *range(20_000, 40_000, 200))  # the lowest one open is let through, with all that come with it
    after, still_held = tracker.position_after([together, *(one for one in held if one[0] % 200)], 40_000)
    assert after.offset == 2 and len(after.metadata) <= MAX_METADATA_BYTES
    assert decode_finished(after) == decode_finished(position) - {1} | set(together[1:])
    assert together not in still_held and len(still_held) == len([one for one in held if one[0] % 200])


@given(st.integers(0, 2**32), st.integers(1, 30))
def test_every_offset_is_done_once_over_successors(seed: int, n: int) -> None:
    random = Random(seed)
    gaps = {offset for offset in range(n) if random.random() < 0.2}
    position, done = Position(0), set[int]()
    while position.offset < n:
        tracker, next_offset, mine = PartitionTracker(position), position.offset, list[int]()
        for _ in range(random.randint(1, 12)):
            for _ in range(random.randint(0, 4)):
                if next_offset < n:
                    if next_offset not in gaps and tracker.deliver(next_offset):
                        mine.append(next_offset)
                    next_offset += 1
            finished = [offset for offset in mine if random.random() < 0.4]
            cut = random.randint(0, len(finished))  # some of them finish together
            results = [*((offset,) for offset in finished[:cut]), *([tuple(finished[cut:])] if finished[cut:] else [])]
            position, held = tracker.position_after(results, next_offset)
            assert not held
            tracker.committed(position, finished)
            mine = [offset for offset in mine if offset not in finished]
            assert done.isdisjoint(finished)
            done.update(finished)
            said = decode_finished(position)
            for offset in range(n):
                if offset in done:
                    assert offset < position.offset or offset in said
                elif offset not in gaps:
                    assert offset >= position.offset and offset not in said
    assert done == set(range(n)) - gaps
