"""Advantages of steps: DeepSeekMath's formula by hand."""

import math

import numpy as np
import pytest

from rftstream.core.advantages import compute_step_advantages
from tests.suite.each import each


def steps(*pairs, length):
    """Rewards and ends of a rollout whose steps end at the given places."""
    rewards_T, ends_T = np.full(length, np.nan), np.zeros(length, bool)  # nothing else is read
    for place, reward in pairs:
        rewards_T[place], ends_T[place] = reward, True
    return rewards_T, ends_T


def advantages(*rollouts, groups=None, eps=0.0):
    rewards_N, ends_N = zip(*rollouts, strict=True)
    groups_N = np.zeros(len(rollouts), np.int64) if groups is None else np.asarray(groups)
    return [one.tolist() for one in compute_step_advantages(rewards_N, ends_N, groups_N, eps=eps)]


def test_by_hand():
    """Steps 1, 3 of one rollout and 2, 6 of its sibling: mean 3, variance (4 + 0 + 1 + 9) / 3."""
    std = math.sqrt(14 / 3)
    one, other = advantages(steps((1, 1.0), (3, 3.0), length=5), steps((0, 2.0), (2, 6.0), length=3))
    assert one == pytest.approx([-2 / std, -2 / std, 0, 0, 0])
    assert other == pytest.approx([2 / std, 3 / std, 3 / std])


def test_groups_are_their_own():
    found = advantages(
        steps((0, 1.0), length=1), steps((0, 3.0), length=1), steps((0, 10.0), length=1), steps((0, 30.0), length=1),
        groups=[7, 7, 2, 2],
    )  # fmt: skip
    low, high = -1 / math.sqrt(2), 1 / math.sqrt(2)
    assert found == [pytest.approx([one]) for one in (low, high, low, high)]


def test_a_group_with_equal_steps_says_nothing():
    assert advantages(steps((0, 0.7), (2, 0.7), length=3), steps((1, 0.7), length=2), eps=1e-6) == [[0, 0, 0], [0, 0]]


def test_one_step_a_rollout_is_grpo():
    from rftstream.core.advantages import compute_group_advantages

    rewards_N = np.asarray([0.0, 1.0, 1.0, 0.25])
    found = advantages(*(steps((3, reward), length=4) for reward in rewards_N), eps=1e-6)
    wanted_N = compute_group_advantages(rewards_N, np.zeros(4, np.int64))
    assert found == [pytest.approx([one] * 4) for one in wanted_N.tolist()]


def test_rollouts_without_steps_have_none():
    assert advantages(steps(length=3), steps(length=1)) == [[0, 0, 0], [0]]
    assert advantages(steps(length=3), steps((0, 1.0), length=1)) == [[0, 0, 0], [0]]


@each(("rewards", "ends", "groups", "says"), [
    ([np.zeros(2)], [], [0], "got 1 rewards, 0 ends and 1 groups"),
    ([np.zeros(2)], [np.zeros(3, bool)], [0], r"rewards \(2,\) and ends bool \(3,\)"),
    ([np.zeros(2)], [np.zeros(2)], [0], r"ends float64 \(2,\)"),
    ([np.asarray([np.nan])], [np.ones(1, bool)], [0], "not finite"),
])  # fmt: skip
def test_what_is_no_batch_of_steps(rewards, ends, groups, says):
    with pytest.raises(ValueError, match=says):
        compute_step_advantages(rewards, ends, np.asarray(groups))
