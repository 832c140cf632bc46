import itertools
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rftstream.core.samples import best_at_k, pass_at_k, sample_std, summarise_samples, worst_at_k

REWARDS = st.lists(st.floats(-100, 100), min_size=1, max_size=8)


def test_numbers_by_hand():
    values = [0.2, 1.0, 0.5]  # pairs: (0.2, 1) (0.2, 0.5) (1, 0.5)
    assert best_at_k(values, 2) == pytest.approx((1.0 + 0.5 + 1.0) / 3)
    assert worst_at_k(values, 2) == pytest.approx((0.2 + 0.2 + 0.5) / 3)
    assert pass_at_k(4, 1, 2) == pytest.approx(0.5)
    assert sample_std([1.0, 2.0, 6.0]) == pytest.approx(7**0.5)


def test_an_evaluation_by_hand():
    values = summarise_samples([[1.0, 0.0, 0.5, 0.5], [1.0, 1.0], []], (1, 2, 4), pass_reward=1.0)
    assert values == pytest.approx({
        "mean": 4 / 6,
        "std": ((0.5 / 3) ** 0.5 + 0) / 2,
        "pass@1": (1 / 4 + 1) / 2,
        "pass@2": (1 / 2 + 1) / 2,
        "best@2": ((3 * 1.0 + 3 * 0.5) / 6 + 1) / 2,
        "worst@2": ((3 * 0.0 + 3 * 0.5) / 6 + 1) / 2,
        "pass@4": 1.0, "best@4": 1.0, "worst@4": 0.0,
    })  # fmt: skip
    assert summarise_samples([[], []], (1,), pass_reward=1.0) == {}
    assert summarise_samples([[0.5]], (1, 2), pass_reward=1.0) == {"mean": 0.5, "pass@1": 0.0}


@settings(deadline=None)
@given(REWARDS, st.data())
def test_they_are_means_over_all_subsets(values, data):
    k = data.draw(st.integers(1, len(values)))
    subsets = list(itertools.combinations(values, k))
    assert best_at_k(values, k) == pytest.approx(sum(map(max, subsets)) / len(subsets), abs=1e-9)
    assert worst_at_k(values, k) == pytest.approx(sum(map(min, subsets)) / len(subsets), abs=1e-9)


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=60), st.data())
def test_of_right_and_wrong_the_best_is_pass_at_k(values, data):
    k = data.draw(st.integers(1, len(values)))
    assert best_at_k([float(one) for one in values], k) == pytest.approx(pass_at_k(len(values), sum(values), k))


@settings(deadline=None)
@given(st.lists(st.floats(-100, 100), min_size=2, max_size=8))
def test_the_standard_deviation(values):
    assert sample_std(values) == pytest.approx(statistics.stdev(values), abs=1e-9)


@pytest.mark.parametrize("k", [0, 4])
def test_more_than_there_are_is_refused(k):
    for function in (best_at_k, worst_at_k):
        with pytest.raises(ValueError, match="of 3 samples"):
            function([1.0, 2.0, 3.0], k)
    with pytest.raises(ValueError, match="passed out of 3"):
        pass_at_k(3, 1, k)
