"""Tensors as bytes, for serving and for saving, without a second copy of the model."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rftstream.weights.snapshot import DTYPES, Master, RawTensor, write_snapshot

REFERENCE_FILE = "reference.safetensors"
"""Checkpoint file with the masters of a renewed reference."""

SERVED = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class ServedTensors(Mapping[str, RawTensor]):
    """A model's weights in the served dtype. Each tensor is converted when it is requested, so that at most one tensor
    is in memory twice. A backend makes it, and a publisher reads it before the next update."""

    def __init__(self, tensors: Mapping[str, Tensor], dtype: str, kept: Mapping[str, RawTensor] | None = None) -> None:
        """`kept`: further tensors, which are served as they are."""
        self._tensors, self._dtype, self._kept = tensors, SERVED[dtype], kept or {}

    def __getitem__(self, name: str) -> RawTensor:
        if name in self._kept:
            return self._kept[name]
        return raw(self._tensors[name].detach().to(self._dtype, copy=True))

    def master(self, name: str) -> Master | None:
        """Return the tensor from which a served one is rounded, so that no copy is made. None unless it is contiguous
        float32 in main memory."""
        if name in self._kept:
            return None
        value, nan = self._tensors[name].detach(), rounded_nan()
        if nan is None or value.dtype != torch.float32 or value.device.type != "cpu" or not value.is_contiguous():
            return None
        return Master(raw(value), DTYPES[str(self._dtype).removeprefix("torch.")], nan)

    def __iter__(self) -> Iterator[str]:
        yield from self._tensors
        yield from self._kept

    def __len__(self) -> int:
        return len(self._tensors) + len(self._kept)


@functools.cache
def rounded_nan() -> int | None:
    """Return the bits of a NaN that torch rounded to bfloat16, which differ between processors. None if this processor
    has several."""
    odd = torch.tensor([0x7FC00000, 0x7F800001, 0x7FA55AA5, 0x7FFFFFFF], dtype=torch.int32)
    nans = torch.cat([odd, odd | -(1 << 31)]).repeat(9)[:67].view(torch.float32)  # vectors, and a remainder
    bits = set(nans.to(torch.bfloat16).view(torch.int16).tolist())
    return bits.pop() & 0xFFFF if len(bits) == 1 else None


def raw(value: Tensor) -> RawTensor:
    """Return the tensor's bytes, without a copy if it is contiguous in main memory."""
    plain = value.detach().cpu().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy().data
    return RawTensor(DTYPES[str(plain.dtype).removeprefix("torch.")], tuple(plain.shape), data)


def as_tensor(tensor: RawTensor) -> Tensor:
    """Return a tensor over the same bytes; over a copy if they are read-only."""
    dtype = getattr(torch, next(name for name, ours in DTYPES.items() if ours == tensor.dtype))
    if not tensor.num_bytes:
        return torch.empty(tensor.shape, dtype=dtype)
    data = np.frombuffer(memoryview(tensor.data), dtype=np.uint8)
    flat = torch.frombuffer(data if data.flags.writeable else data.copy(), dtype=torch.uint8)
    return flat.view(dtype).reshape(tensor.shape)


def write_tensors(path: Path, tensors: Mapping[str, RawTensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors to a new safetensors file."""
    with path.open("wb") as file:
        write_snapshot(file, tensors, metadata)
