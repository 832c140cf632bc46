"""The attention that trainers register with transformers: its own `sdpa`, plus packed rows and trees.

Packed tokens are cut into runs (`core.packing`). A run attends to its own tokens, causally, and to all runs on the path
to it; a packed row is a run without a path. So the cost is the sum of the rows' costs, less the queries that rows have
in common; with a mask over all tokens it would be the square of their total length. Lengths and parents of the runs are
passed in place of the mask, since every model passes a mask of four dimensions to its layers unchanged.

The keys of a path are copied together, as many as packed rows would have held. On a GPU the kernel of packed rows then
takes all runs, where there is one for the dtype and the heads (`has_varlen_kernel`). Flex attention would have to be
compiled for each device and kind of mask; the two were not compared on a GPU yet. Otherwise small runs (`SMALL`) of one
length share a call, and every other run has its own call; on a CPU the bits are the same. We found nothing better for
CPUs: padding rows of similar lengths into one call takes 0.9 to 2.3 times the CPU time, torch's varlen kernel does not
exist there, and flex attention has no backward pass. A prompt of 512 tokens with 8 answers of 64, forward and backward
on one core: 56 ms with a call for each run, 59 ms with one call for the prompt and one for each answer, merged by their
log-sum-exp in a backward pass of our own, 97 ms with one mask over all tokens, 242 ms with a call for each row (2,048
and 256 tokens: 0.71, 0.63, 1.57 and 2.25 s; 16 answers of 16 to 16 tokens: 5.6, 6.5, 7.1 and 13.6 ms).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rftstream.core.packing import ROOT, before, path_to

NAME = "rftstream_packed"

SHORT = 512
"""Longest row, in tokens, for which a CPU always computes attention in float32. In bfloat16 torch's kernel takes
several times as long for short rows, most of all in the backward pass (32 rows of 22 tokens: 32 ms instead of 6)."""

SMALL = 1024
"""Largest mean number of query elements per run for which runs of one length share a call: 256 rows of 5 to 7 tokens
with 4 heads of 16 take 6 ms with their backward pass, instead of 18 with a call for each row. For larger runs, copying
them together takes longer than separate calls."""

PIECE = 512
"""Most queries at once of a run that goes on from another: only attention over a row by itself leaves out what is
masked."""


def register() -> str:
    """Register this attention with transformers, and return its name for `attn_implementation`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, torch.compiler.disable(attend))  # type: ignore[no-untyped-call]
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


def run_lengths(lengths: Sequence[int], parents: Sequence[int] | None = None) -> Tensor:
    """Return the value in place of the attention mask: length and parent of each run, in order. It stays on the CPU,
    where it is read. Without parents each run is a row."""
    parents = [ROOT] * len(lengths) if parents is None else parents
    return torch.tensor([[*lengths], [*parents]], dtype=torch.int32)[None, None]


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
    lengths, parents = map(tuple, attention_mask[0, 0].tolist())
    has_trees = max(parents) != ROOT
    if dropout == 0.0 and has_varlen_kernel(query, value) and not (has_trees and _aligns_starts(query.device)):
        return _attend_runs(query, key, value, lengths, parents, sliding_window, scaling), None
    attend_all = attend_by_length if dropout == 0.0 and _are_small(query, lengths, parents) else attend_by_run
    more: dict[str, Any] = {"sliding_window": sliding_window, "dropout": dropout, "scaling": scaling}
    return attend_all(query, key, value, lengths, parents, **more), None


Ints = tuple[int, ...]


def _are_small(query: Tensor, lengths: Ints, parents: Ints) -> bool:
    """Return whether one call per length is faster: runs are small, and many have the same length."""
    if query.numel() > SMALL * len(lengths):
        return False
    return 4 * len(set(zip(lengths, before(lengths, parents), strict=True))) <= len(lengths)


def attend_by_length(
    query: Tensor, key: Tensor, value: Tensor, lengths: Ints, parents: Ints, **settings: Any
) -> Tensor:
    """Compute the attention of all runs of one length, and one length of path, in one call. Output [1, P, H, D], with
    the same bits as `attend_by_run`. `settings`: as for `_attend_run`."""
    order_P, places_P, keys_K, kinds = _by_length(lengths, parents, query.device)
    parts = []
    for array, places, has_path in (query, order_P, False), (key, keys_K, True), (value, keys_K, True):
        sizes = [(length + more * has_path) * count for length, more, count in kinds]
        parts.append(array.index_select(2, places).split(sizes, dim=2))  # type: ignore[no-untyped-call]
    outputs = []
    for (_, _, count), part in zip(kinds, zip(*parts, strict=True), strict=True):
        q, k, v = (array[0].unflatten(1, (count, -1)).transpose(0, 1) for array in part)  # [R, H, L, D]
        outputs.append(_attend_run(q, k, v, **settings).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, places_P)[None]


@functools.lru_cache(maxsize=2)
def _by_length(
    lengths: Ints, parents: Ints, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, tuple[tuple[int, int, int], ...]]:
    """Return the places of all tokens with runs of one kind together, the place of each packed token in that order, the
    places of all keys in that order, and for each kind its length, the length of its path, and the number of runs. All
    layers use the same result."""
    kinds = list(zip(lengths, before(lengths, parents), strict=True))
    order = sorted(range(len(lengths)), key=kinds.__getitem__)
    places = _places(lengths)
    order_P = np.concatenate([places[run] for run in order])
    keys_K = np.concatenate([places[one] for run in order for one in path_to(run, parents)])
    with torch.inference_mode(False):  # not inside inference mode: a later backward pass may need them
        tensors = (torch.from_numpy(one).to(device) for one in (order_P, np.argsort(order_P), keys_K))
        return *tensors, tuple((*kind, count) for kind, count in sorted(Counter(kinds).items()))  # type: ignore[return-value]


def _places(lengths: Ints) -> list[np.ndarray]:
    """Return the places of each run's tokens."""
    return np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])


def attend_by_run(query: Tensor, key: Tensor, value: Tensor, lengths: Ints, parents: Ints, **settings: Any) -> Tensor:
    """Compute the attention of each run in its own call. Output [1, P, H, D]. `settings`: as for `_attend_run`."""
    # split, since each separate slice would cost a gradient of the size of the whole
    queries, keys, values = (array.split(lengths, dim=2) for array in (query, key, value))  # type: ignore[no-untyped-call]
    outputs = []
    for run, queries_L in enumerate(queries):
        path = path_to(run, parents)
        over = (keys[run], values[run])
        if len(path) > 1:
            over = (torch.cat([keys[one] for one in path], dim=2), torch.cat([values[one] for one in path], dim=2))
        outputs.append(_attend_run(queries_L, *over, **settings))
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


def _attend_runs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Ints,
    parents: Ints,
    sliding_window: int | None,
    scaling: float | None,
) -> Tensor:
    """Compute all runs in one kernel."""
    from torch.nn.attention.varlen import varlen_attn

    dtype = _dtype(query)
    keys_K, offsets, key_offsets, longest_path = _paths(lengths, parents, query.device)
    query_PHD, key_PHD, value_PHD = (array[0].transpose(0, 1).to(dtype) for array in (query, key, value))
    if keys_K is not None:
        key_PHD, value_PHD = key_PHD.index_select(0, keys_K), value_PHD.index_select(0, keys_K)
    output_PHD = varlen_attn(
        query_PHD,
        key_PHD,
        value_PHD,
        offsets,
        key_offsets,
        max(lengths),
        longest_path,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),  # tokens before this one
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output_PHD, Tensor), "no more was asked for"
    return output_PHD[None]


@functools.lru_cache(maxsize=2)
def _paths(lengths: Ints, parents: Ints, device: torch.device) -> tuple[Tensor | None, Tensor, Tensor, int]:
    """Return the places of the keys of all runs, one run after another (None if these are the tokens as they are), the
    starts of the runs among queries and among keys with the end of the last, and the most keys of a run. All layers use
    the same result."""
    sizes = [length + more for length, more in zip(lengths, before(lengths, parents), strict=True)]
    with torch.inference_mode(False):
        offsets, key_offsets = (
            torch.tensor([0, *accumulate(one)], dtype=torch.int32).to(device) for one in (lengths, sizes)
        )
        if max(parents) == ROOT:
            return None, offsets, offsets, max(lengths)
        places = _places(lengths)
        keys_K = np.concatenate([places[one] for run in range(len(lengths)) for one in path_to(run, parents)])
        return torch.from_numpy(keys_K).to(device), offsets, key_offsets, max(sizes)


@functools.cache
def _aligns_starts(device: torch.device) -> bool:
    """Return whether the kernel takes the first of several keys for that of a single query, and not the last one. This
    is tried, since torch does not say it."""
    from torch.nn.attention.varlen import varlen_attn

    query_PHD, key_PHD = (torch.zeros(num, 1, 8, device=device, dtype=torch.bfloat16) for num in (1, 2))
    value_PHD = torch.tensor([0.0, 1.0], device=device, dtype=torch.bfloat16)[:, None, None].expand(2, 1, 8)
    offsets, key_offsets = (torch.tensor([0, num], device=device, dtype=torch.int32) for num in (1, 2))
    with torch.no_grad():
        found = varlen_attn(query_PHD, key_PHD, value_PHD.contiguous(), offsets, key_offsets, 1, 2, window_size=(-1, 0))
    assert isinstance(found, Tensor), "no more was asked for"
    return not bool((found == 0.5).all())


def _attend_run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
) -> Tensor:
    """Compute the attention of tokens over the keys of their path and their own, [R, H, L, D] and [R, G, K, D]."""
    length, more = query.shape[2], key.shape[2] - query.shape[2]
    if more and length > PIECE:
        pieces = []
        for start in range(0, length, PIECE):
            stop = min(start + PIECE, length)
            over = (array[:, :, : more + stop] for array in (key, value))
            pieces.append(
                _attend_run(
                    query[:, :, start:stop], *over, sliding_window=sliding_window, dropout=dropout, scaling=scaling
                )
            )
        return torch.cat(pieces, dim=2)
    mask = _band(length, more, sliding_window, query.device)
    widened = query.device.type == "cpu" and length <= SHORT and query.dtype != torch.float64
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


def _band(length: int, more: int, window: int | None, device: torch.device) -> Tensor | None:
    """Return which tokens of a run attend to which of the `more` tokens before it and its own, [length, more + length];
    None if there are none before it and each attends to all earlier ones."""
    if not more and (window is None or length <= window):
        return None
    places = torch.arange(more + length, device=device)
    distance = places[more:, None] - places[None]
    return (distance >= 0) & (distance < (window or more + length))
