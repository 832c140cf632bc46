"""Off-policy corrections: tokens were sampled by another policy (older, another engine's rounding) than is trained.

rho = pi_old / pi_behavior per token, where old is the trainer's policy just before the update. Shapes: B rows, T
padded tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rftstream.core.losses import MAX_LOG_RATIO
from rftstream.core.masks import check_rows, keep


def truncated_importance_weights(
    old_logprobs_BT: Tensor, behavior_logprobs_BT: Tensor, loss_mask_BT: Tensor, *, cap: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Truncated importance sampling (TIS): weights that make up for who sampled, cut off above.

    w = sg clamp(rho, 0, cap), 0 at masked positions. IMPALA (arXiv 1802.01561); per token with cap 2 as in
    fengyao.notion.site/off-policy-rl.

    All arrays: float [B, T]; masked positions may hold anything. Returns float [B, T] without gradient, and sums over
    unmasked tokens: tis_weight, tis_truncated (tokens at the cap).
    """
    rho_BT = _ratios(old_logprobs_BT, behavior_logprobs_BT, loss_mask_BT)
    weights_BT = rho_BT.clamp(max=cap)
    return weights_BT, {"tis_weight": weights_BT.sum(), "tis_truncated": (rho_BT > cap).to(rho_BT.dtype).sum()}


def tapered_sequence_weights(
    policy_logprobs_BT: Tensor, behavior_logprobs_BT: Tensor, advantages_BT: Tensor, loss_mask_BT: Tensor, *, cap: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """TOPR's weights (arXiv 2503.14286): 1 for what was good, the truncated ratio of a whole row for what was bad.

    w = 1 where A >= 0;  w = sg clamp(exp(sum_t (logp_theta - logp_behav)), 0, cap) where A < 0;  0 at masked positions.

    All arrays: float [B, T]; masked positions may hold anything. Returns float [B, T] without gradient, and sums over
    unmasked tokens: taper_weight (of the bad ones), taper_truncated (tokens of rows at the cap).
    """
    check_rows("tapered_sequence_weights", policy_logprobs=policy_logprobs_BT, behavior_logprobs=behavior_logprobs_BT,
               advantages=advantages_BT, loss_mask=loss_mask_BT)  # fmt: skip
    log_ratio_BT = keep(policy_logprobs_BT.detach(), loss_mask_BT) - keep(behavior_logprobs_BT, loss_mask_BT)
    ratio_B1 = log_ratio_BT.sum(dim=1, keepdim=True).clamp(max=MAX_LOG_RATIO).exp()
    bad_BT = keep(advantages_BT.detach(), loss_mask_BT) < 0
    weights_BT = keep(torch.where(bad_BT, ratio_B1.clamp(max=cap), torch.ones_like(ratio_B1)), loss_mask_BT)
    at_cap_BT = bad_BT & (ratio_B1 > cap)
    return weights_BT, {
        "taper_weight": torch.where(bad_BT, weights_BT, torch.zeros_like(weights_BT)).sum(),
        "taper_truncated": at_cap_BT.to(weights_BT.dtype).sum(),
    }


def mismatch_sums(old_logprobs_BT: Tensor, behavior_logprobs_BT: Tensor, loss_mask_BT: Tensor) -> dict[str, Tensor]:
    """How far sampler and trainer are apart, as sums over unmasked tokens.

    mismatch_k3 = rho - log rho - 1 (an unbiased, non-negative estimate of KL(behavior || old));  rho and rho_square
    are for the effective sample size. Arrays: float [B, T].
    """
    rho_BT = _ratios(old_logprobs_BT, behavior_logprobs_BT, loss_mask_BT)
    log_rho_BT = torch.where(loss_mask_BT > 0, rho_BT, 1.0).log()
    return {
        "mismatch_k3": keep(rho_BT - log_rho_BT - 1, loss_mask_BT).sum(),
        "rho": rho_BT.sum(),
        "rho_square": rho_BT.square().sum(),
    }


def effective_sample_size(mean_rho: float, mean_rho_square: float) -> float:
    """Share of the tokens that the weighted ones are worth: (sum rho)^2 / (n sum rho^2), from means over n tokens.

    1 when all weights are equal; 0 without tokens.
    """
    return mean_rho**2 / mean_rho_square if mean_rho_square > 0 else 0.0


def _ratios(old_logprobs_BT: Tensor, behavior_logprobs_BT: Tensor, loss_mask_BT: Tensor) -> Tensor:
    check_rows("corrections", old_logprobs=old_logprobs_BT, behavior_logprobs=behavior_logprobs_BT,
               loss_mask=loss_mask_BT)  # fmt: skip
    old_BT, behavior_BT = keep(old_logprobs_BT.detach(), loss_mask_BT), keep(behavior_logprobs_BT, loss_mask_BT)
    return keep((old_BT - behavior_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), loss_mask_BT)
