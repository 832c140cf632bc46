"""Where arithmetic ends: clamps, large ratios, half precision, rounding that looks like a signal, and settings and
masks that make no sense."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rftstream.algorithms.base import Denominators
from rftstream.algorithms.clips import ReinforcePlusPlus
from rftstream.algorithms.dpo import Dpo
from rftstream.algorithms.opd import Opd
from rftstream.contracts.arrays import Array
from rftstream.contracts.batches import LossKind
from rftstream.core import advantages, corrections, imitation, kl, losses, masks, values
from rftstream.core.logprobs import token_logprobs
from rftstream.core.ratios import exact_log_ratios, log_ratios
from tests.suite.each import each
from tests.unit.algorithms.test_algorithms import build
from tests.unit.algorithms.test_grpo import experience, segment
from tests.unit.algorithms.test_imitation import experience as shown
from tests.unit.algorithms.test_imitation import micro_batch
from tests.unit.algorithms.test_imitation import segment as tokens


def rows(*lines, dtype=torch.float64):
    return torch.tensor(lines, dtype=dtype)


def gradient(losses_BT, leaf_BT):
    (found,) = torch.autograd.grad(losses_BT.sum(), leaf_BT)
    return found


# --------------------------------------------------------------------------------------------- clamps


def test_a_row_that_is_far_off_is_pulled_back_by_kimis_square():
    """1,000 tokens, each 0.03 off: x = 30, A = 0.5, tau = 0.1; the gradient at each token of the row's loss is
    tau x - A = 2.5."""
    policy_BT, mask_BT = torch.full((1, 1000), -0.97, dtype=torch.float64), torch.ones(1, 1000, dtype=torch.float64)
    policy_BT.requires_grad_()
    found_BT, metrics = losses.squared_regression_losses(
        policy_BT, torch.full_like(mask_BT, -1.0), 0.5 * mask_BT, mask_BT, tau=0.1
    )
    loss = masks.reduce_loss(found_BT, mask_BT, "sequence", num_tokens=1000, num_rows=1)
    assert float(loss.detach()) == pytest.approx((0.5 - 3.0) ** 2 / 0.2)
    torch.testing.assert_close(gradient(loss, policy_BT), torch.full_like(mask_BT, 2.5))
    assert float(metrics["regression_log_ratio"]) == pytest.approx(30 * 1000)


@each(
    ("gap", "estimator", "value", "slope"),
    [
        (30.0, "k1", 30.0, 1.0), (-30.0, "k1", -30.0, 1.0), (30.0, "k2", 450.0, 30.0), (-30.0, "k2", 450.0, -30.0),
        (30.0, "k3", 29.0, 1.0), (-30.0, "k3", math.exp(20) - 21, 0.0),
        (-19.0, "k3", math.exp(19) - 20, 1 - math.exp(19)),
    ],
)  # fmt: skip
def test_of_a_divergence_only_what_is_exponentiated_is_clamped(gap, estimator, value, slope):
    """`gap`: how much likelier the token is to the policy, in logprobs; -d."""
    policy_BT = rows([gap - 40.0]).requires_grad_()
    args = (policy_BT, rows([-40.0]), rows([1.0]))
    found_BT = kl.estimate_kl(*args, estimator=estimator)
    assert float(found_BT.detach()) == pytest.approx(value)
    assert float(gradient(found_BT, policy_BT)) == pytest.approx(slope, abs=1e-9)
    assert float(kl.count_clamped_kl(*args, estimator=estimator)) == (slope == 0.0)


def test_the_square_of_dppo_is_not_clamped():
    policy_BT = rows([-1.0]).requires_grad_()
    found_BT, metrics = losses.binary_divergence_losses(
        policy_BT, rows([-31.0]), rows([0.0]), rows([1.0]), max_rise=0.2, max_fall=0.2, square_coef=0.5
    )
    assert float(found_BT.detach()) == pytest.approx(450.0)
    assert float(gradient(found_BT, policy_BT)) == pytest.approx(30.0)
    assert float(metrics["ratio_clamped"]) == 1
    assert float(metrics["clip_fraction"]) == 0, "it has no advantage"


def test_a_sequence_mask_sees_how_far_a_row_is():
    policy_BT, mask_BT = rows([-50.0, -50.0]), rows([1.0, 1.0])
    kept = [corrections.sequence_mask(policy_BT, 0 * policy_BT, -mask_BT, mask_BT, threshold=threshold)[0].sum()
            for threshold in (40.0, 60.0)]  # fmt: skip
    assert kept == [0, 2]


def test_clamped_tokens_are_counted():
    """Log-ratios 25, -25, 1 and one that is masked; of rows 1 and 26."""
    policy_BT, mask_BT = rows([24.0, -26.0], [0.0, 0.0]), rows([1.0, 1.0], [1.0, 0.0])
    old_BT, adv_BT = rows([-1.0, -1.0], [-1.0, -90.0]), torch.ones_like(mask_BT)
    clip = {"clip_low": 0.2, "clip_high": 0.2}
    found = {
        "clip": losses.clipped_surrogate_losses(policy_BT, old_BT, adv_BT, mask_BT, **clip)[1],
        "rows": losses.clipped_surrogate_losses(policy_BT, old_BT, adv_BT, mask_BT, **clip, level="sequence")[1],
        "cispo": losses.cispo_losses(policy_BT, old_BT, adv_BT, mask_BT, max_ratio=5.0)[1],
        "sapo": losses.soft_gate_losses(policy_BT, old_BT, adv_BT, mask_BT, tau_positive=1.0, tau_negative=1.05)[1],
        "ratio": losses.ratio_losses(policy_BT, old_BT, adv_BT, mask_BT)[1],
    }
    assert {name: float(metrics["ratio_clamped"]) for name, metrics in found.items()} == {
        "clip": 2, "rows": 0, "cispo": 2, "sapo": 2, "ratio": 2
    }  # fmt: skip
    assert float(corrections.mismatch_sums(policy_BT, old_BT, mask_BT)["rho_clamped"]) == 2
    assert exact_log_ratios(policy_BT, old_BT, mask_BT, level="sequence").tolist() == [[0.0], [1.0]]
    assert exact_log_ratios(policy_BT, old_BT, mask_BT)[0].tolist() == [25.0, -25.0]
    assert log_ratios(policy_BT, old_BT, mask_BT)[0].tolist() == [20.0, -20.0]


def test_a_step_says_how_many_tokens_were_clamped():
    algorithm = build(("grpo", {"kl_coef": 0.1}))
    prepared, _ = algorithm.prepare([experience("a", 1.0, segment([0, 1, 1])), experience("a", 0.0)])
    before_BT, policy_BT = torch.full((2, 3), -1.0), torch.tensor([[0.0, -30.0, -1.0], [0.0, -1.0, 0.0]])
    batch = replace(micro_batch(prepared), reference_logprobs_BT=before_BT, proximal_logprobs_BT=before_BT)
    _, metrics = algorithm.loss(policy_BT, batch, Denominators(num_tokens=3, num_rows=2))
    names = ("ratio_clamped", "rho_clamped", "kl_clamped")
    assert [float(metrics[name]) for name in names] == [1, 0, 1]


# --------------------------------------------------------------------------------------------- large ratios


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(deadline=None)
@given(st.floats(0.05, 60.0), st.booleans())
def test_the_soft_gate_keeps_its_digits(dtype, ratio, good):
    """Its gradient is 4 sigmoid(x) sigmoid(-x) r A, x = tau (r - 1)."""
    tau, advantage = (1.0, 0.7) if good else (1.05, -0.7)
    policy_BT = rows([math.log(ratio)], dtype=dtype).requires_grad_()
    zero_BT, one_BT = rows([0.0], dtype=dtype), rows([1.0], dtype=dtype)
    found_BT, _ = losses.soft_gate_losses(
        policy_BT, zero_BT, advantage * one_BT, one_BT, tau_positive=1.0, tau_negative=1.05
    )
    assert found_BT.dtype == dtype
    x = tau * (math.exp(float(policy_BT.detach())) - 1)
    exact = -4 * advantage * math.exp(-abs(x)) / (1 + math.exp(-abs(x))) ** 2 * (1 + x / tau)
    rel = 1e-4 if dtype == torch.float32 else 1e-9
    assert float(gradient(found_BT, policy_BT)) == pytest.approx(exact, rel=rel, abs=1e-37)
    assert float(found_BT.detach()) == pytest.approx(-advantage * 4 / tau / (1 + math.exp(-x)), rel=1e-5)


def test_on_policy_the_soft_gate_has_the_plain_gradient():
    """Where x is exactly 0."""
    policy_BT = rows([-1.0, -2.0]).requires_grad_()
    found_BT, _ = losses.soft_gate_losses(
        policy_BT, policy_BT.detach(), rows([2.0, -3.0]), rows([1.0, 1.0]), tau_positive=1.0, tau_negative=1.05
    )
    torch.testing.assert_close(gradient(found_BT, policy_BT), rows([-2.0, 3.0]))


def test_tau_is_of_the_inputs_type():
    """1.05 as float32 is 1.0499999523."""
    found_BT, _ = losses.soft_gate_losses(
        rows([math.log(2.0)]), rows([0.0]), rows([-1.0]), rows([1.0]), tau_positive=1.0, tau_negative=1.05
    )
    assert float(found_BT) == pytest.approx(4 / 1.05 / (1 + math.exp(-1.05)), rel=1e-14)


# --------------------------------------------------------------------------------------------- rounding


def test_rounding_is_no_signal():
    equal, n = np.asarray([0.7, 0.7 + 1e-16, 0.7 - 1e-9, 0.7 + 2e-9]), np.zeros(4, int)
    assert len(set(equal.tolist())) > 1
    for compute in (
        lambda r, g: advantages.compute_group_advantages(r, g, eps=0.0),
        advantages.center_on_group_mean,
        advantages.compute_leave_one_out_advantages,
        advantages.compute_likelihood_advantages,
        lambda r, g: advantages.compute_soft_baseline_advantages(r, g, tau=1e-3),
        lambda r, g: advantages.compute_baseline_advantages(r, g, np.asarray([True, False, False, False])),
        lambda r, g: advantages.whiten(r),
    ):
        assert not compute(equal, n).any()
    assert not advantages.have_signal(equal, n).any()
    assert values.explained_variance(np.zeros(4), equal) == 0.0
    assert advantages.have_signal(1e-4 * np.asarray([0.0, 0, 0, 1]), n).all(), "small, and no rounding"


def test_whitening_is_that_of_verl_and_trl():
    """(x - mean) / sqrt(var + 1e-8): of a spread of 1e-4 the most that comes out is 0.7 of it."""
    some = np.asarray([1.0, 2.0, 4.0])
    expected = (some - some.mean()) / np.sqrt(some.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(advantages.whiten(some), expected, rtol=1e-15)
    small = 1e-4 * np.asarray([-1.0, 0.0, 1.0])
    np.testing.assert_allclose(advantages.whiten(small), np.asarray([-1, 0, 1]) / math.sqrt(2), rtol=1e-12)
    assert np.abs(advantages.whiten(1e-5 * np.asarray([-1.0, 0.0, 1.0]))).max() < 0.1


def test_a_divergence_of_rounding_does_not_become_an_advantage():
    """Equal rewards, and a policy that is its own reference up to 2e-8."""
    algorithm = ReinforcePlusPlus(ReinforcePlusPlus.Config(kl_coef=1.0, kl_in="reward", kl_estimator="k1"))
    batch = [experience(name, 1.0, segment([0, 1, 1])) for name in "abc"]
    reference = [np.float32([0, -1, -1]), np.float32([0, -1, -1 + 6e-8]), np.float32([0, -1, -1])]
    assert reference[1][2] != -1
    found, metrics = algorithm.prepare(batch, reference)
    assert not any(row.advantages.any() for row in found)
    assert metrics["advantage_max"] == 0


def test_metrics_of_advantages_are_those_that_are_trained_on():
    """Whitened: mean 0, and a spread of 1 with n - 1; before, 0.5 and 0.5. With tool output that is not trained on."""
    batch = [experience("a", 1.0, segment([0, 1, 0, 1])), experience("b", 0.0, segment([0, 1, 1]))]
    found, metrics = ReinforcePlusPlus(ReinforcePlusPlus.Config()).prepare(batch)
    trained = np.concatenate([row.advantages[row.loss_mask > 0] for row in found])
    assert metrics["advantage"] == pytest.approx(0.0, abs=1e-7)
    assert metrics["advantage_std"] == pytest.approx(trained.std()) == pytest.approx(math.sqrt(3 / 4))
    assert metrics["advantage_max"] == pytest.approx(np.abs(trained).max())


def test_metrics_of_distillation_see_the_teacher():
    one = experience("a", 1.0, segment([0, 1, 1]))
    behavior = one.segments[0].behavior_logprobs.numpy()
    teacher = Array.of([0.0, behavior[1] + 2.0, behavior[2] - 1.0], "float32")
    _, metrics = Opd(Opd.Config()).prepare([replace(one, additions={"teacher_logprobs": teacher})])
    assert (metrics["advantage"], metrics["advantage_max"]) == pytest.approx((0.5, 2.0))


def test_on_policy_nothing_is_truncated():
    """Sampler and trainer differ by rounding, either way; a row at 1.02 of the cap is truncated."""
    generator = torch.Generator().manual_seed(0)
    policy_BT, mask_BT = -3 * torch.rand((64, 100), generator=generator), torch.ones(64, 100)
    behavior_BT = policy_BT + 2e-5 * (2 * torch.rand(policy_BT.shape, generator=generator) - 1)
    for cap in (1.0, 2.0):
        _, metrics = corrections.tapered_sequence_weights(
            policy_BT + math.log(cap) / 100, behavior_BT, -mask_BT, mask_BT, cap=cap
        )
        assert float(metrics["taper_truncated"]) == 0
    row_BT = rows([0.01, 0.01])
    _, metrics = corrections.tapered_sequence_weights(row_BT, 0 * row_BT, -1 - row_BT, 1 + 0 * row_BT, cap=1.0)
    assert float(metrics["taper_truncated"]) == 2


@each("advantage", [0.0, 1e-16, -1e-16, 1e-9])
def test_a_token_without_an_advantage_is_not_clipped(advantage):
    policy_BT, old_BT, mask_BT = rows([0.0, 0.0, -2.0]), rows([-2.0, -2.0, 0.0]), rows([1.0, 1.0, 1.0])
    adv_BT = rows([advantage, 1.0, advantage])
    found = [
        losses.clipped_surrogate_losses(policy_BT, old_BT, adv_BT, mask_BT, clip_low=0.2, clip_high=0.2, dual_clip=3.0),
        losses.cispo_losses(policy_BT, old_BT, adv_BT, mask_BT, max_ratio=2.0),
        losses.binary_divergence_losses(
            policy_BT, old_BT, adv_BT, mask_BT, max_rise=0.2, max_fall=0.2, square_coef=0.0
        ),
    ]
    assert [float(metrics["clip_fraction"]) for _, metrics in found] == [1, 1, 1]


# --------------------------------------------------------------------------------------------- types and masks

ONE = torch.ones(2, 3)


def calls(arrays):
    """Every core function of tensors, with `arrays` of one type."""
    policy, old, adv, mask = arrays
    pair, sign = torch.tensor([0, 0]), torch.tensor([1.0, -1.0])
    return {
        "clip": lambda: losses.clipped_surrogate_losses(policy, old, adv, mask, clip_low=0.2, clip_high=0.2),
        "plain": lambda: losses.policy_gradient_losses(policy, adv, mask),
        "cispo": lambda: losses.cispo_losses(policy, old, adv, mask, max_ratio=5.0),
        "gate": lambda: losses.soft_gate_losses(policy, old, adv, mask, tau_positive=1.0, tau_negative=1.0),
        "ratio": lambda: losses.ratio_losses(policy, old, adv, mask),
        "square": lambda: losses.squared_regression_losses(policy, old, adv, mask, tau=1.0),
        "dppo": lambda: losses.binary_divergence_losses(
            policy, old, adv, mask, max_rise=0.2, max_fall=0.2, square_coef=0.1
        ),
        "value": lambda: losses.value_losses(policy, old, adv, mask, clip=0.2),
        "k3": lambda: kl.estimate_kl(policy, old, mask, estimator="k3"),
        "weights": lambda: corrections.importance_weights(policy, old, mask, outside="clamp", low=0.0, high=2.0),
        "taper": lambda: corrections.tapered_sequence_weights(policy, old, adv, mask, cap=1.0),
        "sequence": lambda: corrections.sequence_mask(policy, old, adv, mask, threshold=0.1),
        "mismatch": lambda: corrections.mismatch_sums(policy, old, mask),
        "between": lambda: corrections.interpolate_logprobs(policy, old, adv, mask),
        "imitate": lambda: imitation.imitation_loss(policy, adv, mask, num_tokens=6, num_rows=2),
        "phi": lambda: imitation.phi_weights(policy, mask),
        "prefer": lambda: imitation.preference_loss(
            policy, old, pair, sign, sign.abs(), mask, beta=0.1, label_smoothing=0.0, num_pairs=1
        ),
        "weigh": lambda: masks.reduce_loss(policy, mask, "token", num_tokens=6, num_rows=2),
    }  # fmt: skip


@each("dtype", [torch.float16, torch.bfloat16])
@each("name", sorted(calls([ONE] * 4)))
def test_half_precision_is_refused(name, dtype):
    calls([ONE] * 4)[name]()
    with pytest.raises(TypeError, match=r"expected float32 or float64; convert it before"):
        calls([ONE.to(dtype)] * 4)[name]()


@each("odd", [0.5, 2.0, -1.0, math.nan])
@each("name", sorted(calls([ONE] * 4)))
def test_a_mask_is_of_zeros_and_ones(name, odd):
    mask = ONE.clone()
    mask[1, 1] = odd
    with pytest.raises(ValueError, match="loss_mask holds values that are neither 0 nor 1"):
        calls([ONE, ONE, ONE, mask])[name]()


def test_numpy_functions_compute_half_precision_in_full():
    rewards, groups = np.asarray([100.0, 200.0, 60000.0], np.float16), np.zeros(3, int)
    exact = rewards.astype(np.float64)
    for compute in (advantages.compute_group_advantages, advantages.center_on_group_mean,
                    advantages.compute_leave_one_out_advantages, advantages.compute_likelihood_advantages):  # fmt: skip
        np.testing.assert_array_equal(compute(rewards, groups), compute(exact, groups))
    np.testing.assert_array_equal(advantages.whiten(rewards), advantages.whiten(exact))
    np.testing.assert_array_equal(advantages.sum_of_later(rewards), advantages.sum_of_later(exact))
    np.testing.assert_array_equal(
        corrections.second_moment_mask(rewards, 1e5), corrections.second_moment_mask(exact, 1e5)
    )
    some = values.compute_gae(rewards[None], -rewards[None], np.ones((1, 3)), gamma=1.0, lam=1.0)
    full = values.compute_gae(exact[None], -exact[None], np.ones((1, 3)), gamma=1.0, lam=1.0)
    np.testing.assert_array_equal(some, full)
    assert values.explained_variance(rewards, 2 * rewards.astype(np.float32)) == pytest.approx(0.75)


def test_logits_of_float16_states_are_made_in_float32():
    """300 products of 300 and 1: 90,000 is beyond float16."""
    hidden, weight = torch.full((1, 300), 300.0, dtype=torch.float16), torch.zeros(3, 300, dtype=torch.float16)
    weight[0], weight[1] = 1.0, 1.0
    found = token_logprobs(hidden.requires_grad_(), weight, torch.tensor([0]), chunk_tokens=4)[0]
    assert found.dtype == torch.float32
    assert float(found.detach()) == pytest.approx(-math.log(2), abs=1e-2)
    assert torch.isfinite(gradient(found, hidden)).all()


# --------------------------------------------------------------------------------------------- settings


@each(
    ("call", "message"),
    [
        (lambda: corrections.importance_weights(ONE, ONE, ONE, outside="clamp", low=2.0, high=0.5), "low <= high"),
        (lambda: corrections.importance_weights(ONE, ONE, ONE, outside="drop", low=0.0, high=0.0), "high above 0"),
        (lambda: corrections.tapered_sequence_weights(ONE, ONE, ONE, ONE, cap=0.0), "cap 0.0, expected more than 0"),
        (lambda: corrections.second_moment_mask(np.ones(2), -1.0), "threshold -1.0, expected at least 0"),
        (lambda: losses.clipped_surrogate_losses(ONE, ONE, ONE, ONE, clip_low=-0.5, clip_high=0.2), "clip_low -0.5"),
        (lambda: losses.clipped_surrogate_losses(ONE, ONE, ONE, ONE, clip_low=0.2, clip_high=-0.3), "clip_high -0.3"),
        (
            lambda: losses.clipped_surrogate_losses(
                ONE, ONE, ONE, ONE, clip_low=0.2, clip_high=0.2, dual_clip=1.0
            ),
            "dual_clip 1.0",
        ),
        (lambda: losses.cispo_losses(ONE, ONE, ONE, ONE, max_ratio=0.0), "max_ratio 0.0"),
        (lambda: losses.soft_gate_losses(ONE, ONE, ONE, ONE, tau_positive=0.0, tau_negative=1.0), "tau_positive 0.0"),
        (lambda: losses.soft_gate_losses(ONE, ONE, ONE, ONE, tau_positive=1.0, tau_negative=0.0), "tau_negative 0.0"),
        (lambda: losses.squared_regression_losses(ONE, ONE, ONE, ONE, tau=0.0), "tau 0.0, expected more than 0"),
        (lambda: losses.value_losses(ONE, ONE, ONE, ONE, clip=0.0), "clip 0.0, expected more than 0"),
        (lambda: losses.binary_divergence_losses(ONE, ONE, ONE, ONE, max_rise=-1.0, max_fall=0.2, square_coef=0.0),
         "max_rise -1.0"),
        (lambda: advantages.compute_soft_baseline_advantages(np.ones(2), np.zeros(2, int), tau=0.0), "tau 0.0"),
        (lambda: advantages.compute_group_advantages(np.ones(2), np.zeros(2, int), eps=-1.0), "eps -1.0"),
        (lambda: advantages.compute_overlong_penalties(np.asarray([3]), np.asarray([0]), share=0.2), "limit of 0"),
        (lambda: values.compute_gae(np.ones((1, 2)), np.ones((1, 2)), np.asarray([[1.0, 0.5]]), gamma=1.0, lam=1.0),
         "neither 0 nor 1"),
        (lambda: advantages.compute_teacher_gaps(np.ones(2), np.ones(2), np.asarray([0, 2])), "neither 0 nor 1"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def preferred(pairs, signs, **changes):
    some = {"beta": 0.1, "label_smoothing": 0.0, "num_pairs": 1, **changes}
    ones = torch.ones(len(pairs), 3)
    return imitation.preference_loss(
        ones, ones, torch.tensor(pairs), torch.tensor(signs), torch.ones(len(pairs)), ones, **some
    )


def test_a_pair_has_two_sides():
    assert float(preferred([7, 7, 7], [1.0, 1.0, -1.0])[0]) == pytest.approx(math.log(2))
    for pairs, signs in (([7, 7, 8], [1.0, -1.0, 1.0]), ([7, 7, 8, 8], [1.0, -1.0, -1.0, -1.0])):
        with pytest.raises(ValueError, match="pair 8 has only one side"):
            preferred(pairs, signs)
    with pytest.raises(ValueError, match="signs hold values that are neither 1 nor -1"):
        preferred([7, 7], [1.0, 0.0])
    with pytest.raises(ValueError, match=r"beta 0\.0"):
        preferred([7, 7], [1.0, -1.0], beta=0.0)


def test_dpo_leaves_out_what_has_one_side():
    """Of the second pair the worse answer has nothing to train on."""
    masks_ = [[0, 1, 1], [0, 1, 1], [0, 1, 1], [0, 0, 0]]
    batch = [
        shown(f"pair{number // 2}", tokens([3, 4, 5], mask), loss_kind=LossKind.dpo,
              pair="chosen" if number % 2 == 0 else "rejected")
        for number, mask in enumerate(masks_)
    ]  # fmt: skip
    found, metrics = Dpo(Dpo.Config()).prepare(batch)
    assert metrics == {"num_pairs": 1.0, "pairs_one_sided": 1.0}
    assert [bool(row.loss_mask.any()) for row in found] == [True, True, False, False]
    assert Denominators.of(found).num_groups == 1
    logprobs = [np.zeros(3, np.float32)] * 4
    held_out = Dpo(Dpo.Config()).held_out(found, logprobs, logprobs)
    assert held_out["held_out_loss"] == pytest.approx(math.log(2))


# --------------------------------------------------------------------------------------------- denominators


def test_a_share_of_the_denominators_may_be_below_one():
    losses_BT, mask_BT = rows([3.0, 0.0]), rows([1.0, 0.0])
    for normalise in ("token", "sequence", "sum"):
        assert float(masks.reduce_loss(losses_BT, mask_BT, normalise, num_tokens=0.25, num_rows=0.25)) == 12.0
        assert float(masks.reduce_loss(0 * losses_BT, 0 * mask_BT, normalise, num_tokens=0, num_rows=0)) == 0.0
    half = preferred([7, 7], [1.0, -1.0], num_pairs=0.5)[0]
    assert float(half) == pytest.approx(2 * math.log(2))
