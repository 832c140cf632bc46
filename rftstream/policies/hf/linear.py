"""Matrix products in bfloat16 and float16 on a CPU that has no instructions for them.

On such a CPU PyTorch computes products with more than a few rows many times more slowly than in float32. So this module
widens weights to float32 in pieces that fit into the CPU's cache, and rounds the results once. Such instructions do the
same: products and sums in float32, results in the narrow type.

Shapes: R rows, I inputs, O outputs."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

MIN_ROWS = 4
"""Products with fewer rows are left to PyTorch: it reads each weight once, and widening would cost more."""
PIECE = 1 << 20
"""Number of weights that are widened at once; they take 4 MiB."""


def lacks(dtype: torch.dtype) -> bool:
    """Return whether this CPU lacks instructions for products of a dtype."""
    if dtype == torch.bfloat16:
        return not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported()


def widen(model: nn.Module) -> None:
    """Make all linear layers of a model compute their products in float32. Their weights stay unchanged."""
    for layer in model.modules():
        if type(layer) is nn.Linear:
            layer.forward = functools.partial(_forward, layer)  # type: ignore[method-assign]


def _forward(layer: nn.Linear, inputs: Tensor) -> Tensor:
    if inputs.numel() < MIN_ROWS * layer.in_features:
        return nn.functional.linear(inputs, layer.weight, layer.bias)
    return product(inputs, layer.weight, layer.bias)


def product(inputs: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return inputs [..., I] times the weight plus the bias, [..., O], in the inputs' dtype."""
    rows_RI = inputs.reshape(-1, inputs.shape[-1]).float()
    output_RO = inputs.new_empty((len(rows_RI), len(weight_OI)))
    step = max(1, PIECE // weight_OI.shape[1])
    piece = rows_RI.new_empty((min(step, len(weight_OI)), weight_OI.shape[1]))
    for first in range(0, len(weight_OI), step):
        narrow = weight_OI[first : first + step]
        wide = piece[: len(narrow)].copy_(narrow)
        bias = None if bias_O is None else bias_O[first : first + step].float()
        output_RO[:, first : first + step] = nn.functional.linear(rows_RI, wide, bias)
    return output_RO.reshape(*inputs.shape[:-1], -1)
