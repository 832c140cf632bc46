"""The attention that `hf` asks transformers for: its own `sdpa`, without copies of grouped keys and values on a CPU.

transformers repeats keys and values of grouped heads for every query head when there is a mask, because kernels of
GPUs want it so. On a CPU that copies the whole cache in every layer of every decoding step; PyTorch's kernel there
takes them as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NAME = "rftstream_sdpa"


def register() -> str:
    """Register this attention with transformers, and return its name for `attn_implementation`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Compute attention as the function of the same place in transformers does. query [B, H, L, D], output [B, L, H,
    D]."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if query.device.type != "cpu" or attention_mask is None or settings.get("position_bias") is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **settings
        )
    output = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).contiguous(), None
