"""Divergence from a reference policy, per token. Shapes: B rows, T padded tokens."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from rftstream.core.ratios import MAX_LOG_RATIO, count_clamped, exact_log_ratios, log_ratios

Estimator = Literal["k1", "k2", "k3"]


def estimate_kl(
    policy_logprobs_BT: Tensor,
    reference_logprobs_BT: Tensor,
    loss_mask_BT: Tensor,
    *,
    estimator: Estimator,
    old_logprobs_BT: Tensor | None = None,
) -> Tensor:
    """Return an estimate of KL(policy || reference) from the sampled tokens, with a gradient through the policy.

    d = logp_ref - logp_policy;  k1 = -d;  k2 = d^2 / 2;  k3 = exp(d) - d - 1  (joschu.net/blog/kl-approx.html).
    k1 and k3 are unbiased, k2 and k3 never negative. As a loss on samples of the policy, the expected gradient of k1 is
    zero, that of k2 is the divergence's, and that of k3 is KL(reference || policy)'s. With old_logprobs: k r, where
    r = exp(logp_policy - logp_old) is not detached; on samples of old the gradient of k1 and k3 is then the
    divergence's, too (DeepSeek-V3.2, arXiv 2512.02556).

    Only exponentiated values are clamped: d in k3 to at most 20, with no gradient beyond, and log r to +-20. k1 and k2
    are exact for any difference of the two policies, and so is k3 where the policy is the likelier one.

    All arrays: float [B, T]; reference and old are taken as constants, masked positions may hold anything. Returns
    float [B, T], 0 at masked positions.
    """
    d_BT = -exact_log_ratios(policy_logprobs_BT, reference_logprobs_BT, loss_mask_BT)
    if estimator == "k1":
        kl_BT = -d_BT
    elif estimator == "k2":
        kl_BT = d_BT.square() / 2
    elif estimator == "k3":
        d_BT = d_BT.clamp(max=MAX_LOG_RATIO)
        kl_BT = d_BT.expm1() - d_BT
    else:
        raise ValueError(f"estimate_kl: got estimator {estimator!r}, expected 'k1', 'k2' or 'k3'")
    if old_logprobs_BT is None:
        return kl_BT
    return kl_BT * log_ratios(policy_logprobs_BT, old_logprobs_BT, loss_mask_BT).exp()


def count_clamped_kl(
    policy_logprobs_BT: Tensor,
    reference_logprobs_BT: Tensor,
    loss_mask_BT: Tensor,
    *,
    estimator: Estimator,
    old_logprobs_BT: Tensor | None = None,
) -> Tensor:
    """Return the number of unmasked tokens at which `estimate_kl` clamps: d in k3, or the log-ratio to old."""
    d_BT = -exact_log_ratios(policy_logprobs_BT.detach(), reference_logprobs_BT, loss_mask_BT)
    beyond_BT = d_BT.clamp(min=0) if estimator == "k3" else d_BT * 0
    if old_logprobs_BT is not None:
        ratios_BT = exact_log_ratios(policy_logprobs_BT.detach(), old_logprobs_BT, loss_mask_BT)
        beyond_BT = beyond_BT.maximum(ratios_BT.abs())
    return count_clamped(beyond_BT, loss_mask_BT)
