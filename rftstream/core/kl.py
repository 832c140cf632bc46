"""Divergence from a reference policy, per token. Shapes: B rows, T padded tokens."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from rftstream.core.losses import MAX_LOG_RATIO
from rftstream.core.masks import check_rows, keep

Estimator = Literal["k1", "k2", "k3"]


def estimate_kl(
    policy_logprobs_BT: Tensor, reference_logprobs_BT: Tensor, loss_mask_BT: Tensor, *, estimator: Estimator
) -> Tensor:
    """KL(policy || reference) from the sampled tokens, with gradient through the policy.

    d = logp_ref - logp_policy;  k1 = -d;  k2 = d^2 / 2;  k3 = exp(d) - d - 1  (joschu.net/blog/kl-approx.html).
    k1 and k3 are unbiased, k2 and k3 never negative. As a loss on samples of the policy, the expected gradient of k1 is
    zero, and that of k2 is the divergence's.

    All arrays: float [B, T]; the reference is taken as a constant, masked positions may hold anything. Returns float
    [B, T], 0 at masked positions.
    """
    check_rows("estimate_kl", policy_logprobs=policy_logprobs_BT, reference_logprobs=reference_logprobs_BT,
               loss_mask=loss_mask_BT)  # fmt: skip
    reference_BT = keep(reference_logprobs_BT.detach(), loss_mask_BT)
    d_BT = (reference_BT - keep(policy_logprobs_BT, loss_mask_BT)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return -d_BT
    if estimator == "k2":
        return d_BT.square() / 2
    if estimator == "k3":
        return d_BT.expm1() - d_BT
    raise ValueError(f"estimate_kl: got estimator {estimator!r}, expected 'k1', 'k2' or 'k3'")
