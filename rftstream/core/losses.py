"""Losses of policy gradients, per token. `masks.reduce_loss` reduces them to one number.

Shapes: B rows, T padded tokens; position t belongs to token t, given the tokens before it. All arrays are float [B, T],
float32 or float64. Old logprobs, behaviour logprobs and advantages are taken as constants, and masked positions may
hold anything. All functions return losses [B, T], 0 at masked positions, and metrics as sums over unmasked tokens. A
value of a whole row (the ratio of a sequence) is repeated at each of its unmasked tokens. Settings that make no sense
are a ValueError.

If a ratio is exponentiated, its logarithm is clamped to +-20, with no gradient beyond. The metric ratio_clamped counts
the clamped tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rftstream.core.masks import apply_mask, check_rows
from rftstream.core.ratios import Level, clamped, count_clamped, exact_log_ratios

NO_ADVANTAGE = 1e-8
"""An advantage of at most this size is rounding. Its token is not counted as clipped."""


def clipped_surrogate_losses(
    policy_logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    loss_mask_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    level: Level = "token",
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return PPO's clipped losses: a token whose ratio has left the range in the wished direction gives no gradient.

    r = exp(logp_theta - logp_old);  l = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A);  with dual_clip c and
    A < 0: l = min(l, -c A).

    PPO (arXiv 1707.06347), its use in GRPO (2402.03300), two-sided range of DAPO (2503.14476), dual clip (1912.09729).
    level geometric: r is the geometric mean of the row's ratios, GSPO (2507.18071); sequence: their product, the
    ratio of the whole row. log r is clamped to +-20 after the sum or mean.

    clip_low and clip_high at least 0, dual_clip above 1. Metrics: clip_fraction (tokens that have an advantage, and
    lost their gradient to the clip), ratio, ratio_clamped.
    """
    _check(
        "clipped_surrogate_losses",
        clip_low=(clip_low, clip_low >= 0, "at least 0"),
        clip_high=(clip_high, clip_high >= 0, "at least 0"),
        dual_clip=(dual_clip, dual_clip is None or dual_clip > 1, "more than 1"),
    )
    advantages_BT = _constant("clipped_surrogate_losses", policy_logprobs_BT, advantages_BT, loss_mask_BT)
    ratio_BT, num_clamped = _ratios(policy_logprobs_BT, old_logprobs_BT, loss_mask_BT, level)
    plain_BT = -ratio_BT * advantages_BT
    clipped_BT = -ratio_BT.clamp(1 - clip_low, 1 + clip_high) * advantages_BT
    losses_BT = torch.maximum(plain_BT, clipped_BT)
    cut_BT = clipped_BT > plain_BT
    if dual_clip is not None:
        bound_BT = -dual_clip * advantages_BT
        cut_BT = cut_BT | ((advantages_BT < 0) & (losses_BT > bound_BT))
        losses_BT = torch.where(advantages_BT < 0, torch.minimum(losses_BT, bound_BT), losses_BT)
    return apply_mask(losses_BT, loss_mask_BT), {
        "clip_fraction": _count(cut_BT & (advantages_BT.abs() > NO_ADVANTAGE), loss_mask_BT),
        "ratio": apply_mask(ratio_BT.detach(), loss_mask_BT).sum(),
        "ratio_clamped": num_clamped,
    }


def policy_gradient_losses(policy_logprobs_BT: Tensor, advantages_BT: Tensor, loss_mask_BT: Tensor) -> Tensor:
    """Return policy gradient losses without a ratio: l = -A logp_theta. REINFORCE (Williams 1992)."""
    advantages_BT = _constant("policy_gradient_losses", policy_logprobs_BT, advantages_BT, loss_mask_BT)
    return -advantages_BT * apply_mask(policy_logprobs_BT, loss_mask_BT)


def cispo_losses(
    policy_logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    loss_mask_BT: Tensor,
    *,
    max_ratio: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return losses that clip the weight instead of the update, so that every token has a gradient.

    r = exp(logp_theta - logp_old), log r clamped to +-20;  l = -sg(min(r, max_ratio)) A logp_theta. CISPO of
    MiniMax-M1 (arXiv 2506.13585), without a lower bound as there.

    max_ratio above 0. Metrics: clip_fraction (tokens that have an advantage, at the bound), ratio, ratio_clamped.
    """
    _check("cispo_losses", max_ratio=(max_ratio, max_ratio > 0, "more than 0"))
    ratio_BT, num_clamped = _ratios(policy_logprobs_BT.detach(), old_logprobs_BT, loss_mask_BT)
    losses_BT = policy_gradient_losses(policy_logprobs_BT, advantages_BT, loss_mask_BT) * ratio_BT.clamp(max=max_ratio)
    cut_BT = (ratio_BT > max_ratio) & (apply_mask(advantages_BT.detach(), loss_mask_BT).abs() > NO_ADVANTAGE)
    return losses_BT, {
        "clip_fraction": _count(cut_BT, loss_mask_BT),
        "ratio": apply_mask(ratio_BT, loss_mask_BT).sum(),
        "ratio_clamped": num_clamped,
    }


def soft_gate_losses(
    policy_logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    loss_mask_BT: Tensor,
    *,
    tau_positive: float,
    tau_negative: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return losses with a smooth gate in place of the clip: the gradient fades as the ratio leaves 1, without a sharp
    end.

    l = -gate A,  gate = (4 / tau) sigmoid(tau (r - 1)),  tau = tau_positive where A > 0, else tau_negative; at r = 1
    the gradient is that of r A. SAPO (arXiv 2511.20347). log r is clamped to +-20.

    Both tau above 0. Metrics: ratio, ratio_clamped.
    """
    _check(
        "soft_gate_losses",
        tau_positive=(tau_positive, tau_positive > 0, "more than 0"),
        tau_negative=(tau_negative, tau_negative > 0, "more than 0"),
    )
    advantages_BT = _constant("soft_gate_losses", policy_logprobs_BT, advantages_BT, loss_mask_BT)
    ratio_BT, num_clamped = _ratios(policy_logprobs_BT, old_logprobs_BT, loss_mask_BT)
    tau_BT = torch.full_like(ratio_BT, tau_negative).masked_fill(advantages_BT > 0, tau_positive)
    x_BT = tau_BT * (ratio_BT - 1)
    # sigmoid(x) = 1 - sigmoid(-x), whose gradient keeps its digits where sigmoid(x) rounds to 1
    near_BT = torch.sigmoid(torch.where(x_BT > 0, -x_BT, x_BT))
    gate_BT = 4 / tau_BT * torch.where(x_BT > 0, 1 - near_BT, near_BT)
    return -gate_BT * advantages_BT, {
        "ratio": apply_mask(ratio_BT.detach(), loss_mask_BT).sum(),
        "ratio_clamped": num_clamped,
    }


def ratio_losses(
    policy_logprobs_BT: Tensor, behavior_logprobs_BT: Tensor, advantages_BT: Tensor, loss_mask_BT: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return importance-sampled losses without a clip: l = -r A, r = exp(logp_theta - logp_behavior), log r clamped to
    +-20.

    Metrics: ratio, ratio_clamped."""
    advantages_BT = _constant("ratio_losses", policy_logprobs_BT, advantages_BT, loss_mask_BT)
    ratio_BT, num_clamped = _ratios(policy_logprobs_BT, behavior_logprobs_BT, loss_mask_BT)
    return -ratio_BT * advantages_BT, {
        "ratio": apply_mask(ratio_BT.detach(), loss_mask_BT).sum(),
        "ratio_clamped": num_clamped,
    }


def squared_regression_losses(
    policy_logprobs_BT: Tensor, start_logprobs_BT: Tensor, advantages_BT: Tensor, loss_mask_BT: Tensor, *, tau: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the squared difference between a row's log-ratio and its value at the optimum of reward minus tau KL.

    x = sum_t (logp_theta - logp_start);  l = (A - tau x)^2 / (2 tau), at each of the row's tokens, A the mean of the
    row's advantages. Its gradient is -(A - tau x) grad log pi(row). Kimi k1.5 (arXiv 2501.12599, section 2.3.2). x is
    not exponentiated, so nothing is clamped: the further a row is off, the stronger it is pulled back.

    tau above 0. Metrics: regression_log_ratio (sum of x, at each token).
    """
    _check("squared_regression_losses", tau=(tau, tau > 0, "more than 0"))
    advantages_BT = _constant("squared_regression_losses", policy_logprobs_BT, advantages_BT, loss_mask_BT)
    x_B1 = exact_log_ratios(policy_logprobs_BT, start_logprobs_BT, loss_mask_BT, level="sequence")
    lengths_B1 = (loss_mask_BT > 0).to(x_B1.dtype).sum(dim=1, keepdim=True).clamp(min=1)
    advantages_B1 = advantages_BT.sum(dim=1, keepdim=True) / lengths_B1
    losses_B1 = (advantages_B1 - tau * x_B1).square() / (2 * tau)
    shape = loss_mask_BT.shape
    return apply_mask(losses_B1.expand(shape), loss_mask_BT), {
        "regression_log_ratio": apply_mask(x_B1.detach().expand(shape), loss_mask_BT).sum()
    }


def binary_divergence_losses(
    policy_logprobs_BT: Tensor,
    behavior_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    loss_mask_BT: Tensor,
    *,
    max_rise: float,
    max_fall: float,
    square_coef: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return losses without tokens whose probability (not ratio) has moved too far in the wished direction.

    r = p_theta / p_behavior;  keep = 0 where A > 0 and p_theta - p_behavior > max_rise, or A < 0 and p_theta -
    p_behavior < -max_fall, else 1;  l = -keep A r + square_coef (log r)^2, the square on dropped tokens, too.

    DPPO, binary total variation (arXiv 2602.04879). log r is clamped to +-20 in r, and not in the square.

    max_rise, max_fall and square_coef at least 0. Metrics: clip_fraction (dropped tokens that have an advantage),
    ratio, ratio_clamped.
    """
    _check(
        "binary_divergence_losses",
        max_rise=(max_rise, max_rise >= 0, "at least 0"),
        max_fall=(max_fall, max_fall >= 0, "at least 0"),
        square_coef=(square_coef, square_coef >= 0, "at least 0"),
    )
    advantages_BT = _constant("binary_divergence_losses", policy_logprobs_BT, advantages_BT, loss_mask_BT)
    log_ratio_BT = exact_log_ratios(policy_logprobs_BT, behavior_logprobs_BT, loss_mask_BT)
    ratio_BT = clamped(log_ratio_BT).exp()
    now_BT, then_BT = (
        apply_mask(one.detach(), loss_mask_BT).exp() for one in (policy_logprobs_BT, behavior_logprobs_BT)
    )
    gone_BT = torch.where(
        advantages_BT > 0, now_BT - then_BT > max_rise, (advantages_BT < 0) & (now_BT - then_BT < -max_fall)
    )
    kept_BT = torch.where(gone_BT, torch.zeros_like(ratio_BT), ratio_BT)
    losses_BT = -kept_BT * advantages_BT + square_coef * log_ratio_BT.square()
    return losses_BT, {
        "clip_fraction": _count(gone_BT & (advantages_BT.abs() > NO_ADVANTAGE), loss_mask_BT),
        "ratio": apply_mask(ratio_BT.detach(), loss_mask_BT).sum(),
        "ratio_clamped": count_clamped(log_ratio_BT, loss_mask_BT),
    }


def value_losses(
    values_BT: Tensor, old_values_BT: Tensor, returns_BT: Tensor, loss_mask_BT: Tensor, *, clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the squared error of a critic whose values may not move far from those before the batch.

    l = max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2, without clip (V - R)^2 / 2; V_old and R are
    taken as constants. PPO's in OpenAI Baselines; arXiv 2006.05990 compares both.

    clip above 0. Metrics: value_clip_share (tokens whose clipped error is the larger: they give no gradient).
    """
    _check("value_losses", clip=(clip, clip is None or clip > 0, "more than 0"))
    check_rows("value_losses", values=values_BT, old_values=old_values_BT, returns=returns_BT, loss_mask=loss_mask_BT)
    values_BT = apply_mask(values_BT, loss_mask_BT)
    old_BT, returns_BT = (apply_mask(one.detach(), loss_mask_BT) for one in (old_values_BT, returns_BT))
    plain_BT = (values_BT - returns_BT).square()
    if clip is None:
        return plain_BT / 2, {"value_clip_share": torch.zeros_like(plain_BT).sum()}
    near_BT = torch.minimum(torch.maximum(values_BT, old_BT - clip), old_BT + clip)
    clipped_BT = (near_BT - returns_BT).square()
    return torch.maximum(plain_BT, clipped_BT) / 2, {"value_clip_share": _count(clipped_BT > plain_BT, loss_mask_BT)}


def _constant(where: str, policy_logprobs_BT: Tensor, advantages_BT: Tensor, loss_mask_BT: Tensor) -> Tensor:
    """Return the advantages at unmasked tokens, with the right shape and without gradient."""
    check_rows(where, policy_logprobs=policy_logprobs_BT, advantages=advantages_BT, loss_mask=loss_mask_BT)
    return apply_mask(advantages_BT.detach(), loss_mask_BT)


def _ratios(
    numerator_logprobs_BT: Tensor, denominator_logprobs_BT: Tensor, loss_mask_BT: Tensor, level: Level = "token"
) -> tuple[Tensor, Tensor]:
    """Return ratios [B, T] or [B, 1], and the number of unmasked tokens at which they were clamped."""
    exact_BT = exact_log_ratios(numerator_logprobs_BT, denominator_logprobs_BT, loss_mask_BT, level=level)
    return clamped(exact_BT).exp(), count_clamped(exact_BT, loss_mask_BT)


def _check(where: str, **settings: tuple[float | None, bool, str]) -> None:
    """Raise ValueError unless all settings are right. Each setting: its value, whether it is right, the expected
    value."""
    for name, (value, right, expected) in settings.items():
        if not right:
            raise ValueError(f"{where}: got {name} {value}, expected {expected}")


def _count(where_BT: Tensor, loss_mask_BT: Tensor) -> Tensor:
    """Return the number of unmasked tokens where the condition holds; [B, 1] applies to all tokens of a row."""
    return (where_BT & (loss_mask_BT > 0)).to(loss_mask_BT.dtype).sum()
