import math

import pytest
import torch

from rftstream.core.losses import clipped_surrogate_losses, value_losses
from rftstream.core.masks import apply_mask, reduce_loss
from tests.suite.each import each

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def rows(*values):
    return torch.tensor(values, dtype=torch.float64)


def whole(mask_BT):
    return {"num_tokens": float(mask_BT.sum()), "num_rows": float((mask_BT.sum(1) > 0).sum())}


def random_rows(shape=(3, 5), seed=0):
    generator = torch.Generator().manual_seed(seed)
    normal = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)]
    mask_BT = (torch.rand(shape, generator=generator) < 0.7).double()
    return normal[0] - 2, normal[0] - 2 + 0.3 * normal[1], normal[2], mask_BT


def clip_loss(
    policy_BT, old_BT, advantages_BT, mask_BT, *, num_tokens, num_rows, normalise="token", weights_BT=None, **settings
):  # fmt: skip
    losses_BT, metrics = clipped_surrogate_losses(policy_BT, old_BT, advantages_BT, mask_BT, **settings)
    if weights_BT is not None:
        losses_BT = losses_BT * apply_mask(weights_BT, mask_BT)
    return reduce_loss(losses_BT, mask_BT, normalise, num_tokens=num_tokens, num_rows=num_rows), metrics


@each(
    ("ratio", "advantage", "expected", "cut"),
    [
        (1.0, 2.0, -2.0, 0), (1.2, 1.0, -1.2, 0), (1.5, 1.0, -1.28, 1), (0.5, 1.0, -0.5, 0),
        (0.5, -1.0, 0.8, 1), (1.5, -1.0, 1.5, 0), (0.9, -2.0, 1.8, 0), (3.0, 0.0, 0.0, 0),
    ],
)  # fmt: skip
def test_numbers_by_hand(ratio, advantage, expected, cut):
    policy_BT, mask_BT = rows([math.log(ratio) - 1.0]), rows([1.0])
    loss, metrics = clip_loss(policy_BT, rows([-1.0]), rows([advantage]), mask_BT, **CLIP, **whole(mask_BT))
    assert float(loss.detach()) == pytest.approx(expected)
    assert float(metrics["clip_fraction"]) == cut


def test_dual_clip_bounds_negative_advantages():
    mask_BT = rows([1.0, 1.0])
    policy_BT = rows([math.log(5.0), math.log(2.0)])
    loss, metrics = clip_loss(
        policy_BT, rows([0.0, 0.0]), rows([-1.0, -1.0]), mask_BT, **CLIP, **whole(mask_BT), dual_clip=3.0
    )
    assert float(loss.detach()) == pytest.approx((3.0 + 2.0) / 2)
    assert float(metrics["clip_fraction"]) == 1


def test_means_over_tokens_and_over_rows():
    losses_BT, mask_BT = rows([1.0, 2.0, 0.0], [6.0, 0.0, 0.0], [0.0, 0.0, 0.0]), rows([1, 1, 0], [1, 0, 0], [0, 0, 0])
    assert float(reduce_loss(losses_BT, mask_BT, "token", num_tokens=3, num_rows=2)) == pytest.approx(3.0)
    assert float(reduce_loss(losses_BT, mask_BT, "sequence", num_tokens=3, num_rows=2)) == pytest.approx(
        (1.5 + 6.0) / 2
    )
    assert float(reduce_loss(losses_BT, mask_BT, "sum", num_tokens=3, num_rows=2)) == pytest.approx(9.0 / 2)
    with pytest.raises(ValueError, match="normalise"):
        reduce_loss(losses_BT, mask_BT, "batch", num_tokens=3, num_rows=2)


@each("normalise", ["token", "sequence"])
@each("dual_clip", [None, 1.5])
def test_gradient_is_that_of_the_formula(normalise, dual_clip):
    policy_BT, old_BT, advantages_BT, mask_BT = random_rows()
    weights_BT = torch.rand(mask_BT.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def loss(logprobs_BT):
        return clip_loss(
            logprobs_BT, old_BT, advantages_BT, mask_BT, **CLIP, **whole(mask_BT), normalise=normalise,
            dual_clip=dual_clip, weights_BT=weights_BT,
        )[0]  # fmt: skip

    assert torch.autograd.gradcheck(loss, policy_BT.requires_grad_(), eps=1e-7)


def test_log_ratios_are_cut_off_without_gradient():
    policy_BT, mask_BT = rows([25.0, 19.0]).requires_grad_(), rows([1.0, 1.0])
    loss, _ = clip_loss(policy_BT, rows([0.0, 0.0]), rows([-1.0, -1.0]), mask_BT, **CLIP, **whole(mask_BT))
    loss.backward()
    assert float(loss.detach()) == pytest.approx((math.exp(20) + math.exp(19)) / 2)
    assert policy_BT.grad[0, 0] == 0
    assert policy_BT.grad[0, 1] > 0


def test_odd_arrays_are_named():
    good_BT = rows([0.0, 0.0])
    with pytest.raises(ValueError, match=r"denominator_logprobs has shape \(2,\), expected \[B, T\]"):
        clipped_surrogate_losses(good_BT, good_BT[0], good_BT, good_BT, **CLIP)
    with pytest.raises(ValueError, match=r"advantages has shape \(1, 1\)"):
        clipped_surrogate_losses(good_BT, good_BT, good_BT[:, :1], good_BT, **CLIP)
    with pytest.raises(TypeError, match=r"loss_mask is torch\.int64"):
        clipped_surrogate_losses(good_BT, good_BT, good_BT, good_BT.long(), **CLIP)


# --------------------------------------------------------------------------------------------- values


@each(
    ("value", "old", "target", "expected", "cut"),
    [
        (1.0, 1.0, 3.0, 2.0, 0),  # (1 - 3)^2 / 2
        (1.1, 1.0, 3.0, 1.805, 0),
        (2.0, 1.0, 3.0, 1.62, 1),  # counted as 1.2, where it was allowed to go: (1.2 - 3)^2 / 2, no gradient
        (0.0, 1.0, 3.0, 4.5, 0),  # went the wrong way: its own error is the larger
        (4.0, 1.0, 1.1, 4.205, 0),
        (0.5, 1.0, 0.0, 0.32, 1),
    ],
)  # fmt: skip
def test_value_losses_by_hand(value, old, target, expected, cut):
    values_BT = rows([value]).requires_grad_()
    losses_BT, metrics = value_losses(values_BT, rows([old]), rows([target]), rows([1.0]), clip=0.2)
    losses_BT.sum().backward()
    assert float(losses_BT.detach()) == pytest.approx(expected)
    assert float(metrics["value_clip_share"]) == cut
    assert float(values_BT.grad) == pytest.approx(0.0 if cut else value - target)
    plain_BT, metrics = value_losses(values_BT.detach(), rows([old]), rows([target]), rows([1.0]), clip=None)
    assert float(plain_BT) == pytest.approx((value - target) ** 2 / 2)
    assert float(metrics["value_clip_share"]) == 0


@each("clip", [None, 0.2])
@each("fill", [math.nan, 1e6])
def test_masked_values_do_not_leak(clip, fill):
    values_BT, old_BT, returns_BT, mask_BT = random_rows()
    found = []
    for odd in (0.0, fill):
        some = [torch.where(mask_BT > 0, one, odd) for one in (values_BT, old_BT, returns_BT)]
        leaf_BT = some[0].requires_grad_()
        losses_BT, metrics = value_losses(leaf_BT, some[1], some[2], mask_BT, clip=clip)
        losses_BT.sum().backward()
        assert not losses_BT[mask_BT == 0].any()
        found.append((losses_BT.detach(), leaf_BT.grad, metrics))
    torch.testing.assert_close(found[0], found[1])
