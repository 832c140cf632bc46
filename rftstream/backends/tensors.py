"""Tensors as bytes: what is served and what is saved, without a second copy of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from rftstream.weights.snapshot import DTYPES, RawTensor, write_snapshot

SERVED = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class ServedTensors(Mapping[str, RawTensor]):
    """Converts each tensor when it is asked for, so that no more than one is there twice."""

    def __init__(self, tensors: Mapping[str, Tensor], dtype: str) -> None:
        self._tensors, self._dtype = tensors, SERVED[dtype]

    def __getitem__(self, name: str) -> RawTensor:
        return raw(self._tensors[name].detach().to(self._dtype, copy=True))

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def raw(value: Tensor) -> RawTensor:
    """The tensor's bytes, without a copy where it lies contiguous in main memory."""
    plain = value.detach().cpu().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy().data
    return RawTensor(DTYPES[str(plain.dtype).removeprefix("torch.")], tuple(plain.shape), data)


def write_tensors(path: Path, tensors: Mapping[str, RawTensor], metadata: Mapping[str, str] | None = None) -> None:
    with path.open("wb") as file:
        write_snapshot(file, tensors, metadata)
