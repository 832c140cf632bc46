"""Masked sums. Values at masked positions, NaN included, affect neither result nor gradient."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = frozenset({torch.float32, torch.float64})


def apply_mask(values_BT: Tensor, loss_mask_BT: Tensor) -> Tensor:
    """Return the values where the mask is set, otherwise 0 without gradient."""
    return torch.where(loss_mask_BT > 0, values_BT, torch.zeros((), dtype=values_BT.dtype, device=values_BT.device))


def reduce_loss(
    losses_BT: Tensor, loss_mask_BT: Tensor, normalise: str, *, num_tokens: float, num_rows: float
) -> Tensor:
    """Reduce the losses of tokens to one number. The denominators are those of the whole optimizer step.

    token: sum_it m_it l_it / num_tokens.  sequence: sum_i (sum_t m_it l_it / sum_t m_it) / num_rows, rows without an
    unmasked token left out.  sum: sum_it m_it l_it / num_rows.

    losses_BT: float [B, T], already 0 at masked positions. The denominators may be below 1: a mini-batch has its share
    of the batch's. Returns a scalar; 0 when everything is masked.
    """
    check_rows("reduce_loss", losses=losses_BT, loss_mask=loss_mask_BT)
    if normalise == "token":
        return losses_BT.sum() / positive(num_tokens)
    if normalise == "sequence":
        lengths_B = loss_mask_BT.to(losses_BT.dtype).sum(dim=1).clamp(min=1)
        return (losses_BT.sum(dim=1) / lengths_B).sum() / positive(num_rows)
    if normalise == "sum":
        return losses_BT.sum() / positive(num_rows)
    raise ValueError(f"reduce_loss: got normalise {normalise!r}, expected 'token', 'sequence' or 'sum'")


def positive(denominator: float) -> float:
    """Return the denominator, or 1 in place of 0, since then there is nothing to divide."""
    return denominator if denominator > 0 else 1.0


def check_rows(where: str, **arrays_BT: Tensor) -> None:
    """Raise unless all arrays are float32 or float64 [B, T] of one shape, and the loss mask consists of 0 and 1.

    ValueError and TypeError name the wrong array. Half precision is refused: exponentials here reach exp(20), and
    float16 ends at 65504. The content of a loss mask is checked only on CPUs. Elsewhere the check would wait for the
    device, and the mask was checked before it was sent.
    """
    shape = None
    for name, array in arrays_BT.items():
        if array.ndim != 2:
            raise ValueError(f"{where}: {name} has shape {tuple(array.shape)}, expected [B, T]")
        if shape is not None and array.shape != shape:
            raise ValueError(f"{where}: {name} has shape {tuple(array.shape)}, expected {tuple(shape)} as the others")
        if not array.is_floating_point():
            raise TypeError(f"{where}: {name} is {array.dtype}, expected a float type")
        if array.dtype not in FLOATS:
            raise TypeError(f"{where}: {name} is {array.dtype}, expected float32 or float64; convert it before")
        shape = array.shape
    mask_BT = arrays_BT.get("loss_mask")
    if mask_BT is not None and mask_BT.device.type == "cpu" and bool(((mask_BT != 0) & (mask_BT != 1)).any()):
        raise ValueError(f"{where}: loss_mask holds values that are neither 0 nor 1, expected 1 where a token counts")
