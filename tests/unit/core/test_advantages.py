import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftstream.core.advantages import (
    compute_group_advantages,
    compute_leave_one_out_advantages,
    compute_likelihood_advantages,
    compute_overlong_penalties,
    compute_soft_baseline_advantages,
    sum_of_later,
    whiten,
)
from tests.suite.each import each

REWARDS = st.lists(st.integers(-50, 50).map(lambda n: n / 10), min_size=1, max_size=24)


def test_groups_are_apart_and_eps_is_added():
    rewards_N, groups_N = np.array([0.0, 10, 2, 30]), np.array([7, 3, 7, 3])
    advantages_N = compute_group_advantages(rewards_N, groups_N, eps=1.0)
    assert advantages_N == pytest.approx([
        -1 / (np.sqrt(2) + 1), -10 / (np.sqrt(200) + 1), 1 / (np.sqrt(2) + 1), 10 / (np.sqrt(200) + 1)
    ])  # fmt: skip


def test_a_group_of_one_has_none():
    assert compute_group_advantages(np.array([3.0]), np.array([0])).tolist() == [0.0]


@given(REWARDS, st.randoms(use_true_random=False))
def test_order_of_rows_does_not_matter(rewards, random):
    order = list(range(len(rewards)))
    random.shuffle(order)
    rewards_N, groups_N = np.array(rewards), np.arange(len(rewards)) % 3
    whole_N = compute_group_advantages(rewards_N, groups_N)
    assert compute_group_advantages(rewards_N[order], groups_N[order]) == pytest.approx(whole_N[order])


@each(
    ("rewards_N", "groups_N", "error"),
    [
        (np.zeros((2, 2)), np.zeros((2, 2), int), ValueError),
        (np.zeros(2), np.zeros(3, int), ValueError),
        (np.zeros(2, int), np.zeros(2, int), TypeError),
        (np.zeros(2), np.zeros(2), TypeError),
        (np.array([0.0, np.nan]), np.zeros(2, int), ValueError),
    ],
)
def test_what_is_no_reward_is_refused(rewards_N, groups_N, error):
    with pytest.raises(error, match="advantages"):
        compute_group_advantages(rewards_N, groups_N)


@given(REWARDS)
def test_the_baseline_is_the_mean_of_the_others(rewards):
    rewards_N, groups_N = np.asarray(rewards), np.arange(len(rewards)) % 3
    found_N = compute_leave_one_out_advantages(rewards_N, groups_N)
    for number, reward in enumerate(rewards):
        others = [other for at, other in enumerate(rewards) if at != number and at % 3 == number % 3]
        assert found_N[number] == pytest.approx(reward - np.mean(others) if others else 0.0, abs=1e-9)


def test_rare_successes_weigh_most():
    rewards_N, groups_N = np.asarray([1.0, 0, 0, 0, 1, 1, 1, 0, 0, 0]), np.asarray([0] * 4 + [1] * 4 + [2] * 2)
    expected = [3.0, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1, 0, 0]
    assert compute_likelihood_advantages(rewards_N, groups_N) == pytest.approx(expected)
    with pytest.raises(ValueError, match=r"got a reward of -0\.5, expected none below 0"):
        compute_likelihood_advantages(np.asarray([1.0, -0.5]), np.zeros(2, int))


def test_the_soft_baseline_at_its_ends():
    rewards_N, groups_N = np.asarray([0.0, 1.0, 5.0]), np.zeros(3, int)
    assert compute_soft_baseline_advantages(rewards_N, groups_N, tau=1e-3) == pytest.approx([-5, -4, 0], abs=1e-2)
    assert compute_soft_baseline_advantages(rewards_N, groups_N, tau=1e4) == pytest.approx([-2, -1, 3], abs=1e-2)


def test_whitened_values():
    assert whiten(np.asarray([1.0, 2.0, 3.0])) == pytest.approx([-1.0, 0.0, 1.0])
    assert whiten(np.asarray([2.0])).tolist() == [0.0] and whiten(np.full(3, 0.7)).tolist() == [0.0] * 3
    assert len(whiten(np.zeros(0))) == 0


def test_overlong_penalties():
    """Of 100 tokens the last 20 are penalised."""
    lengths_N = np.asarray([0, 80, 85, 90, 100, 120])
    found_N = compute_overlong_penalties(lengths_N, np.full(6, 100), share=0.2)
    assert found_N == pytest.approx([0, 0, -0.25, -0.5, -1, -1])
    with pytest.raises(ValueError, match="share of 0"):
        compute_overlong_penalties(lengths_N, lengths_N, share=0)


def test_sum_of_later():
    assert sum_of_later(np.asarray([1.0, 2.0, 4.0], np.float32)).tolist() == [7.0, 6.0, 4.0]
