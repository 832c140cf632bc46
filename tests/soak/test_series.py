"""A soak fails for what grows, and not for what only moves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from tests.soak.series import Limit, Series, draw, table
from tests.suite.each import each

LIMITS = {"MiB": Limit(10.0)}
NOISE = Random(0)


def soaked(value_at: Callable[[float], float], name: str = "one") -> Series:
    """A sample every 10 s for an hour."""
    series = Series(100.0)
    for second in range(0, 3600, 10):
        series.add(100.0 + second, {name: value_at(second / 3600) + NOISE.uniform(-1, 1)}, "MiB")
    return series


@each(
    ("value_at", "grows"),
    [
        (lambda hours: 50.0, False),
        (lambda hours: 50.0 + 8.0 * hours, False),
        (lambda hours: 50.0 + 40.0 * hours, True),
        (lambda hours: 50.0 - 40.0 * hours, False),
        (lambda hours: 50.0 + 200.0 * min(hours, 0.2), False),
        (lambda hours: 50.0 + (20.0 if 0.5 < hours < 0.6 else 0.0), False),
    ],
    ids=["flat", "below the limit", "leak", "shrinks", "warm-up", "peak"],
)
def test_what_grows(value_at: Callable[[float], float], grows: bool) -> None:
    (line,) = soaked(value_at).lines(LIMITS)
    assert line.grows is grows
    assert ("GROWS" in table([line])) is grows


def test_a_slope_is_that_of_an_hour() -> None:
    (line,) = soaked(lambda hours: 50.0 + 40.0 * hours).lines({})
    assert line.per_hour == pytest.approx(40.0, abs=2.0)
    assert not line.grows, "without a limit nothing is judged"


@pytest.mark.slow
def test_what_was_there_for_a_moment_is_not_judged(tmp_path: Path) -> None:
    series = soaked(lambda hours: 50.0)
    for second in range(3000, 3200, 10):
        series.add(100.0 + second, {"started again": float(second)}, "MiB")
    assert [line.name for line in series.lines(LIMITS)] == ["one"]
    draw(series, tmp_path / "soak.png", "an hour")
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")
