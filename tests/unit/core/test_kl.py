from __future__ import annotations

import math

import pytest
import torch

from rftstream.core.kl import estimate_kl
from tests.suite.each import each
from tests.unit.core.test_losses import random_rows


def one(policy: float, reference: float, estimator: str) -> float:
    tensors = [torch.tensor([[value]], dtype=torch.float64) for value in (policy, reference, 1.0)]
    return float(estimate_kl(*tensors, estimator=estimator))


@pytest.mark.parametrize(
    ("policy", "reference", "k1", "k2", "k3"),
    [
        (0.5, 0.5, 0.0, 0.0, 0.0),
        (0.5, 0.25, math.log(2), math.log(2) ** 2 / 2, 0.5 + math.log(2) - 1),  # d = -log 2
        (0.2, 0.8, -math.log(4), math.log(4) ** 2 / 2, 4 - math.log(4) - 1),
    ],
)
def test_numbers_by_hand(policy, reference, k1, k2, k3):
    for estimator, expected in (("k1", k1), ("k2", k2), ("k3", k3)):
        assert one(math.log(policy), math.log(reference), estimator) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradient_is_that_of_the_formula(estimator):
    policy_BT, reference_BT, _, mask_BT = random_rows()
    assert torch.autograd.gradcheck(
        lambda logprobs_BT: estimate_kl(logprobs_BT, reference_BT, mask_BT, estimator=estimator).sum(),
        policy_BT.requires_grad_(), eps=1e-7,
    )  # fmt: skip


@each("garbage", [float("nan"), float("inf"), 1e6])
@each("estimator", ["k1", "k2", "k3"])
def test_masked_positions_reach_neither_value_nor_gradient(estimator, garbage):
    policy_BT, reference_BT, _, mask_BT = random_rows()
    dirty_BT = torch.where(mask_BT > 0, policy_BT, garbage).requires_grad_()
    values_BT = estimate_kl(dirty_BT, torch.where(mask_BT > 0, reference_BT, garbage), mask_BT, estimator=estimator)
    values_BT.sum().backward()
    torch.testing.assert_close(values_BT, estimate_kl(policy_BT, reference_BT, mask_BT, estimator=estimator))
    assert dirty_BT.grad[mask_BT == 0].eq(0).all()


def test_far_apart_is_cut_off_without_gradient():
    policy_BT = torch.tensor([[-100.0]], requires_grad=True)
    value = estimate_kl(policy_BT, torch.zeros(1, 1), torch.ones(1, 1), estimator="k3")
    value.sum().backward()
    assert math.isfinite(float(value.detach())) and policy_BT.grad.item() == 0


def test_another_estimator_is_refused():
    with pytest.raises(ValueError, match="expected 'k1', 'k2' or 'k3'"):
        one(0.0, 0.0, "k4")


def test_times_the_ratio_the_gradient_is_the_divergences_on_samples_of_another():
    """For k1 and k3; that of plain k3 is KL(reference || policy)'s."""
    logits = torch.tensor([[0.3, -0.2, 0.9]], dtype=torch.float64, requires_grad=True)
    reference, old = (torch.tensor([row], dtype=torch.float64) for row in ([0.2, 0.2, 0.6], [0.5, 0.3, 0.2]))
    logprobs, ones = logits.log_softmax(-1), torch.ones(1, 3, dtype=torch.float64)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference.log())).sum(), logits, retain_graph=True)
    for estimator in ("k1", "k3"):
        values = estimate_kl(logprobs, reference.log(), ones, estimator=estimator, old_logprobs_BT=old.log())
        (found,) = torch.autograd.grad((old * values).sum(), logits, retain_graph=True)
        torch.testing.assert_close(found, exact)
    (other,) = torch.autograd.grad((reference * (reference.log() - logprobs)).sum(), logits, retain_graph=True)
    values = estimate_kl(logprobs, reference.log(), ones, estimator="k3")
    (found,) = torch.autograd.grad((logprobs.exp().detach() * values).sum(), logits)
    torch.testing.assert_close(found, other)
