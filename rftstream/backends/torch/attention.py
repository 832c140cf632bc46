"""The attention that trainers register with transformers: its own `sdpa`, plus packed rows.

Packed rows do not attend to each other, and each is causal from its first token on. So the cost is the sum of the rows'
costs; with a block-diagonal mask it would be the square of their total length. The rows' lengths are passed in place of
the mask, since every model passes a mask of four dimensions to its layers unchanged.

On a GPU one kernel takes all rows, where there is one for the dtype and the heads (`has_varlen_kernel`). Otherwise
small rows (`SMALL`) of one length share a call, and every other row has its own call; on a CPU the bits are the same.
We found nothing better for CPUs: padding rows of similar lengths into one call takes 0.9 to 2.3 times the CPU time,
torch's varlen kernel does not exist there, and flex attention has no backward pass.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

NAME = "rftstream_packed"

SHORT = 512
"""Longest row, in tokens, for which a CPU always computes attention in float32. In bfloat16 torch's kernel takes
several times as long for short rows, most of all in the backward pass (32 rows of 22 tokens: 32 ms instead of 6)."""

SMALL = 1024
"""Largest mean number of query elements per row for which rows of one length share a call: 256 rows of 5 to 7 tokens
with 4 heads of 16 take 6 ms with their backward pass, instead of 18 with a call for each row. For larger rows, copying
them together takes longer than separate calls."""


def register() -> str:
    """Register this attention with transformers, and return its name for `attn_implementation`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, torch.compiler.disable(attend))  # type: ignore[no-untyped-call]
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


def row_lengths(lengths: Sequence[int]) -> Tensor:
    """Return the value in place of the attention mask: the lengths of the rows, in order. It stays on the CPU, where it
    is read."""
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
    """Compute attention with the interface of transformers' attention functions. query [1, H, P, D], output [1, P, H,
    D]."""
    if attention_mask is None or attention_mask.dtype != torch.int32:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **settings
        )
    offsets = attention_mask.flatten()
    lengths = offsets.diff().tolist()
    if dropout == 0.0 and has_varlen_kernel(query, value):
        return _attend_rows(query, key, value, offsets, max(lengths), sliding_window, scaling), None
    attend_all = attend_by_length if dropout == 0.0 and _are_small(query, lengths) else attend_by_row
    more: dict[str, Any] = {"sliding_window": sliding_window, "dropout": dropout, "scaling": scaling}
    return attend_all(query, key, value, lengths, **more), None


def _are_small(query: Tensor, lengths: Sequence[int]) -> bool:
    """Return whether one call per length is faster: rows are small, and many have the same length."""
    return query.numel() <= SMALL * len(lengths) and 4 * len(set(lengths)) <= len(lengths)


def attend_by_length(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], **settings: Any) -> Tensor:
    """Compute the attention of all rows of one length in one call. Output [1, P, H, D], with the same bits as
    `attend_by_row`. `settings`: as for `_attend_row`."""
    order_P, places_P, counts = _by_length(tuple(lengths))
    device = query.device
    order_P, places_P = order_P.to(device), places_P.to(device)
    sizes = [length * count for length, count in counts]
    parts = zip(*(one.index_select(2, order_P).split(sizes, dim=2) for one in (query, key, value)), strict=True)  # type: ignore[no-untyped-call]
    outputs = []
    for (length, count), part in zip(counts, parts, strict=True):
        q, k, v = (array[0].unflatten(1, (count, length)).transpose(0, 1) for array in part)  # [R, H, L, D]
        outputs.append(_attend_row(q, k, v, **settings).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, places_P)[None]


@functools.lru_cache(maxsize=2)
def _by_length(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor, tuple[tuple[int, int], ...]]:
    """Return the places of all tokens with rows of one length together, the place of each packed token in that order,
    and each length with its number of rows. All layers use the same result."""
    begins = [0, *accumulate(lengths)]
    rows = sorted(range(len(lengths)), key=lengths.__getitem__)
    with torch.inference_mode(False):  # not inside inference mode: a later backward pass may need them
        order_P = torch.tensor([place for row in rows for place in range(begins[row], begins[row + 1])])
        return order_P, torch.argsort(order_P), tuple(sorted(Counter(lengths).items()))


def attend_by_row(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], **settings: Any) -> Tensor:
    """Compute the attention of each row in its own call. Output [1, P, H, D]. `settings`: as for `_attend_row`."""
    # split, since each separate slice would cost a gradient of the size of the whole
    queries, keys, values = (array.split(lengths, dim=2) for array in (query, key, value))  # type: ignore[no-untyped-call]
    outputs = [_attend_row(*row, **settings) for row in zip(queries, keys, values, strict=True)]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def has_varlen_kernel(query: Tensor, value: Tensor) -> bool:
    """Return whether there is a kernel for rows of different lengths: on GPUs since Ampere, for 16-bit dtypes (those of
    autocast included), and for heads of equal width up to 256."""
    device, width = query.device, query.shape[-1]
    if device.type != "cuda" or value.shape[-1] != width or width > 256 or width % 8:
        return False
    if _dtype(query) not in (torch.bfloat16, torch.float16) or not _has_varlen_attn():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


@functools.cache
def _has_varlen_attn() -> bool:
    """Return whether this torch has the function with all arguments used here; older versions lack it, or some
    arguments."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"scale", "window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys()


def _dtype(query: Tensor) -> torch.dtype:
    """Return the dtype in which `scaled_dot_product_attention` would compute: autocast changes only float32."""
    device = query.device.type
    return torch.get_autocast_dtype(device) if _is_cast(query) else query.dtype


def _is_cast(query: Tensor) -> bool:
    return query.dtype == torch.float32 and torch.is_autocast_enabled(query.device.type)


def _attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    longest: int,
    sliding_window: int | None,
    scaling: float | None,
) -> Tensor:
    """Compute all rows in one kernel. `offsets`: the starts of the rows, and the end of the last; `longest`: tokens of
    the longest row."""
    from torch.nn.attention.varlen import varlen_attn

    dtype = _dtype(query)
    query_PHD, key_PHD, value_PHD = (array[0].transpose(0, 1).to(dtype) for array in (query, key, value))
    offsets = offsets.to(query.device, non_blocking=True)
    output_PHD = varlen_attn(
        query_PHD,
        key_PHD,
        value_PHD,
        offsets,
        offsets,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),  # tokens before this one
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output_PHD, Tensor), "no more was asked for"
    return output_PHD[None]


def _attend_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
) -> Tensor:
    mask = _band(query.shape[2], sliding_window, query.device)
    widened = query.device.type == "cpu" and query.shape[2] <= SHORT and query.dtype != torch.float64
    dtype = query.dtype
    if widened:
        query, key, value = query.float(), key.float(), value.float()
    is_cast = widened and torch.is_autocast_enabled(query.device.type)
    with torch.autocast(query.device.type, enabled=False) if is_cast else contextlib.nullcontext():
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
    """Return which tokens of a row attend to which, [length, length]; None if each attends to all earlier ones."""
    if window is None or length <= window:
        return None
    places = torch.arange(length, device=device)
    distance = places[:, None] - places[None]
    return (distance >= 0) & (distance < window)
