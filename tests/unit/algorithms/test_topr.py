import math

import pytest
import torch

from rftstream.algorithms.ratios import Topr
from rftstream.core.corrections import tapered_sequence_weights
from rftstream.core.losses import policy_gradient_losses
from rftstream.core.masks import reduce_loss
from tests.unit.algorithms.test_grpo import experience, segment
from tests.unit.core.test_losses import random_rows, rows


def policy_gradient_loss(policy_BT, advantages_BT, mask_BT, *, num_rows, weights_BT):
    losses_BT = policy_gradient_losses(policy_BT, advantages_BT, mask_BT) * weights_BT
    return reduce_loss(losses_BT, mask_BT, "sum", num_tokens=0.0, num_rows=num_rows)


def test_rows_carry_how_far_their_reward_is_from_the_baseline():
    batch = [experience("a", 1.0, segment([0, 1, 1]), segment([1, 1])), experience("a", 0.0), experience("b", None)]
    rows_N, metrics = Topr(Topr.Config(baseline=0.25)).prepare(batch)
    assert [float(row.advantages[0]) for row in rows_N] == [0.75, 0.75, -0.25]
    assert (metrics["num_groups"], metrics["num_rollouts"], metrics["reward"]) == (1, 2, 0.5)
    assert metrics["imitated_share"] == 0.5
    assert Topr(Topr.Config()).prepare([experience("b", None)]) == ((), {"num_groups": 0.0, "num_rollouts": 0.0})


def test_numbers_by_hand():
    """Two tokens each: what was good weighs 1 though hardly likely now; what was bad by its ratio, at most 1."""
    policy_BT = rows([-9.0, -8.0], [-2.0, -3.0], [-1.0, -1.0])
    behavior_BT = rows([-0.1, -0.1], [-1.0, -2.0], [-3.0, -4.0])
    advantages_BT = rows([0.5, 0.5], [-0.5, -0.5], [-0.5, -0.5])
    mask_BT = torch.ones(3, 2, dtype=torch.float64)
    weights_BT, metrics = tapered_sequence_weights(policy_BT, behavior_BT, advantages_BT, mask_BT, cap=1.0)
    taper = math.exp(-2)
    torch.testing.assert_close(weights_BT, rows([1.0, 1.0], [taper, taper], [1.0, 1.0]))
    assert float(metrics["taper_weight"]) == pytest.approx(2 * taper + 2)
    assert float(metrics["taper_truncated"]) == 2
    loss = policy_gradient_loss(policy_BT, advantages_BT, mask_BT, num_rows=3, weights_BT=weights_BT)
    assert float(loss) == pytest.approx((0.5 * 17 - 0.5 * taper * 5 - 0.5 * 2) / 3)


def test_the_gradient_is_that_of_the_formula():
    policy_BT, behavior_BT, advantages_BT, mask_BT = random_rows()
    policy_BT.requires_grad_()
    weights_BT, _ = tapered_sequence_weights(policy_BT, behavior_BT, advantages_BT, mask_BT, cap=1.0)
    assert not weights_BT.requires_grad

    def loss(logprobs_BT):
        return policy_gradient_loss(logprobs_BT, advantages_BT, mask_BT, num_rows=3, weights_BT=weights_BT)

    assert torch.autograd.gradcheck(loss, policy_BT)
    loss(policy_BT).backward()
    torch.testing.assert_close(policy_BT.grad, -advantages_BT * mask_BT * weights_BT / 3)
