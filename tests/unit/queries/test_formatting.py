"""Text for people."""

from __future__ import annotations

import math

from rftstream.queries.formatting import number, staleness_text
from tests.suite.each import each


@each(("value", "digits", "text"), [
    (None, 3, "-"), (0.0, 3, "0"), (12.0, 1, "12"), (0.5123, 3, "0.512"), (12.34, 3, "12.340"), (1600.4, 3, "1,600"),
    (3.1e-6, 3, "3.1e-06"), (-0.25, 3, "-0.250"), (2.94, 1, "2.9"), (12.34, 1, "12.3"), (312.46, 1, "312.5"),
    (math.nan, 3, "nan"), (math.inf, 3, "inf"), (-math.inf, 1, "-inf"), (1e30, 3, "1.0e+30"),
])  # fmt: skip
def test_numbers(value: float | None, digits: int, text: str) -> None:
    assert number(value, digits) == text


def test_a_histogram_of_staleness() -> None:
    assert staleness_text((1412, 0, 5)) == "1,412 at 0, 5 at 2"
    assert staleness_text((*[0] * 64, 2)) == "2 at 64 or more"
    assert staleness_text(()) == ""
