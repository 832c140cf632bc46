"""When text repeats itself."""

from __future__ import annotations

import numpy as np
import pytest

from rftstream.core.repetition import repeats
from rftstream.errors import ContractError
from tests.suite.each import each


def tokens(*values: int) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


@each(
    ("given", "count", "max_period", "expected"),
    [
        (tokens(5, 5, 5, 5), 4, 1, True),
        (tokens(5, 5, 5), 4, 1, False),
        (tokens(1, 2, 1, 2, 1, 2), 6, 2, True),
        (tokens(1, 2, 1, 2, 1, 2), 6, 1, False),
        (tokens(9, 8, 7, 1, 2, 3, 1, 2, 3), 6, 3, True),
        (tokens(9, 8, 7, 1, 2, 3, 1, 2, 3), 7, 3, False),
        (tokens(1, 2, 3, 1, 2, 3, 1), 7, 3, True),
        (tokens(1, 2, 3, 1, 2, 4, 1), 7, 3, False),
        (tokens(1, 1, 2, 1, 1, 2, 1, 1, 2), 9, 4, True),
        (tokens(), 2, 1, False),
    ],
)
def test_by_hand(given: np.ndarray, count: int, max_period: int, expected: bool) -> None:
    assert repeats(given, count, max_period) is expected


def test_against_the_definition() -> None:
    random = np.random.default_rng(0)
    found = 0
    for _ in range(2000):
        pattern = random.integers(0, 2, random.integers(1, 5))
        given = np.concatenate([random.integers(0, 2, random.integers(0, 6)), np.tile(pattern, 4)])
        if random.random() < 0.5:
            given[random.integers(len(given))] ^= 1
        count, most = int(random.integers(2, 13)), int(random.integers(1, 6))
        tail = given[-count:].tolist()
        expected = len(tail) == count and any(
            all(tail[i] == tail[i - p] for i in range(p, count)) for p in range(1, min(most, count - 1) + 1)
        )
        assert repeats(given, count, most) is expected
        found += expected
    assert 300 < found < 1700


def test_what_it_takes() -> None:
    with pytest.raises(ContractError, match="expected integers"):
        repeats(np.zeros((2, 2), np.int32), 2, 1)
    with pytest.raises(ContractError, match="expected integers"):
        repeats(np.zeros(4, np.float32), 2, 1)
