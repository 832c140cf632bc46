"""The cache of keys and values that `hf` decodes over: rows that end in the same column, so that all grow by one write.

A row that joins is written beside the others, one that leaves is overwritten by the last; nothing else is copied but
when the room is used up. Shapes: B rows, H heads of keys and values, W columns in use, D width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

SPARE_COLUMNS = 64
"""At least so many steps between two moves of the whole cache."""

LayerStates = Sequence[tuple[Tensor, Tensor]]
"""Keys and values [U, H, L, D] of each layer, as a forward pass over prompts left them."""


class RowCache:
    """At most `max_rows` rows. What is right of a row's beginning is its own; left of it are zeros or stale columns."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._layers: list[_Layer] = []
        self.for_model: Any = None
        """What the model takes as `past_key_values`."""

    @property
    def width(self) -> int:
        """Columns in use: as many as the longest row has tokens, or more until `narrow`."""
        return self._layers[0].end - self._layers[0].start if self._layers else 0

    def add(self, states: LayerStates, which_U: np.ndarray) -> None:
        """New rows at the end: row u is `which_U[u]` of the given states, both ending in the newest column."""
        if not self._layers:
            self._layers = [_Layer() for _ in states]
            self.for_model = Cache(layers=[*self._layers])
        which = torch.from_numpy(which_U).to(states[0][0].device)
        for layer, (keys, values) in zip(self._layers, states, strict=True):
            layer.add(keys, values, which, self._max_rows)

    def keep(self, num_rows: int, sources: np.ndarray, targets: np.ndarray) -> None:
        """Rows `sources` take the places `targets`, then only the first `num_rows` are left."""
        for layer in self._layers:
            layer.keep(num_rows, torch.from_numpy(sources), torch.from_numpy(targets))

    def narrow(self, width: int) -> None:
        """No row is longer than this."""
        for layer in self._layers:
            layer.start = layer.end - width


class _Layer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Columns `start` to `end` of the first `num_rows` rows of two larger tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_rows = self.start = self.end = 0
        self._rooms: tuple[Tensor, Tensor] | None = None

    def get_seq_length(self) -> int:
        return self.end - self.start

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends columns to all rows, and gives the whole of them; called by the model."""
        assert self._rooms is not None
        count = key_states.shape[2]
        assert count <= SPARE_COLUMNS
        if self.end + count > self._rooms[0].shape[2]:
            self._rooms = self._moved(self._rooms[0].shape[0], self.end - self.start)
        for room, states in zip(self._rooms, (key_states, value_states), strict=True):
            room[: self.num_rows, :, self.end : self.end + count] = states
        self.end += count
        self.keys, self.values = (room[: self.num_rows, :, self.start : self.end] for room in self._rooms)
        return self.keys, self.values

    def add(self, keys: Tensor, values: Tensor, which: Tensor, max_rows: int) -> None:
        if self._rooms is None:
            self.lazy_initialization(keys, values)
            self._rooms = (keys.new_empty((0, *keys.shape[1:])), values.new_empty((0, *values.shape[1:])))
        first, last, length = self.num_rows, self.num_rows + len(which), keys.shape[2]
        if last > self._rooms[0].shape[0] or length > self.end:
            places = self._rooms[0].shape[0]
            if last > places:
                places = min(max(last, 2 * places), max(max_rows, last))
            self._rooms = self._moved(places, max(self.end - self.start, length))
        start = min(self.start, self.end - length)
        for room, states in zip(self._rooms, (keys, values), strict=True):
            # masked columns count for nothing only if they are numbers: 0 * NaN would be NaN
            room[:first, :, start : self.start] = 0
            room[first:last, :, start : self.end - length] = 0
            room[first:last, :, self.end - length : self.end] = states[which]
        self.num_rows, self.start = last, start

    def keep(self, num_rows: int, sources: Tensor, targets: Tensor) -> None:
        if len(sources):
            assert self._rooms is not None
            for room in self._rooms:
                columns = room[:, :, self.start : self.end]
                columns[targets] = columns[sources]
        self.num_rows = num_rows

    def _moved(self, places: int, width: int) -> tuple[Tensor, Tensor]:
        """What is in use, at the right end of the first `width` columns of two new tensors."""
        assert self._rooms is not None
        used = self.end - self.start
        moved = []
        for room in self._rooms:
            heads, columns, size = room.shape[1], width + max(width, SPARE_COLUMNS), room.shape[3]
            larger = room.new_empty((places, heads, columns, size))
            larger[: self.num_rows, :, width - used : width] = room[: self.num_rows, :, self.start : self.end]
            moved.append(larger)
        self.start, self.end = width - used, width
        return moved[0], moved[1]
