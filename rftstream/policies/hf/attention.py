"""The attention that `hf` registers with transformers: its own `sdpa`, which also takes rows packed into one sequence,
and does not copy grouped keys and values on a CPU.

If there is a mask, transformers repeats grouped keys and values for every query head, because GPU kernels need that. On
a CPU the repetition copies the whole cache in every layer of every decoding step; PyTorch's CPU kernel does not need
it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from rftstream.policies.hf.packed import PackedMask, PackedRows

NAME, OWN_NAME = "rftstream_sdpa", "rftstream_eager"


def register() -> tuple[str, str]:
    """Register both kinds of attention with transformers, and return their names for `attn_implementation`: `sdpa`, and
    for models whose scores need more than that, such as sinks and soft caps, their own eager attention."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for name, compute in ((NAME, attend), (OWN_NAME, attend_as_eager)):
        AttentionInterface.register(name, compute)
        AttentionMaskInterface.register(name, make_mask if name == NAME else make_eager_mask)
    return NAME, OWN_NAME


def make_mask(*, attention_mask: Any = None, **settings: Any) -> Any:
    """Return the mask for a kind of layer. transformers calls it in each pass, with the kind's `mask_function`."""
    from transformers.masking_utils import sdpa_mask

    if isinstance(attention_mask, PackedRows):
        return attention_mask.mask(settings["mask_function"], settings["dtype"])
    return sdpa_mask(attention_mask=attention_mask, **settings)


def make_eager_mask(*, attention_mask: Any = None, **settings: Any) -> Any:
    """Return the same mask as numbers that are added to scores, as eager attention needs it."""
    from transformers.masking_utils import eager_mask

    if isinstance(attention_mask, PackedRows):
        return attention_mask.mask(settings["mask_function"], settings["dtype"])
    return eager_mask(attention_mask=attention_mask, **settings)


def attend_as_eager(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | PackedMask | None,
    **settings: Any,
) -> tuple[Tensor, Any]:
    """Compute attention with the eager function of the model's own code, of packed rows as `attend` does."""
    eager = sys.modules[type(module).__module__].eager_attention_forward
    if not isinstance(attention_mask, PackedMask):
        found: tuple[Tensor, Any] = eager(module, query, key, value, attention_mask, **settings)
        return found

    def compute(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        output: Tensor = eager(module, query, key, value, mask, **settings)[0]
        return output

    return attention_mask.attend(compute, query, key, value).contiguous(), None


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
