"""Values beside tokens: cut, joined, filled and sent, they stay with their tokens."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from rftstream.contracts.beside import (
    Beside,
    absent,
    columns_of,
    cut_columns,
    fill_columns,
    join_columns,
    sources,
    uniform,
    window,
    wire_columns,
)

Lists = list[list[int]]


def beside(lists: Lists, dtype: Any = np.uint8) -> Beside:
    flat = [value for one in lists for value in one]
    return Beside(np.array([len(one) for one in lists], np.int32), np.array(flat, dtype))


def lists_of(column: Beside) -> Lists:
    return [part.tolist() for part in np.split(column.values, np.cumsum(column.counts_T)[:-1])] if len(column) else []


def drawn(random: Random, count: int) -> Lists:
    return [[random.randrange(200) for _ in range(random.choice([0, 0, 1, 3]))] for _ in range(count)]


def test_values_stay_with_their_tokens_whatever_is_cut_and_joined() -> None:
    """Compared with lists of Python."""
    random = Random(7)
    for _ in range(60):
        first, second = drawn(random, random.randint(0, 9)), drawn(random, random.randint(0, 9))
        columns, others = {"a": beside(first)}, {"a": beside(second), "b": beside(second, np.int32)}
        start, stop = sorted((random.randint(0, len(first)), random.randint(0, len(first))))
        assert lists_of(cut_columns(columns, start, stop)["a"]) == first[start:stop]
        joined = join_columns([(len(first), columns), (len(second), others)])
        assert lists_of(joined["a"]) == first + second
        assert lists_of(joined["b"]) == [[]] * len(first) + second
        assert joined["b"].values.dtype == np.int32 or not joined["b"].values.size
        filled = fill_columns(columns, len(first), others)
        tail = ([[]] * len(first) + second)[len(second) :]
        assert lists_of(filled["a"]) == [one or other for one, other in zip(first, tail, strict=True)]
        wire = wire_columns(joined)
        assert wire.keys() == {name for name, column in joined.items() if column.values.size}
        back = columns_of(wire)
        for name, column in back.items():
            assert lists_of(column) == lists_of(joined[name]) and column.values.dtype == joined[name].values.dtype
        assert wire_columns(back) == wire, "one form on the wire"


@pytest.mark.parametrize(
    ("width", "expected"),
    [(None, [[2], [3], [], [6], []]), (3, [[2], [3], [], [6], [], [], [], [], []])],
    ids=["packed", "padded"],
)
def test_a_pass_over_a_token_has_what_stands_beside_the_next(width: int | None, expected: Lists) -> None:
    rows: list[tuple[int, Any]] = [
        (4, {"a": beside([[], [2], [3], []])}), (2, {"a": beside([[5], [6]])}), (1, {"a": beside([[7]])}),
    ]  # fmt: skip
    found = sources(rows, [(0, 0, 3), (1, 0, 1), (2, 0, 1)], width)["a"]
    assert lists_of(found) == expected
    if width is not None:  # columns 1 and 2, and one of padding
        assert lists_of(window({"a": found}, 3, 1, 4)["a"]) == [[3], [], [], [], [], [], [], [], []]
        assert lists_of(window({"a": found}, 3, 0, 1)["a"]) == [[2], [6], []]


def test_pieces_of_rows_are_read_in_any_order() -> None:
    rows: list[tuple[int, Any]] = [(4, {"a": beside([[], [2], [3], [4, 4]])}), (3, {})]
    assert lists_of(sources(rows, [(0, 1, 3), (1, 0, 2), (0, 0, 1)], None)["a"]) == [[3], [4, 4], [], [], [2]]


def test_constant_counts_cost_nothing_on_the_wire() -> None:
    """32,000 tokens in 24 layers with 8 experts each."""
    column = uniform(np.ones((32_000, 24, 8), np.uint8))
    (sent,) = wire_columns({"experts": column}).values()
    assert (len(sent.runs.data), len(sent.values.data)) == (8, 32_000 * 24 * 8)
    assert not wire_columns({"experts": absent(5)})


def test_counts_and_values_belong_together() -> None:
    with pytest.raises(ValueError, match="expected one value for each that is counted"):
        Beside(np.array([1, 2]), np.zeros(2))
