import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rftstream.core.corrections import (
    effective_sample_size,
    importance_weights,
    interpolate_logprobs,
    mismatch_sums,
    second_moment_mask,
    sequence_mask,
)
from tests.suite.each import each


def rows(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_weights_by_hand():
    old_BT = rows([math.log(0.5), math.log(0.6), math.log(0.1), math.nan])
    behavior_BT = rows([math.log(0.5), math.log(0.2), math.log(0.2), 0.0])
    mask_BT = rows([1, 1, 1, 0])
    weights_BT, metrics = importance_weights(old_BT, behavior_BT, mask_BT, outside="clamp", low=0.0, high=2.0)
    assert weights_BT[0].tolist() == pytest.approx([1.0, 2.0, 0.5, 0.0])
    assert float(metrics["importance_clamped"]) == 1
    assert float(metrics["importance_weight"]) == pytest.approx(3.5)


def test_weights_have_no_gradient():
    old_BT = rows([-1.0, -2.0]).requires_grad_()
    weights_BT, _ = importance_weights(old_BT, rows([-1.5, -1.5]), rows([1, 1]), outside="clamp", low=0.0, high=2.0)
    assert not weights_BT.requires_grad


def test_mismatch_by_hand():
    sums = mismatch_sums(rows([math.log(2.0), 0.0, math.nan]), rows([0.0, 0.0, 1e6]), rows([1, 1, 0]))
    assert float(sums["mismatch_k3"]) == pytest.approx(2 - math.log(2) - 1)
    assert float(sums["rho"]) == pytest.approx(3.0)
    assert float(sums["rho_square"]) == pytest.approx(5.0)
    assert effective_sample_size(3 / 2, 5 / 2) == pytest.approx(9 / (2 * 5))
    assert effective_sample_size(0.0, 0.0) == 0.0


def test_far_apart_policies_stay_finite():
    sums = mismatch_sums(rows([0.0, -1000.0]), rows([-1000.0, 0.0]), rows([1, 1]))
    assert all(math.isfinite(value) for value in sums.values())
    assert float(sums["rho"]) == pytest.approx(math.exp(20))


def log_rows(*values):
    """Probabilities as logprobs."""
    return rows(*values).log()


HALF, FULL = log_rows([0.2, 0.4, 0.9], [0.1, 0.3, 1.0]), rows([1, 1, 0], [1, 1, 0])
"""Of the policy before the batch, and the mask; who sampled has 0.4, 0.2 and 0.05, 0.1: ratios 0.5, 2 and 2, 3."""
SAMPLED = log_rows([0.4, 0.2, 0.1], [0.05, 0.1, 0.1])


@each(
    ("level", "outside", "low", "high", "expected"),
    [
        ("token", "clamp", 0.8, 2.5, [[0.8, 2.0, 0.0], [2.0, 2.5, 0.0]]),
        ("token", "drop", 0.8, 2.5, [[0.0, 2.0, 0.0], [2.0, 0.0, 0.0]]),
        ("sequence", "clamp", 0.0, 5.0, [[1.0, 1.0, 0.0], [5.0, 5.0, 0.0]]),
        ("sequence", "drop", 0.0, 5.0, [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]),
        ("geometric", "drop", 0.5, 2.5, [[1.0, 1.0, 0.0], [6**0.5, 6**0.5, 0.0]]),
        ("geometric", "clamp", 1.5, 2.0, [[1.5, 1.5, 0.0], [2.0, 2.0, 0.0]]),
    ],
)
def test_bounds_and_levels_by_hand(level, outside, low, high, expected):
    weights_BT, metrics = importance_weights(HALF, SAMPLED, FULL, outside=outside, low=low, high=high, level=level)
    torch.testing.assert_close(weights_BT, rows(*expected))
    assert float(metrics["importance_weight"]) == pytest.approx(sum(map(sum, expected)))
    name = {"clamp": "importance_clamped", "drop": "importance_dropped"}[outside]
    free_BT, _ = importance_weights(HALF, SAMPLED, FULL, outside="clamp", low=0.0, high=1e9, level=level)
    assert float(metrics[name]) == float(((weights_BT - free_BT).abs() > 1e-9).sum())


def test_ratios_of_long_rows_are_cut_off_after_the_sum():
    old_BT, mask_BT = rows([9.0] * 10), rows([1.0] * 10)
    settings = {"outside": "clamp", "low": 0.0, "high": 1e30}
    sums = {level: importance_weights(old_BT, 0 * old_BT, mask_BT, level=level, **settings)[0][0, 0].log()
            for level in ("token", "sequence", "geometric")}  # fmt: skip
    assert {level: float(value) for level, value in sums.items()} == pytest.approx(
        {"token": 9.0, "sequence": 20.0, "geometric": 9.0}
    )


@pytest.mark.parametrize("odd", [{"level": "group"}, {"outside": "shrink"}])
def test_odd_settings_are_named(odd):
    with pytest.raises(ValueError, match=next(iter(odd.values()))):
        importance_weights(HALF, SAMPLED, FULL, **{"outside": "drop", "low": 0.0, "high": 1.0, **odd})


def test_bad_rows_that_were_left_behind_are_dropped():
    """Mean gaps to who sampled: 0.1, 0.1 and -0.1; only the second is bad and left behind."""
    behavior_BT = rows([-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0])
    policy_BT = rows([-1.2, -1.0], [-1.2, -1.0], [-0.8, -1.0])
    advantages_BT = rows([1.0, 1.0], [-1.0, -1.0], [-1.0, -1.0])
    kept_BT, metrics = sequence_mask(policy_BT, behavior_BT, advantages_BT, torch.ones_like(policy_BT), threshold=0.05)
    assert kept_BT.tolist() == [[1, 1], [0, 0], [1, 1]]
    assert float(metrics["sequences_dropped"]) == 2
    kept_BT, _ = sequence_mask(policy_BT, behavior_BT, advantages_BT, torch.ones_like(policy_BT), threshold=0.15)
    assert kept_BT.all()


def test_second_moment_by_hand():
    """Squares 0.01, 0.04, 0.09, 1: means of the smallest 0.01, 0.025, 0.0467, 0.285."""
    log_ratios_N = np.asarray([0.3, -0.1, 1.0, 0.2])
    for threshold, kept in ((0.3, [1, 1, 1, 1]), (0.05, [1, 1, 0, 1]), (0.03, [0, 1, 0, 1]), (0.001, [0, 0, 0, 0])):
        assert second_moment_mask(log_ratios_N, threshold).tolist() == [bool(one) for one in kept]
    assert second_moment_mask(np.zeros(0), 0.1).tolist() == []
    assert second_moment_mask(np.asarray([1.0, -1.0]), 0.5).tolist() == [False, False], "of one size: both go"


@given(st.lists(st.floats(-3, 3), max_size=30), st.floats(1e-3, 2.0))
def test_second_moment_is_bounded_and_no_more_is_dropped(values, threshold):
    values = np.asarray(values, dtype=np.float64)
    kept = second_moment_mask(values, threshold)
    square = values**2
    assert not kept.any() or square[kept].mean() <= threshold * (1 + 1e-9)
    if not kept.all():
        next_one = square[~kept].min()
        assert (square[kept].sum() + next_one * (square == next_one).sum()) > threshold * (
            kept.sum() + (square == next_one).sum()
        ) * (1 - 1e-9), "no more is dropped than has to be"


def test_interpolated_logprobs():
    share_BT = rows([0.0, 0.5, math.nan], [1.0, 0.25, 7.0])
    found_BT = interpolate_logprobs(HALF.clone().requires_grad_(), SAMPLED, share_BT, FULL)
    expected = [[0.4, (0.2 * 0.4) ** 0.5, 1.0], [0.1, 0.1**0.75 * 0.3**0.25, 1.0]]
    torch.testing.assert_close(found_BT.exp(), rows(*expected))
    assert not found_BT.requires_grad
