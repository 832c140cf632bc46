"""Ratios of two policies' probabilities, in logarithms. Shapes: B rows, T padded tokens."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from rftstream.core.masks import apply_mask, check_rows

Level = Literal["token", "sequence", "geometric"]

MAX_LOG_RATIO = 20.0
"""Limit of log-ratios that are exponentiated, with no gradient beyond: exp(20) is far outside any clip range, and
finite. Other log-ratios are not limited."""


def exact_log_ratios(
    numerator_logprobs_BT: Tensor, denominator_logprobs_BT: Tensor, loss_mask_BT: Tensor, *, level: Level = "token"
) -> Tensor:
    """Return the exact log(p / q) of each token, or of all unmasked tokens of a row together.

    token: d = logp - logq, [B, T];  sequence: sum_t d, [B, 1];  geometric: sum_t d / n, [B, 1], with n unmasked tokens.

    Arrays: float [B, T], masked positions may hold anything. The gradient goes through the numerator alone; 0 at masked
    positions, and for rows without an unmasked token.
    """
    check_rows(
        "log_ratios",
        numerator_logprobs=numerator_logprobs_BT,
        denominator_logprobs=denominator_logprobs_BT,
        loss_mask=loss_mask_BT,
    )
    found_BT = apply_mask(numerator_logprobs_BT, loss_mask_BT) - apply_mask(
        denominator_logprobs_BT.detach(), loss_mask_BT
    )
    if level == "sequence":
        found_BT = found_BT.sum(dim=1, keepdim=True)
    elif level == "geometric":
        lengths_B1 = (loss_mask_BT > 0).to(found_BT.dtype).sum(dim=1, keepdim=True)
        found_BT = found_BT.sum(dim=1, keepdim=True) / lengths_B1.clamp(min=1)
    elif level != "token":
        raise ValueError(f"log_ratios: got level {level!r}, expected 'token', 'sequence' or 'geometric'")
    return found_BT


def log_ratios(
    numerator_logprobs_BT: Tensor, denominator_logprobs_BT: Tensor, loss_mask_BT: Tensor, *, level: Level = "token"
) -> Tensor:
    """Return `exact_log_ratios` for use in an exponential: clamped to +-20 after the sum or mean, with no gradient
    beyond."""
    return clamped(exact_log_ratios(numerator_logprobs_BT, denominator_logprobs_BT, loss_mask_BT, level=level))


def clamped(log_ratios_BT: Tensor) -> Tensor:
    """Clamp to +-20, with no gradient beyond."""
    return log_ratios_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def count_clamped(log_ratios_BT: Tensor, loss_mask_BT: Tensor) -> Tensor:
    """Return the number of unmasked tokens whose exact log-ratio is beyond +-20; [B, 1] applies to all tokens of a
    row."""
    beyond_BT = (log_ratios_BT.detach().abs() > MAX_LOG_RATIO) & (loss_mask_BT > 0)
    return beyond_BT.to(loss_mask_BT.dtype).sum()
