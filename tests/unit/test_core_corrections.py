from __future__ import annotations

import math

import pytest
import torch

from rftstream.core.corrections import effective_sample_size, importance_weights, mismatch_sums


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
