"""Losses of policy gradients. Shapes: B rows, T padded tokens; position t speaks of token t given those before it."""

from __future__ import annotations

import torch
from torch import Tensor

from rftstream.core.masks import check_rows, keep, weigh

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut off here, with no gradient beyond: exp(20) is far outside any clip range, and finite."""


def ppo_clip_loss(
    policy_logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    loss_mask_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    num_tokens: float,
    num_rows: float,
    normalise: str = "token",
    dual_clip: float | None = None,
    weights_BT: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy gradient: a token whose ratio has left the range in the wished direction gives no gradient.

    r = exp(logp_theta - logp_old);  l = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A);  with dual_clip c and
    A < 0: l = min(l, -c A);  l is multiplied by weights_BT (off-policy correction), then averaged (`masks.weigh`).

    PPO (arXiv 1707.06347), its use in GRPO (2402.03300), two-sided range of DAPO (2503.14476), dual clip (1912.09729).

    All arrays: float [B, T]; old, advantages and weights are taken as constants. Masked positions may hold anything.
    Returns the scalar loss and sums over unmasked tokens: clip_fraction (tokens without gradient), ratio.
    """
    arrays = {"advantages": advantages_BT, "loss_mask": loss_mask_BT}
    check_rows("ppo_clip_loss", policy_logprobs=policy_logprobs_BT, old_logprobs=old_logprobs_BT, **arrays)
    advantages_BT = keep(advantages_BT.detach(), loss_mask_BT)
    log_ratio_BT = keep(policy_logprobs_BT, loss_mask_BT) - keep(old_logprobs_BT.detach(), loss_mask_BT)
    ratio_BT = log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain_BT = -ratio_BT * advantages_BT
    clipped_BT = -ratio_BT.clamp(1 - clip_low, 1 + clip_high) * advantages_BT
    losses_BT = torch.maximum(plain_BT, clipped_BT)
    cut_BT = clipped_BT > plain_BT
    if dual_clip is not None:
        bound_BT = -dual_clip * advantages_BT
        cut_BT = cut_BT | ((advantages_BT < 0) & (losses_BT > bound_BT))
        losses_BT = torch.where(advantages_BT < 0, torch.minimum(losses_BT, bound_BT), losses_BT)
    if weights_BT is not None:
        check_rows("ppo_clip_loss", loss_mask=loss_mask_BT, weights=weights_BT)
        losses_BT = losses_BT * keep(weights_BT.detach(), loss_mask_BT)
    loss = weigh(keep(losses_BT, loss_mask_BT), loss_mask_BT, normalise, num_tokens=num_tokens, num_rows=num_rows)
    metrics = {"clip_fraction": cut_BT.to(loss.dtype).sum(), "ratio": keep(ratio_BT.detach(), loss_mask_BT).sum()}
    return loss, metrics


def policy_gradient_loss(
    policy_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    loss_mask_BT: Tensor,
    *,
    num_rows: float,
    weights_BT: Tensor | None = None,
) -> Tensor:
    """Policy gradient without a ratio: L = - sum_it m_it w_it A_it logp_theta_it / num_rows.

    REINFORCE (Williams 1992): summed over the tokens of a row, averaged over rows, as the gradient of the expected
    reward has it. All arrays: float [B, T]; advantages and weights are taken as constants. Masked positions may hold
    anything. Returns a scalar; 0 when everything is masked.
    """
    check_rows("policy_gradient_loss", policy_logprobs=policy_logprobs_BT, advantages=advantages_BT,
               loss_mask=loss_mask_BT)  # fmt: skip
    losses_BT = -keep(advantages_BT.detach(), loss_mask_BT) * keep(policy_logprobs_BT, loss_mask_BT)
    if weights_BT is not None:
        check_rows("policy_gradient_loss", loss_mask=loss_mask_BT, weights=weights_BT)
        losses_BT = losses_BT * keep(weights_BT.detach(), loss_mask_BT)
    return losses_BT.sum() / max(num_rows, 1.0)


def entropy_bonus(
    entropy_BT: Tensor, loss_mask_BT: Tensor, *, num_tokens: float, num_rows: float, normalise: str = "token"
) -> Tensor:
    """Mean entropy of the policy at unmasked tokens, with gradient; to be subtracted from a loss.

    entropy_BT, loss_mask_BT: float [B, T]. Returns a scalar.
    """
    check_rows("entropy_bonus", entropy=entropy_BT, loss_mask=loss_mask_BT)
    kept_BT = keep(entropy_BT, loss_mask_BT)
    return weigh(kept_BT, loss_mask_BT, normalise, num_tokens=num_tokens, num_rows=num_rows)
