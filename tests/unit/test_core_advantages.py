from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftstream.core.advantages import compute_group_advantages, count_groups_without_signal

REWARDS = st.lists(st.integers(-50, 50).map(lambda n: n / 10), min_size=1, max_size=24)


def test_numbers_by_hand():
    # mean 0.5, squares 4 * 0.25 = 1, std with n - 1: sqrt(1 / 3)
    advantages_N = compute_group_advantages(np.array([1.0, 0, 0, 1]), np.zeros(4, int), eps=0.0)
    assert advantages_N == pytest.approx([0.8660254, -0.8660254, -0.8660254, 0.8660254])


def test_groups_are_apart_and_eps_is_added():
    rewards_N, groups_N = np.array([0.0, 10, 2, 30]), np.array([7, 3, 7, 3])
    advantages_N = compute_group_advantages(rewards_N, groups_N, eps=1.0)
    assert advantages_N == pytest.approx([
        -1 / (np.sqrt(2) + 1), -10 / (np.sqrt(200) + 1), 1 / (np.sqrt(2) + 1), 10 / (np.sqrt(200) + 1)
    ])  # fmt: skip


def test_equal_rewards_give_exactly_zero():
    rewards_N = np.full(7, 0.7, dtype=np.float32)
    assert (compute_group_advantages(rewards_N, np.zeros(7, int)) == 0).all()
    assert count_groups_without_signal(rewards_N, np.zeros(7, int)) == 1


def test_a_group_of_one_has_none():
    assert compute_group_advantages(np.array([3.0]), np.array([0])).tolist() == [0.0]


def test_nothing_gives_nothing():
    assert len(compute_group_advantages(np.zeros(0), np.zeros(0, int))) == 0


@given(REWARDS, st.integers(-9, 9))
def test_a_shift_of_the_rewards_changes_nothing(rewards, shift):
    rewards_N, groups_N = np.array(rewards), np.arange(len(rewards)) % 3
    shifted_N = compute_group_advantages(rewards_N + shift, groups_N)
    assert shifted_N == pytest.approx(compute_group_advantages(rewards_N, groups_N), abs=1e-6)


@given(REWARDS, st.randoms(use_true_random=False))
def test_order_of_rows_does_not_matter(rewards, random):
    order = list(range(len(rewards)))
    random.shuffle(order)
    rewards_N, groups_N = np.array(rewards), np.arange(len(rewards)) % 3
    whole_N = compute_group_advantages(rewards_N, groups_N)
    assert compute_group_advantages(rewards_N[order], groups_N[order]) == pytest.approx(whole_N[order])


@pytest.mark.parametrize(
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
