"""Ratios of two policies' probabilities, in logarithms. Shapes: B rows, T padded tokens."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from rftstream.core.masks import check_rows, keep

Level = Literal["token", "sequence", "geometric"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut off here, with no gradient beyond: exp(20) is far outside any clip range, and finite."""


def log_ratios(
    numerator_logprobs_BT: Tensor, denominator_logprobs_BT: Tensor, loss_mask_BT: Tensor, *, level: Level = "token"
) -> Tensor:
    """log(p / q) of each token, or of the unmasked tokens of a row together.

    token: d = logp - logq, [B, T];  sequence: sum_t d, [B, 1];  geometric: sum_t d / n, [B, 1], with n unmasked tokens.
    Cut off at +-20 after the sum or mean.

    Arrays: float [B, T], masked positions may hold anything. The gradient goes through the numerator alone; 0 at masked
    positions, and for rows without an unmasked token.
    """
    check_rows("log_ratios", numerator_logprobs=numerator_logprobs_BT, denominator_logprobs=denominator_logprobs_BT,
               loss_mask=loss_mask_BT)  # fmt: skip
    found_BT = keep(numerator_logprobs_BT, loss_mask_BT) - keep(denominator_logprobs_BT.detach(), loss_mask_BT)
    if level == "sequence":
        found_BT = found_BT.sum(dim=1, keepdim=True)
    elif level == "geometric":
        lengths_B1 = (loss_mask_BT > 0).to(found_BT.dtype).sum(dim=1, keepdim=True)
        found_BT = found_BT.sum(dim=1, keepdim=True) / lengths_B1.clamp(min=1)
    elif level != "token":
        raise ValueError(f"log_ratios: got level {level!r}, expected 'token', 'sequence' or 'geometric'")
    return found_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
