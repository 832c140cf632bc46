"""The attention that trainers ask transformers for: its own `sdpa`, and rows packed one after another into one.

Packed rows never see each other: each is a call of its own, causal from its first token on. So it costs what the rows
cost alone, where a block-diagonal mask over the whole would cost the square of their sum. Where a row begins travels
in the place of the mask, which every model hands through to its layers as it is, if it has four dimensions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

NAME = "rftstream_packed"

SHORT = 512
"""Tokens of a row up to which a CPU attends in float32 whatever it is asked for: in bfloat16, torch's kernel takes
several times as long for short rows, its backward most of all (32 rows of 22 tokens: 32 ms, beside 6)."""


def register() -> str:
    """Register this attention with transformers, and return its name for `attn_implementation`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, torch.compiler.disable(attend))  # type: ignore[no-untyped-call]
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


def row_lengths(lengths: Sequence[int]) -> Tensor:
    """Return what stands for the attention mask: the lengths of the rows, in order. It lies on the CPU, where it is
    read."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)[None, None, None]


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Compute attention as the function of the same place in transformers does. query [1, H, P, D], output [1, P, H,
    D]."""
    if attention_mask is None or attention_mask.dtype != torch.int32:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **settings
        )
    lengths = attention_mask.flatten().diff().tolist()
    # split, since each slice of its own would cost a gradient of the size of all of them
    queries, keys, values = (array.split(lengths, dim=2) for array in (query, key, value))  # type: ignore[no-untyped-call]
    outputs = [_attend_row(*row, sliding_window, dropout, scaling) for row in zip(queries, keys, values, strict=True)]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _attend_row(
    query: Tensor, key: Tensor, value: Tensor, sliding_window: int | None, dropout: float, scaling: float | None
) -> Tensor:
    mask = _band(query.shape[2], sliding_window, query.device)
    widened = query.device.type == "cpu" and query.shape[2] <= SHORT and query.dtype != torch.float64
    dtype = query.dtype
    if widened:
        query, key, value = query.float(), key.float(), value.float()
    with torch.autocast(query.device.type, enabled=False) if widened else contextlib.nullcontext():
        output = torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    return output.to(dtype)


def _band(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Return which of a row's tokens see which, [length, length]; None if each sees all that come before."""
    if window is None or length <= window:
        return None
    places = torch.arange(length, device=device)
    distance = places[:, None] - places[None]
    return (distance >= 0) & (distance < window)
