"""The cache that `hf` decodes with: keys and values, and the states of models that have some. A row has a slot, and its
tokens are the slot's first columns. States have no columns.

A row never moves. It keeps its slot while its environment answers, and the next row takes a freed slot. Nothing else is
copied until the room is used up.

Shapes: S slots, H heads of keys and values, W columns, D width of a head, N tokens of a pass."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from rftstream.policies.hf.family_cache import FamilyCache, Fixed, LayerStates

SPARE_COLUMNS = 64
"""Smallest number of decoding steps between two moves of the whole cache, unless rows end earlier."""
SMALL = 16384
"""Largest number of elements of a row in one layer for which rows are copied together."""


class SlotCache:
    """The keys, values and states of at most `max_slots` rows. `HfPolicy` makes it.

    `put` takes slots for computed rows, `write` sets where the next pass writes, and `free` frees slots. After a row's
    tokens a slot has zeros or stale values, which the attention mask hides. For a model without keys and values, slots
    have no layers. A pass that changes states stands between `lend` and `take_back`."""

    def __init__(
        self,
        max_slots: int,
        max_columns: int | None = None,
        family: Callable[[], FamilyCache | None] = lambda: None,
    ) -> None:
        """`max_columns`: the greatest length of a row; None if unknown. `family`: returns the model's own cache, if it
        keeps states."""
        self._max_slots, self._max_columns = max_slots, max_columns
        self._find_family = family
        self._family: FamilyCache | None = None
        self._layers: list[SlotLayer] = []
        self._states: _States | None = None
        self._lent: tuple[Any, Fixed] | None = None
        """Index of the slots whose states the model has, and these states."""
        self._free: list[int] = []
        """Freed slots below `_num_used`, as a heap."""
        self._num_used = 0
        """Number of slots that were ever taken."""
        self.for_model: Any = None
        """The cache that the model gets as `past_key_values`."""
        self._uses: Counter[int] = Counter()
        """Slot -> how often it was freed."""

    @property
    def num_free(self) -> int:
        """Number of free slots."""
        return self._max_slots - self._num_used + len(self._free)

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors on the device."""
        for layer in self._parts():
            yield from layer.rooms

    @property
    def used_bytes(self) -> int:
        """Number of bytes of the slots that are taken."""
        return self._num_bytes(lambda slots: self._num_used - len(self._free))

    @property
    def spare_bytes(self) -> int:
        """Number of bytes of the other slots."""
        return self._num_bytes(lambda slots: slots - self._num_used + len(self._free))

    def _num_bytes(self, count: Callable[[int], int]) -> int:
        return sum(room[:1].nbytes * count(len(room)) for layer in self._parts() for room in layer.rooms)

    def _parts(self) -> Iterator[SlotLayer | _States]:
        yield from self._layers
        if self._states is not None:
            yield self._states

    def put(self, states: LayerStates, which_R: Sequence[int], lengths_R: Sequence[int]) -> list[int]:
        """Take a slot for each of R rows, and return the slots. New row r consists of the last `lengths_R[r]` columns
        of row `which_R[r]` in the given states."""
        slots = [self._take() for _ in which_R]
        if self.for_model is None:
            self._layers = [SlotLayer(*pair) for pair in states if not isinstance(pair, Fixed)]
            self._states = next((_States(one) for one in states if isinstance(one, Fixed)), None)
            self._family = self._find_family()
            self.for_model = Cache(layers=[*self._layers]) if self._family is None else self._family.bind(self._layers)
        self.replace(states, which_R, lengths_R, slots)
        return slots

    def replace(
        self, states: LayerStates, which_R: Sequence[int], lengths_R: Sequence[int], slots_R: Sequence[int]
    ) -> None:
        """Write rows as `put` does, over the content of these slots."""
        copies = _rows_to_copy(states, which_R, lengths_R, slots_R) if self._layers else []
        if self._states is not None:
            self._states.reserve(self._num_used, self._max_slots)
            for room, part in zip(self._states.rooms, states[-1], strict=True):
                room[torch.tensor(slots_R)] = part[torch.tensor(which_R)]
        for layer, (keys, values) in zip(self._layers, states[: len(self._layers)], strict=True):
            layer.reserve(self._num_used, max(lengths_R), self._max_slots, self._max_columns)
            for length, which, slots in copies:
                for room, part in zip(layer.rooms, (keys, values), strict=True):
                    room[slots, :, :length] = part[which, :, part.shape[2] - length :]

    def write(self, slots_N: np.ndarray, columns_N: np.ndarray) -> None:
        """Let the next pass write the keys and values of token n into column `columns_N[n]` of slot `slots_N[n]`."""
        if not self._layers:
            return
        width, device = int(columns_N.max()) + 1, self._layers[0].device
        if (slots_N == slots_N[0]).all():  # one row: its columns are consecutive
            target: Any = (int(slots_N[0]), slice(None), slice(int(columns_N[0]), int(columns_N[-1]) + 1))
        else:
            target = (torch.from_numpy(slots_N).to(device), slice(None), torch.from_numpy(columns_N).to(device))
        for layer in self._layers:
            layer.reserve(self._num_used, width, self._max_slots, self._max_columns)
            layer.target = target

    def lend(self, slots_B: np.ndarray) -> None:
        """Give the model the states of these slots, in this order. Neighbours are changed in place."""
        if self._states is None:
            return
        assert self._family is not None, "it has the places of states"
        index: Any = torch.from_numpy(slots_B).to(self._states.rooms[0].device)
        if (np.diff(slots_B) == 1).all():
            index = slice(int(slots_B[0]), int(slots_B[-1]) + 1)
        lent = Fixed(room[index] for room in self._states.rooms)
        self._family.give_states(lent)
        self._lent = index, lent

    def take_back(self) -> None:
        """Store the lent states as the pass has changed them."""
        if self._states is None:
            return
        assert self._family is not None and self._lent is not None, "they were lent"
        (index, lent), self._lent = self._lent, None
        for room, before, now in zip(self._states.rooms, lent, self._family.take_states(), strict=True):
            if now is not before or not isinstance(index, slice):
                room[index] = now

    def free(self, slots: Iterable[int], *, clean: bool = True) -> None:
        """Free slots. `clean`: whether they contain only finite numbers. Masked columns have no effect only if they are
        finite, since 0 * NaN is NaN."""
        for slot in slots:
            self._uses[slot] += 1
            heapq.heappush(self._free, slot)
            for layer in self._parts() if not clean else ():
                for room in layer.rooms:
                    room[slot] = 0
        if len(self._free) == self._num_used:
            self._free, self._num_used, self._layers, self._states, self.for_model = [], 0, [], None, None

    def use_of(self, slot: int) -> int:
        """Return a number for the use of a slot that is taken. It is another one once the slot was freed."""
        return self._uses[slot]

    def copy(self, slot: int, length: int) -> int:
        """Take a slot, and copy the first columns of another one there. Not for a model with states."""
        assert self._states is None, "they have no columns"
        taken = self._take()
        for layer in self._layers:
            layer.reserve(self._num_used, length, self._max_slots, self._max_columns)
            for room in layer.rooms:
                room[taken, :, :length] = room[slot, :, :length]
        return taken

    def row(self, slot: int, length: int) -> LayerStates:
        """Return a copy of a slot's first columns, keys and values [1, H, length, D] of each layer, and its states."""
        found: list[tuple[Tensor, ...]] = [
            tuple(room[slot : slot + 1, :, :length].clone() for room in layer.rooms) for layer in self._layers
        ]
        if self._states is not None:
            found.append(Fixed(room[slot : slot + 1].clone() for room in self._states.rooms))
        return found

    def _take(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        assert self._num_used < self._max_slots
        self._num_used += 1
        return self._num_used - 1


def _rows_to_copy(
    states: LayerStates, which_R: Sequence[int], lengths_R: Sequence[int], slots_R: Sequence[int]
) -> list[tuple[int, Any, Any]]:
    """Return the copies to make: a length, with the rows of states and their slots. Small rows of one length are copied
    together. Large rows are copied one by one, since a joint copy would copy them twice."""
    _, heads, _, width = states[0][0].shape
    rows: dict[int, tuple[list[int], list[int]]] = {}
    for which, length, slot in zip(which_R, lengths_R, slots_R, strict=True):
        of_length = rows.setdefault(length, ([], []))
        of_length[0].append(which)
        of_length[1].append(slot)
    found: list[tuple[int, Any, Any]] = []
    for length, (which_N, slots_N) in rows.items():
        if heads * length * width <= SMALL:
            found.append((length, torch.tensor(which_N), torch.tensor(slots_N)))
        else:
            found += [(length, which, slot) for which, slot in zip(which_N, slots_N, strict=True)]
    return found


class SlotLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values of one layer."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """Make a layer without slots, for keys and values of this dtype, device and shape."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.lazy_initialization(keys, values)
        self.rooms = tuple(one.new_zeros((0, one.shape[1], 0, one.shape[3])) for one in (keys, values))
        """Keys and values [S, H, W, D]."""
        self.target: Any = None
        """Index of the places that the next pass writes: [N, H, D], or [H, N, D] in one slot."""

    def get_seq_length(self) -> int:
        """Return 0. The model calls it to make a mask, but `PackedRows` makes the mask."""
        return 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the tokens of a pass, [1, H, N, D] or row by row [B, H, L, D], and return all slots. The model calls
        it."""
        one_slot = isinstance(self.target[0], int)
        for room, states in zip(self.rooms, (key_states, value_states), strict=True):
            room[self.target] = states[0] if one_slot else states.transpose(1, 2).flatten(0, 1)
        return self.rooms[0], self.rooms[1]

    def reserve(self, num_slots: int, width: int, max_slots: int, max_columns: int | None) -> None:
        """Make room for a number of slots and columns. If the room is too small, the cache is copied into a larger
        one."""
        slots, columns = self.rooms[0].shape[0], self.rooms[0].shape[2]
        if num_slots <= slots and width <= columns:
            return
        if num_slots > slots:
            slots_then = min(max(num_slots, 2 * slots), max_slots)
        else:
            slots_then = slots
        columns_then = columns
        if width > columns:
            more = width + max(width, SPARE_COLUMNS)
            columns_then = more if max_columns is None else max(width, min(more, max_columns))
        rooms = []
        for room in self.rooms:
            larger = room.new_zeros((slots_then, room.shape[1], columns_then, room.shape[3]))
            larger[:slots, :, :columns] = room
            rooms.append(larger)
        self.rooms = tuple(rooms)


class _States:
    """States of all slots, each [S, ...]."""

    def __init__(self, states: Fixed) -> None:
        self.rooms = tuple(state.new_zeros((0, *state.shape[1:])) for state in states)

    def reserve(self, num_slots: int, max_slots: int) -> None:
        """Make room for a number of slots."""
        slots = len(self.rooms[0])
        if num_slots <= slots:
            return
        slots_then = min(max(num_slots, 2 * slots), max_slots)
        larger = tuple(room.new_zeros((slots_then, *room.shape[1:])) for room in self.rooms)
        for new, room in zip(larger, self.rooms, strict=True):
            new[:slots] = room
        self.rooms = larger
