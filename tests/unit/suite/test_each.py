"""A table of rows in one test says all rows that fail."""

from __future__ import annotations

import inspect

import pytest

from tests.suite.each import each


@each("a, b", [(1, 1), (2, 3), (4, 4), (5, 6)], ids=["one", "two", "three", "four"])
@each("added", [0, 1])
def rows(a: int, b: int, added: int, seen: list[int]) -> None:
    """Rows that are not alike."""
    seen.append(a)
    if a != b:
        pytest.fail("no")


def test_all_rows_are_tried_and_those_that_fail_are_named() -> None:
    seen: list[int] = []
    assert list(inspect.signature(rows).parameters) == ["seen"], "what pytest is to give"
    assert (rows.__name__, rows.__doc__) == ("rows", "Rows that are not alike.")
    with pytest.raises(BaseExceptionGroup, match="2 rows") as failed:
        rows(seen=seen)
    assert seen == [1, 1, 2, 2, 4, 4, 5, 5]
    assert [error.__notes__ for error in failed.value.exceptions] == [["of the row two"], ["of the row four"]]
