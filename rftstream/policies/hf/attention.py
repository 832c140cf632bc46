"""The attention that `hf` registers with transformers: its own `sdpa`, which also takes rows packed into one sequence,
and does not copy grouped keys and values on a CPU.

If there is a mask, transformers repeats grouped keys and values for every query head, because GPU kernels need that. On
a CPU the repetition copies the whole cache in every layer of every decoding step; PyTorch's CPU kernel does not need
it.
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
    """Return the mask for a kind of layer. transformers calls it in each pass, with the kind's `mask_function`."""
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
    """Compute attention with the interface of transformers' attention functions. query [B, H, L, D], output [B, L, H,
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
    """Return the output [B, L, H, D]. Without a mask, each of the L tokens attends to earlier ones, as in
    transformers."""
    is_causal = mask is None and query.shape[2] > 1
    if query.device.type != "cpu" or is_causal or settings.get("position_bias") is not None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        theirs: Tensor = sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, **settings
        )[0]
        return theirs
    shape = query.shape
    if query.shape[2] == 1:  # treat the heads of a group like tokens: their keys are then read once for all of them
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
