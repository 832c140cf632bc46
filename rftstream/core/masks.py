"""Masked sums. What stands at masked positions, NaN included, reaches neither value nor gradient."""

from __future__ import annotations

import torch
from torch import Tensor


def keep(values_BT: Tensor, loss_mask_BT: Tensor) -> Tensor:
    """The values where the mask is set, else 0 with no gradient."""
    return torch.where(loss_mask_BT > 0, values_BT, torch.zeros((), dtype=values_BT.dtype, device=values_BT.device))


def weigh(losses_BT: Tensor, loss_mask_BT: Tensor, normalise: str, *, num_tokens: float, num_rows: float) -> Tensor:
    """One number from the losses of tokens; the denominators are those of the whole optimizer step.

    token: sum_it m_it l_it / num_tokens.  sequence: sum_i (sum_t m_it l_it / sum_t m_it) / num_rows, rows without an
    unmasked token left out.  sum: sum_it m_it l_it / num_rows.

    losses_BT: float [B, T], already 0 at masked positions. Returns a scalar; 0 when everything is masked.
    """
    if normalise == "token":
        return losses_BT.sum() / max(num_tokens, 1.0)
    if normalise == "sequence":
        lengths_B = loss_mask_BT.to(losses_BT.dtype).sum(dim=1).clamp(min=1)
        return (losses_BT.sum(dim=1) / lengths_B).sum() / max(num_rows, 1.0)
    if normalise == "sum":
        return losses_BT.sum() / max(num_rows, 1.0)
    raise ValueError(f"weigh: got normalise {normalise!r}, expected 'token', 'sequence' or 'sum'")


def check_rows(where: str, **arrays_BT: Tensor) -> None:
    """All float [B, T] of one shape, or ValueError and TypeError that name the odd one."""
    shape = None
    for name, array in arrays_BT.items():
        if array.ndim != 2:
            raise ValueError(f"{where}: {name} has shape {tuple(array.shape)}, expected [B, T]")
        if shape is not None and array.shape != shape:
            raise ValueError(f"{where}: {name} has shape {tuple(array.shape)}, expected {tuple(shape)} as the others")
        if not array.is_floating_point():
            raise TypeError(f"{where}: {name} is {array.dtype}, expected a float type")
        shape = array.shape
