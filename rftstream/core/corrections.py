"""Off-policy corrections: the tokens were sampled by another policy (an older one, or one with another engine's
rounding) than the trained one.

rho = pi_old / pi_behavior per token, where old is the trainer's policy just before the update. Weights multiply the
losses of tokens; the denominators of the loss count all unmasked tokens, those with weight 0, too. Shapes: B rows, T
padded tokens, N tokens of a flat list. Where rho is exponentiated, log rho is clamped to +-20, after any sum or mean.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rftstream.core.masks import apply_mask, check_rows
from rftstream.core.ratios import MAX_LOG_RATIO, Level, clamped, count_clamped, exact_log_ratios, log_ratios

ROUNDING = 0.01
"""A row whose ratio exceeds a cap by less than this share may do so by rounding: logprobs of sampler and trainer differ
by up to 2e-5 a token even if both compute with the same weights in float32."""


def importance_weights(
    old_logprobs_BT: Tensor,
    behavior_logprobs_BT: Tensor,
    loss_mask_BT: Tensor,
    *,
    outside: Literal["clamp", "drop"],
    low: float,
    high: float,
    level: Level = "token",
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return bounded weights that correct for the sampling policy. Ratios outside of [low, high] are clamped, or set to
    0.

    rho = pi_old / pi_behavior of a token, of its whole row (product), or the geometric mean of its row;
    clamp: w = sg clamp(rho, low, high);  drop: w = sg rho where low <= rho <= high, else 0.  log rho is clamped to
    +-20, after the sum or mean over the row.

    Clamped at [0, C]: truncated importance sampling (TIS), IMPALA (arXiv 1802.01561), per token as in
    fengyao.notion.site/off-policy-rl. Dropped: IcePop (ringtech.notion.site/icepop), masked importance sampling (MIS).
    With proximal logprobs as old: the decoupled loss (arXiv 2505.24298).

    All arrays: float [B, T]; masked positions may hold anything. low at most high (ValueError). Returns float [B, T]
    without gradient, 0 at masked positions, and sums over unmasked tokens: importance_weight, importance_clamped,
    importance_dropped (tokens).
    """
    if not low <= high or high <= 0:
        raise ValueError(f"importance_weights: got bounds {low} and {high}, expected low <= high and high above 0")
    log_rho_BT = log_ratios(old_logprobs_BT.detach(), behavior_logprobs_BT, loss_mask_BT, level=level)
    rho_BT = log_rho_BT.exp().expand(loss_mask_BT.shape)
    outside_BT = (rho_BT < low) | (rho_BT > high)
    if outside == "clamp":
        weights_BT = rho_BT.clamp(low, high)
    elif outside == "drop":
        weights_BT = torch.where(outside_BT, torch.zeros_like(rho_BT), rho_BT)
    else:
        raise ValueError(f"importance_weights: got outside {outside!r}, expected 'clamp' or 'drop'")
    weights_BT = apply_mask(weights_BT, loss_mask_BT)
    name = "importance_clamped" if outside == "clamp" else "importance_dropped"
    num_outside = apply_mask(outside_BT.to(rho_BT.dtype), loss_mask_BT).sum()
    return weights_BT, {"importance_weight": weights_BT.sum(), name: num_outside}


def tapered_sequence_weights(
    policy_logprobs_BT: Tensor, behavior_logprobs_BT: Tensor, advantages_BT: Tensor, loss_mask_BT: Tensor, *, cap: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return TOPR's weights (arXiv 2503.14286): 1 for good rows, the truncated ratio of the whole row for bad rows.

    w = 1 where A >= 0;  w = sg clamp(exp(sum_t (logp_theta - logp_behav)), 0, cap) where A < 0;  0 at masked positions.
    The sum is clamped to +-20.

    All arrays: float [B, T]; masked positions may hold anything. cap above 0. Returns float [B, T] without gradient,
    and sums over unmasked tokens: taper_weight (of the bad ones), taper_truncated (tokens of bad rows whose ratio is
    more than 1 % above the cap: nearer to it rounding may have put them there).
    """
    if not cap > 0:
        raise ValueError(f"tapered_sequence_weights: got cap {cap}, expected more than 0")
    check_rows("tapered_sequence_weights", policy_logprobs=policy_logprobs_BT, advantages=advantages_BT)
    exact_B1 = exact_log_ratios(policy_logprobs_BT.detach(), behavior_logprobs_BT, loss_mask_BT, level="sequence")
    ratio_B1 = clamped(exact_B1).exp()
    bad_BT = apply_mask(advantages_BT.detach(), loss_mask_BT) < 0
    weights_BT = apply_mask(torch.where(bad_BT, ratio_B1.clamp(max=cap), torch.ones_like(ratio_B1)), loss_mask_BT)
    at_cap_BT = bad_BT & (exact_B1 > math.log(cap) + math.log1p(ROUNDING))
    return weights_BT, {
        "taper_weight": torch.where(bad_BT, weights_BT, torch.zeros_like(weights_BT)).sum(),
        "taper_truncated": at_cap_BT.to(weights_BT.dtype).sum(),
    }


def sequence_mask(
    policy_logprobs_BT: Tensor,
    denominator_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    loss_mask_BT: Tensor,
    *,
    threshold: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a mask without the bad rows from which the policy has moved away: off-policy sequence masking
    (DeepSeek-V3.2, 2512.02556).

    keep = 0 where A < 0 and mean_t (logp_denominator - logp_theta) > threshold, else 1. Nothing is exponentiated, so
    nothing is clamped.

    All arrays: float [B, T]; masked positions may hold anything. Returns 0 or 1, float [B, T] without gradient, 0 at
    masked positions, and a sum over unmasked tokens: sequences_dropped (tokens of dropped rows).
    """
    check_rows("sequence_mask", policy_logprobs=policy_logprobs_BT, advantages=advantages_BT)
    gap_B1 = -exact_log_ratios(policy_logprobs_BT.detach(), denominator_logprobs_BT, loss_mask_BT, level="geometric")
    bad_BT = apply_mask(advantages_BT.detach(), loss_mask_BT) < 0
    dropped_BT = (bad_BT & (gap_B1 > threshold)).to(loss_mask_BT.dtype)
    return apply_mask(1 - dropped_BT, loss_mask_BT), {"sequences_dropped": dropped_BT.sum()}


def second_moment_mask(log_ratios_N: np.ndarray, threshold: float) -> np.ndarray:
    """Return a mask without the tokens of largest absolute log-ratio, so that the mean square of the others is at most
    `threshold`.

    M2PO (arXiv 2510.01161). log_ratios_N: float [N], of all unmasked tokens of a batch, since the rule is about all of
    them together. Returns bool [N], True where a token stays; tokens of the same size stay or go together.
    """
    if log_ratios_N.ndim != 1 or log_ratios_N.dtype.kind != "f":
        raise ValueError(f"second_moment_mask: got {log_ratios_N.dtype} {log_ratios_N.shape}, expected floats [N]")
    if not threshold >= 0:
        raise ValueError(f"second_moment_mask: got threshold {threshold}, expected at least 0")
    square_N = log_ratios_N.astype(np.float64) ** 2
    ascending_N = np.sort(square_N)
    means_N = np.cumsum(ascending_N) / np.arange(1, len(ascending_N) + 1)  # never falls: each value is larger
    num_kept = int(np.searchsorted(means_N, threshold, side="right"))
    if num_kept == len(ascending_N):
        return np.ones(len(square_N), dtype=bool)
    return np.asarray(square_N < ascending_N[num_kept])


def mismatch_sums(old_logprobs_BT: Tensor, behavior_logprobs_BT: Tensor, loss_mask_BT: Tensor) -> dict[str, Tensor]:
    """Return how far sampler and trainer differ, as sums over unmasked tokens.

    mismatch_k3 = rho - log rho - 1 (an unbiased, non-negative estimate of KL(behavior || old));  rho and rho_square
    are for the effective sample size;  rho_clamped counts the tokens whose log rho is clamped to +-20 for rho (in
    mismatch_k3 to at most 20: below it is exact). Arrays: float [B, T].
    """
    exact_BT = exact_log_ratios(old_logprobs_BT.detach(), behavior_logprobs_BT, loss_mask_BT)
    near_BT = exact_BT.clamp(max=MAX_LOG_RATIO)
    rho_BT = apply_mask(clamped(exact_BT).exp(), loss_mask_BT)
    return {
        "mismatch_k3": (near_BT.expm1() - near_BT).sum(),
        "rho": rho_BT.sum(),
        "rho_square": rho_BT.square().sum(),
        "rho_clamped": count_clamped(exact_BT, loss_mask_BT),
    }


def effective_sample_size(mean_rho: float, mean_rho_square: float) -> float:
    """Return the number of equally weighted tokens that the weighted ones are worth, as a share: (sum rho)^2 / (n sum
    rho^2), from means over n tokens.

    1 when all weights are equal; 0 without tokens.
    """
    return mean_rho**2 / mean_rho_square if mean_rho_square > 0 else 0.0


def interpolate_logprobs(
    policy_logprobs_BT: Tensor, behavior_logprobs_BT: Tensor, share_BT: Tensor, loss_mask_BT: Tensor
) -> Tensor:
    """Return logprobs of a policy between the sampling one and the trained one, by interpolation.

    logp ~ logp_behavior + share (logp_theta - logp_behavior), with share in [0, 1]: log-linear, as the proximal policy
    of the decoupled loss (AReaL's prox_logp_method "loglinear").

    Nothing is clamped. All arrays: float [B, T]. Returns float [B, T] without gradient, 0 at masked positions.
    """
    check_rows(
        "interpolate_logprobs",
        policy_logprobs=policy_logprobs_BT,
        behavior_logprobs=behavior_logprobs_BT,
        share=share_BT,
        loss_mask=loss_mask_BT,
    )
    policy_BT, behavior_BT = (
        apply_mask(policy_logprobs_BT.detach(), loss_mask_BT),
        apply_mask(behavior_logprobs_BT, loss_mask_BT),
    )
    return behavior_BT + apply_mask(share_BT, loss_mask_BT) * (policy_BT - behavior_BT)
