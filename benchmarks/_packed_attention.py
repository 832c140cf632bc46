"""The attention of packed rows alone, forward and backward, beside rows one at a time and beside rows of like lengths
padded into one call. Heads as SmolLM2-135M has them; many short rows, and few long ones. On a GPU in bfloat16, there
with the kernel that knows lengths; on a CPU in float32, where rows one at a time are what is used."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from rftstream.backends.torch.attention import attend, attend_by_run, has_varlen_kernel, run_lengths
from rftstream.core.packing import ROOT

HEADS, GROUPS, WIDTH = 9, 3, 64
SHORT_ROWS = tuple(22 + number * 7 % 39 for number in range(64))
LONG_ROWS = tuple(range(64, 513, 64))
REPEATS = 5


def times(lengths: tuple[int, ...]) -> dict[str, float]:
    """Return the seconds of each way, the best of REPEATS."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    made = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, sum(lengths), WIDTH, generator=made).to(device, dtype).requires_grad_()
        for heads in (HEADS, GROUPS, GROUPS)
    )
    mask = run_lengths(lengths)
    module: Any = None
    ways: dict[str, Callable[[], Tensor]] = {
        "used": lambda: attend(module, query, key, value, mask)[0],
        "padded": lambda: _padded(query, key, value, lengths),
    }
    if has_varlen_kernel(query, value):  # else that is what is used
        ways["by row"] = lambda: attend_by_run(query, key, value, lengths, (ROOT,) * len(lengths))
    outputs = {name: way().detach().float() for name, way in ways.items()}
    assert all(torch.allclose(one, outputs["padded"], rtol=2e-2, atol=2e-2) for one in outputs.values())
    found = dict.fromkeys(ways, float("inf"))
    for _ in range(REPEATS):
        for name, way in ways.items():
            found[name] = min(found[name], _seconds(way, device))
    return found


def _seconds(way: Callable[[], Tensor], device: str) -> float:
    began = time.perf_counter()
    way().float().square().sum().backward()  # type: ignore[no-untyped-call]
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _padded(query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Rows sorted by length, and padded together as long as that adds a quarter at most. [1, P, H, D]."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    parts: list[list[int]] = []
    for row in order:
        if parts and (len(parts[-1]) + 1) * lengths[parts[-1][0]] <= 1.25 * sum(
            lengths[one] for one in (*parts[-1], row)
        ):
            parts[-1].append(row)
        else:
            parts.append([row])
    rows = [array[0].transpose(0, 1).split(list(lengths)) for array in (query, key, value)]  # type: ignore[no-untyped-call]
    outputs: dict[int, Tensor] = {}
    for part in parts:
        queries, keys, values = (
            pad_sequence([own[row] for row in part], batch_first=True).transpose(1, 2) for own in rows
        )
        output = scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True).transpose(1, 2)
        outputs |= {row: one[: lengths[row]] for row, one in zip(part, output.unbind(), strict=True)}
    return torch.cat([outputs[row] for row in range(len(lengths))])[None]
