"""Losses for learning from the outputs of others. Shapes: B rows, T padded tokens, P pairs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rftstream.core.masks import apply_mask, check_rows, positive, reduce_loss
from rftstream.core.ratios import exact_log_ratios


def imitation_loss(
    policy_logprobs_BT: Tensor,
    weights_BT: Tensor,
    loss_mask_BT: Tensor,
    *,
    num_tokens: float,
    num_rows: float,
    normalise: str = "token",
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the cross entropy of an expert's output: l = - w logp_theta, averaged as described for
    `masks.reduce_loss`.

    All arrays: float [B, T]; weights are taken as constants. Masked positions may hold anything. Returns the scalar
    loss (0 when everything is masked) and sums over unmasked tokens: nll, probability.
    """
    check_rows("imitation_loss", policy_logprobs=policy_logprobs_BT, weights=weights_BT, loss_mask=loss_mask_BT)
    kept_BT = apply_mask(policy_logprobs_BT, loss_mask_BT)
    losses_BT = -apply_mask(weights_BT.detach(), loss_mask_BT) * kept_BT
    loss = reduce_loss(losses_BT, loss_mask_BT, normalise, num_tokens=num_tokens, num_rows=num_rows)
    probability_BT = apply_mask(kept_BT.detach().exp(), loss_mask_BT)
    return loss, {"nll": -kept_BT.detach().sum(), "probability": probability_BT.sum()}


def phi_weights(policy_logprobs_BT: Tensor, loss_mask_BT: Tensor) -> Tensor:
    """Return phi = p (1 - p), which is largest where the policy is undecided: tokens that it knows already or finds
    absurd count little (CHORD, arXiv 2508.11408). A constant, float [B, T], 0 at masked positions."""
    check_rows("phi_weights", policy_logprobs=policy_logprobs_BT, loss_mask=loss_mask_BT)
    probability_BT = apply_mask(policy_logprobs_BT.detach(), loss_mask_BT).exp()
    return apply_mask(probability_BT * (1 - probability_BT), loss_mask_BT)


def preference_loss(
    policy_logprobs_BT: Tensor,
    reference_logprobs_BT: Tensor,
    pairs_B: Tensor,
    signs_B: Tensor,
    weights_B: Tensor,
    loss_mask_BT: Tensor,
    *,
    beta: float,
    label_smoothing: float,
    num_pairs: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the DPO loss (arXiv 2305.18290): l = - w log sigmoid(beta ((logp_c - ref_c) - (logp_r - ref_r))), with
    logprobs summed over tokens, averaged over pairs. Label smoothing e gives (1 - e) of it plus e of the loss with the
    sides swapped (Mitchell's conservative DPO).

    policy, reference, mask: float [B, T]. pairs_B: int64 [B], rows of a pair share a number. signs_B: 1 for chosen, -1
    for rejected. weights_B: of its pair. A pair may have several rows a side, all of them here; a pair of which one
    side is missing is a ValueError. beta above 0, label_smoothing from 0 to 1. Nothing is clamped. Returns the scalar
    loss, and sums over pairs: accuracy, margin, chosen_reward, rejected_reward; and pairs, their number.
    """
    if not beta > 0 or not 0 <= label_smoothing <= 1:
        raise ValueError(
            f"preference_loss: got beta {beta} and label_smoothing {label_smoothing}, expected beta above 0 and "
            "label_smoothing in [0, 1]"
        )
    check_rows(
        "preference_loss",
        policy_logprobs=policy_logprobs_BT,
        reference_logprobs=reference_logprobs_BT,
        loss_mask=loss_mask_BT,
    )
    log_ratios_B1 = exact_log_ratios(policy_logprobs_BT, reference_logprobs_BT, loss_mask_BT, level="sequence")
    rewards_B = beta * log_ratios_B1[:, 0]
    numbers_P, places_B = torch.unique(pairs_B, return_inverse=True)
    signed_B, zeros_P = signs_B.to(rewards_B.dtype), rewards_B.new_zeros(len(numbers_P))
    _check_sides(numbers_P, places_B, signed_B)
    margins_P = zeros_P.index_add(0, places_B, signed_B * rewards_B)
    weights_P = zeros_P.index_copy(0, places_B, weights_B.to(rewards_B.dtype))
    smooth = label_smoothing
    losses_P = -(1 - smooth) * logsigmoid(margins_P) - smooth * logsigmoid(-margins_P)
    loss = (weights_P * losses_P).sum() / positive(num_pairs)
    rewards_B = rewards_B.detach()
    return loss, {
        "pairs": margins_P.new_tensor(float(len(margins_P))),
        "accuracy": (margins_P.detach() > 0).to(loss.dtype).sum(),
        "margin": margins_P.detach().sum(),
        "chosen_reward": (rewards_B * (signed_B > 0)).sum(),
        "rejected_reward": (rewards_B * (signed_B < 0)).sum(),
    }


def bradley_terry_loss(
    scores_B: Tensor,
    pairs_B: Tensor,
    signs_B: Tensor,
    weights_B: Tensor,
    margins_B: Tensor,
    *,
    centring: float,
    num_pairs: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the Bradley-Terry loss on scores: l = - w log sigmoid(r_c - r_r - m) + centring (r_c + r_r)^2, averaged
    over pairs.

    Ouyang et al. (arXiv 2203.02155, formula 1), with the margin m of Llama 2 (arXiv 2307.09288, formula 2) and the
    regulariser of Eisenstein et al. (arXiv 2312.09244).

    scores: float [B], one row a side. pairs_B: int64 [B], the two rows of a pair share a number. signs_B: 1 for chosen,
    -1 for rejected. weights_B, margins_B: of its pair, taken as constants. A pair of which one side is missing is a
    ValueError. centring at least 0. Returns the scalar loss, and sums over pairs: accuracy (a half where the scores are
    equal), margin, chosen_reward, rejected_reward; and pairs, their number.
    """
    if not centring >= 0:
        raise ValueError(f"bradley_terry_loss: got centring {centring}, expected at least 0")
    numbers_P, places_B = torch.unique(pairs_B, return_inverse=True)
    signed_B, zeros_P = signs_B.to(scores_B.dtype), scores_B.new_zeros(len(numbers_P))
    _check_sides(numbers_P, places_B, signed_B)
    gaps_P = zeros_P.index_add(0, places_B, signed_B * scores_B)
    sums_P = zeros_P.index_add(0, places_B, scores_B)
    weights_P, margins_P = (
        zeros_P.index_copy(0, places_B, one_B.detach().to(scores_B.dtype)) for one_B in (weights_B, margins_B)
    )
    losses_P = -weights_P * logsigmoid(gaps_P - margins_P) + centring * sums_P.square()
    scores_B, gaps_P = scores_B.detach(), gaps_P.detach()
    return losses_P.sum() / positive(num_pairs), {
        "pairs": gaps_P.new_tensor(float(len(gaps_P))),
        "accuracy": ((gaps_P > 0).to(gaps_P.dtype) + 0.5 * (gaps_P == 0)).sum(),
        "margin": gaps_P.sum(),
        "chosen_reward": (scores_B * (signed_B > 0)).sum(),
        "rejected_reward": (scores_B * (signed_B < 0)).sum(),
    }


def _check_sides(numbers_P: Tensor, places_B: Tensor, signed_B: Tensor) -> None:
    if bool((signed_B.abs() != 1).any()):
        raise ValueError("preference_loss: signs hold values that are neither 1 nor -1, expected 1 for chosen rows")
    zeros_P = torch.zeros(len(numbers_P), dtype=signed_B.dtype, device=signed_B.device)
    chosen_P, rejected_P = (zeros_P.index_add(0, places_B, (signed_B == sign).to(zeros_P.dtype)) for sign in (1, -1))
    one_sided_P = (chosen_P == 0) | (rejected_P == 0)
    if bool(one_sided_P.any()):
        raise ValueError(
            f"preference_loss: pair {int(numbers_P[one_sided_P][0])} has only one side, expected a chosen and a "
            "rejected one; leave such pairs out"
        )
