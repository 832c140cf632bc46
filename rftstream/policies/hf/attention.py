"""The attention that `hf` asks transformers for: its own `sdpa`, which also takes rows packed into one sequence, and
makes no copies of grouped keys and values on a CPU.

transformers repeats keys and values of grouped heads for every query head when there is a mask, because kernels of
GPUs want it so. On a CPU that copies the whole cache in every layer of every decoding step; PyTorch's kernel there
takes them as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rftstream.policies.hf.packed import PackedMask, PackedRows

NAME = "rftstream_sdpa"


def register() -> str:
    """Register this attention with transformers, and return its name for `attn_implementation`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)
    return NAME


def make_mask(*, attention_mask: Any = None, **settings: Any) -> Any:
    """Return the mask of a kind of layer. transformers calls it in each pass, with that kind's `mask_function`."""
    from transformers.masking_utils import sdpa_mask

    if isinstance(attention_mask, PackedRows):
        return attention_mask.mask(settings["mask_function"], settings["dtype"])
    return sdpa_mask(attention_mask=attention_mask, **settings)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | PackedMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Compute attention as the function of the same place in transformers does. query [B, H, L, D], output [B, L, H,
    D]. With rows packed into one sequence, B is 1, and keys and values are all slots of the cache."""

    def compute(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return _sdpa(module, query, key, value, mask, dropout, scaling, settings)

    if isinstance(attention_mask, PackedMask):
        return attention_mask.attend(compute, query, key, value).contiguous(), None
    return compute(query, key, value, attention_mask).contiguous(), None


def _sdpa(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    settings: dict[str, Any],
) -> Tensor:
    """Return the output [B, L, H, D]. Without a mask, L tokens see what stands before them, as in transformers."""
    is_causal = mask is None and query.shape[2] > 1
    if query.device.type != "cpu" or is_causal or settings.get("position_bias") is not None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        theirs: Tensor = sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, **settings
        )[0]
        return theirs
    shape = query.shape
    if query.shape[2] == 1:  # heads of a group as if they were tokens: their keys are then read once for all of them
        query = query.reshape(shape[0], key.shape[1], -1, shape[3])
    output = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.reshape(*shape[:3], -1).transpose(1, 2)
