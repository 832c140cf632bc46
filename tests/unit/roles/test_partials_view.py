"""The view of `partials`, and segments cut where they were saved."""

from __future__ import annotations

import numpy as np
import pytest

from rftstream.contracts.beside import columns_of, cut_columns, uniform
from rftstream.contracts.records import Record
from rftstream.contracts.rollouts import VersionSpan
from rftstream.policies.base import Completion
from rftstream.roles.explorer.open_segment import OpenSegment
from rftstream.roles.explorer.saved.partials import Partials, numbers_of, parse_key, tombstones
from rftstream.transport.memory.transport import MemoryLog
from tests.suite.each import each


def record(key: str, offset: int, value: bytes | None = b"x" * 10, partition: int = 0) -> Record:
    return Record("partials", partition, offset, 0.0, key.encode(), value, ())


def view(max_held_bytes: int) -> Partials:
    return Partials(MemoryLog(lambda: 0.0).connect(), max_held_bytes)


@pytest.mark.law("bounded")
def test_bodies_are_held_up_to_the_limit_and_tombstones_make_room() -> None:
    partials = view(25)
    for number in range(3):
        partials.absorb(record(f"a#{number}", number))
    assert [one.value is None for one in partials.of(0, "a")] == [False, False, True]
    partials.absorb(record("a#0", 3, None))
    partials.absorb(record("b#0", 4))
    assert numbers_of(partials.of(0, "a")) == [1, 2]
    assert [one.value is None for one in partials.of(0, "b")] == [False]
    partials.forget(0, "a")
    partials.absorb(record("c#0", 5, partition=1))
    assert partials.of(0, "a") == []
    assert partials.of(1, "c")[0].value is not None
    partials.clear(0)
    partials.clear(1)
    partials.absorb(record("d#0", 6, b"x" * 25))
    assert partials.of(0, "d")[0].value is not None, "all the room there ever was"


def test_a_partition_that_is_read_again_is_what_the_log_says() -> None:
    partials = view(1000)
    for number in range(12):
        partials.absorb(record(f"a#{number}", number))
    partials.clear(0)
    assert partials.of(0, "a") == []
    for number in (10, 2, 1, 0):
        partials.absorb(record(f"a#{number}", number))
    partials.absorb(record("a#1", 20, b"newer"))
    assert numbers_of(partials.of(0, "a")) == [0, 1, 2, 10]
    assert partials.of(0, "a")[1].value == b"newer"


@each(
    ("key", "expected"),
    [(b"t/0/1/0/2#13", ("t/0/1/0/2", 13)), (b"#", ("", 0)), (b"\xff#1", ("�", 1)), (b"a#-1", ("", 0)),
     (b"a#" + "²".encode(), ("", 0)), (b"a#12345678901", ("", 0)), (b"", ("", 0))],
)  # fmt: skip
def test_keys(key: bytes, expected: tuple[str, int]) -> None:
    assert parse_key(key) == expected


def test_tombstones_name_what_is_there() -> None:
    found = tombstones("t/0/1/0/2", 3, [0, 4])
    assert [(one.topic, one.partition, one.message, one.key) for one in found] == [
        ("partials", 3, None, b"t/0/1/0/2#0"), ("partials", 3, None, b"t/0/1/0/2#4"),
    ]  # fmt: skip


def span(start: int, count: int, version: int, epoch: int = 1) -> VersionSpan:
    return VersionSpan(start=start, count=count, trainer_epoch=epoch, version=version)


def sampled(*spans: VersionSpan, num_before: int = 0, first: int = 0) -> Completion:
    """With values from `first` on beside its tokens and those before them."""
    count = sum(one.count for one in spans)
    values = np.arange(first, first + num_before + count, dtype=np.uint8)
    return Completion(
        request_id="a", token_ids=np.arange(count, dtype=np.int32), versions=spans, finish_reason="stop",
        behavior_logprobs=np.full(count, -1.0, np.float32),
        beside={"made": uniform(values[:, None])},
    )  # fmt: skip


def test_a_segment_in_parts_is_the_segment_wherever_it_is_cut() -> None:
    whole = OpenSegment()
    whole.prompt([7, 8, 9])
    whole.sampled(sampled(span(0, 2, 0), span(2, 3, 1), num_before=2))
    whole.sampled(sampled(span(0, 1, 1), span(1, 2, 1, epoch=2)))
    whole.prompt([5])
    whole.sampled(sampled(span(0, 2, 1, epoch=2), num_before=40, first=60))
    made = columns_of(whole.close().beside)["made"]
    assert made.counts_T.tolist() == [1] * 14
    assert made.values.tolist() == [88, *range(7), 0, 1, 2, 99, 100, 101], "the first pass over a token counts"
    assert whole.versions == [span(3, 2, 0), span(5, 4, 1), span(9, 2, 1, 2), span(12, 2, 1, 2)], "run lengths"
    for cut in range(1, len(whole.token_ids)):
        for again in range(cut, len(whole.token_ids)):
            joined = OpenSegment.of(_upto(whole, cut).close())
            joined.extend(_upto(whole.from_token(cut), again - cut).close())
            joined.extend(whole.from_token(again).close())
            assert joined.close() == whole.close()


def _upto(segment: OpenSegment, count: int) -> OpenSegment:
    return OpenSegment(
        segment.token_ids[:count], segment.logprobs[:count], segment.mask[:count],
        [span(one.start, min(one.count, count - one.start), one.version, one.trainer_epoch)
         for one in segment.versions if one.start < count],
        [], cut_columns(segment.beside, 0, count),
    )  # fmt: skip
