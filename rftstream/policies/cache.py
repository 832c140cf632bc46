"""The cache of keys and values that `hf` decodes over. All rows end in the same column, so that one write makes all
longer.

A row that joins is written beside the others; the last row overwrites one that leaves. Nothing else is copied, except
when the room is used up.

Shapes: B rows, H heads of keys and values, W columns in use, D width of a head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

SPARE_COLUMNS = 64
"""Least number of decoding steps between two moves of the whole cache."""

LayerStates = Sequence[tuple[Tensor, Tensor]]
"""Keys and values [U, H, L, D] of each layer, as a forward pass over prompts left them."""


class RowCache:
    """The keys and values of at most `max_rows` rows. `DecodingBatch` makes it and changes it together with its own
    rows.

    The columns from a row's beginning on are the row's own. Left of them are zeros or stale values, which the
    attention mask hides."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._layers: list[_Layer] = []
        self.for_model: Any = None
        """The cache that the model takes as `past_key_values`."""

    @property
    def width(self) -> int:
        """Number of columns in use: as many as the longest row has tokens, or more until `narrow` is called."""
        return self._layers[0].end - self._layers[0].start if self._layers else 0

    def add(self, states: LayerStates, which_U: np.ndarray) -> None:
        """Add rows at the end. New row u is row `which_U[u]` of the given states, and ends in the newest column."""
        if not self._layers:
            self._layers = [_Layer(keys, values) for keys, values in states]
            self.for_model = Cache(layers=[*self._layers])
        which = torch.from_numpy(which_U).to(states[0][0].device)
        for layer, (keys, values) in zip(self._layers, states, strict=True):
            layer.add(keys, values, which, self._max_rows)

    def keep(self, num_rows: int, sources: np.ndarray, targets: np.ndarray) -> None:
        """Move the rows `sources` to the places `targets`, and keep only the first `num_rows`."""
        for layer in self._layers:
            layer.keep(num_rows, torch.from_numpy(sources), torch.from_numpy(targets))

    def row(self, number: int, length: int) -> LayerStates:
        """Return a copy of a row's newest columns: keys and values [H, length, D] of each layer."""
        return [layer.row(number, length) for layer in self._layers]

    def narrow(self, width: int) -> None:
        """Give up the columns that no row needs. `width` is the length of the longest row."""
        for layer in self._layers:
            layer.start = layer.end - width


class _Layer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values of one layer: columns `start` to `end` of the first `num_rows` rows of two larger tensors."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """A layer without rows, for keys and values of this dtype, device and shape."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.lazy_initialization(keys, values)
        self.num_rows = self.start = self.end = 0
        self._rooms = (keys.new_empty((0, *keys.shape[1:])), values.new_empty((0, *values.shape[1:])))

    def get_seq_length(self) -> int:
        """Return the number of columns in use; the model asks for it."""
        return self.end - self.start

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append columns to all rows, and return all columns in use. The model calls it."""
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
        """Add rows as `RowCache.add` does. The tensors grow if there is no room."""
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
        """Move and drop rows as `RowCache.keep` does."""
        if len(sources):
            for room in self._rooms:
                columns = room[:, :, self.start : self.end]
                columns[targets] = columns[sources]
        self.num_rows = num_rows

    def row(self, number: int, length: int) -> tuple[Tensor, Tensor]:
        """Return a copy of a row's newest columns."""
        keys, values = (room[number, :, self.end - length : self.end].clone() for room in self._rooms)
        return keys, values

    def _moved(self, places: int, width: int) -> tuple[Tensor, Tensor]:
        """Return two new tensors with the columns in use at the right end of their first `width` columns."""
        used = self.end - self.start
        moved = []
        for room in self._rooms:
            heads, columns, size = room.shape[1], width + max(width, SPARE_COLUMNS), room.shape[3]
            larger = room.new_empty((places, heads, columns, size))
            larger[: self.num_rows, :, width - used : width] = room[: self.num_rows, :, self.start : self.end]
            moved.append(larger)
        self.start, self.end = width - used, width
        return moved[0], moved[1]
