"""The new tensors from which a delta is made, as the trainer holds them: served values, or masters that are rounded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rftstream.errors import WeightsError
from rftstream.weights.deltas import kernels
from rftstream.weights.deltas.delta_streams import Piece
from rftstream.weights.snapshot import HasMasters, RawTensor, data_view
from rftstream.weights.state import ServedState


@dataclass(frozen=True, slots=True)
class NewBytes:
    """A tensor's new bytes, and how `kernels.take` must read them."""

    array: np.ndarray
    way: int

    def of(self, piece: Piece, width: int) -> np.ndarray:
        """Return the bytes of one piece."""
        if self.way == kernels.AS_IT_IS:
            return self.array[piece.begin : piece.end]
        return self.array[piece.begin // width * 4 : piece.end // width * 4]


class NewTensors:
    """Gives the new tensors in order. `delta.take` makes it, and requests each tensor once: with `get` for dtypes that
    have streams, with `replace` for other dtypes, whose tensors are compared and copied on the way."""

    def __init__(self, state: ServedState, tensors: Mapping[str, RawTensor]) -> None:
        names = sorted(tensors)
        if names != list(state.tensors):
            odd = sorted(set(names) ^ state.tensors.keys())[0]
            raise WeightsError(
                f"weights: tensor {odd!r} came or went, expected the parent's tensors; publish an anchor"
            )
        self._state, self._tensors = state, tensors
        self._masters = tensors if isinstance(tensors, HasMasters) else None
        self.whole: list[str] = []
        """Changed tensors according to `replace`."""

    def get(self, name: str) -> NewBytes:
        """Return the tensor, or its unrounded master, which saves a copy."""
        master = self._masters.master(name) if self._masters is not None else None
        if master is None:
            tensor = self._tensors[name]
            self._check(name, tensor.dtype, tensor.shape)
            return NewBytes(np.frombuffer(data_view(tensor), np.uint8), kernels.AS_IT_IS)
        self._check(name, master.served, master.values.shape)
        array = np.frombuffer(data_view(master.values), np.uint8)
        return NewBytes(array, {"BF16": master.nan, "F16": kernels.FLOAT32_TO_F16}.get(master.served, kernels.AS_IT_IS))

    def _check(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        mine = self._state.tensors[name]
        if (dtype, shape) != (mine.dtype, mine.shape):
            raise WeightsError(
                f"weights: tensor {name!r}: found {dtype} {list(shape)}, expected {mine.dtype} {list(mine.shape)} as "
                "in the parent; publish an anchor"
            )

    def replace(self, name: str) -> None:
        """Copy the new tensor into the state if it differs, and add its name to `whole`."""
        new, mine = self.get(name).array, self._state.arrays[name]
        if not np.array_equal(new, mine):
            mine[:] = new
            self._state.touched([name])
            self.whole.append(name)
