"""Orders are permutations, mixes follow the weights, and both are functions of their arguments alone."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftstream.data.tasksets.open import mix, order
from tests.suite.each import each


@pytest.mark.law("derived")
@each("length", [1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 1000])
def test_every_pass_is_a_permutation(length: int) -> None:
    for taskset_pass in range(3):
        index_at = order(length, taskset_pass, seed=5)
        assert sorted(index_at(position) for position in range(length)) == list(range(length))


def test_passes_and_seeds_differ() -> None:
    orders = {tuple(order(100, p, s)(i) for i in range(100)) for p in range(5) for s in range(5)}
    assert len(orders) == 25
    assert tuple(range(100)) not in orders


@pytest.mark.law("derived", "order")
def test_the_order_is_settled() -> None:
    """A resumed run goes on in the order that it began with: these numbers never change."""
    assert [order(10, 0, 1)(i) for i in range(10)] == [4, 0, 3, 5, 8, 1, 2, 6, 7, 9]


def test_positions_are_spread_evenly() -> None:
    """Over many seeds every problem comes first about equally often."""
    first = Counter(order(10, 0, seed)(0) for seed in range(5000))
    assert set(first) == set(range(10))
    assert all(400 < count < 600 for count in first.values())


@pytest.mark.law("bounded")
def test_large_tasksets_cost_no_memory() -> None:
    index_at = order(10**15, 0, seed=1)
    assert len({index_at(position) for position in range(100)}) == 100


def test_mix_is_smooth() -> None:
    counts: dict[str, int] = {}
    names = []
    for _ in range(8):
        name = mix({"a": 3.0, "b": 1.0}, counts)
        counts[name] = counts.get(name, 0) + 1
        names.append(name)
    assert "".join(names) == "aabaaaba"


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 100.0), min_size=1))
def test_mix_follows_the_weights(weights: dict[str, float]) -> None:
    counts = dict.fromkeys(weights, 0)
    for number in range(1, 200):
        counts[mix(weights, counts)] += 1
        for name, weight in weights.items():
            share = number * weight / sum(weights.values())
            assert abs(counts[name] - share) < len(weights)


def test_mix_leaves_out_weight_0_and_the_used_up() -> None:
    assert mix({"a": 0.0, "b": 0.1}, {"b": 10**6}) == "b"
    assert mix({"b": 0.1}, {"a": 5, "b": 10**6}) == "b"
    assert mix({"a": 1.0, "b": 1.0}, {}) == "a"
