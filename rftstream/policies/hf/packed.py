"""One pass of the model over rows with different numbers of new tokens. All tokens are concatenated into one sequence,
so nothing is padded. Each row's tokens attend only to that row's slot of the cache.

Rows with one new token, which are being decoded, share an attention call if their slots are neighbours. A row with
several new tokens, as in a further turn, has its own call.

Shapes: B rows, N tokens of all rows, S slots of the cache, H heads, W columns, D width of a head."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

MAX_HOLES = 4
"""Largest number of other rows' slots that a call includes needlessly; with more, the call is split."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Tokens of one attention call: one token of each of several slots, or several tokens of one slot."""

    tokens: slice
    """Place among the N tokens."""
    slots: slice
    positions_SL: np.ndarray
    """Positions of the tokens in each slot; in other rows' slots, the last position."""
    holes: np.ndarray | None
    """Indices of the tokens' slots among `slots`; None if these are all slots."""

    @property
    def width(self) -> int:
        """Number of columns that the tokens may attend to."""
        return int(self.positions_SL.max()) + 1


class PackedRows:
    """The tokens of one pass. `DecodingBatch` makes it. The model gets it in place of an attention mask and passes it
    to the mask function that `policies.attention` registers. It then passes that function's result to `attend`."""

    ndim = 4
    """Number of dimensions that models check: they leave a mask of four dimensions unchanged."""

    def __init__(self, slots_B: np.ndarray, starts_B: np.ndarray, counts_B: np.ndarray, device: torch.device) -> None:
        """Row b has `counts_B[b]` new tokens, from column `starts_B[b]` of slot `slots_B[b]` on."""
        order_B = np.lexsort((slots_B, counts_B > 1))
        slots, starts, counts = slots_B[order_B], starts_B[order_B], counts_B[order_B]
        ends = np.cumsum(counts)
        self.order_B = order_B
        """Rows in the order of their tokens in the sequence."""
        self.ends_B = ends
        """In this order, the place after each row's last token."""
        self.slots_N = np.repeat(slots, counts)
        self.positions_N = np.arange(len(self.slots_N)) + np.repeat(starts - (ends - counts), counts)
        last_B = np.empty_like(ends)
        last_B[order_B] = ends - 1
        self.last_B = torch.from_numpy(last_B).to(device)
        """Place of each row's last token in the sequence."""
        self._device, self._slots, self._starts, self._counts = device, slots, starts, counts
        self._parts = [*_neighbours(slots[counts == 1], starts[counts == 1])]
        for slot, start, count, end in zip(slots, starts, counts, ends, strict=True):
            if count > 1:
                positions_1L = np.arange(start, start + count)[None]
                self._parts.append(_Part(slice(end - count, end), slice(slot, slot + 1), positions_1L, None))

    def alike(self) -> Iterator[tuple[np.ndarray, np.ndarray, PackedRows]]:
        """Yield the rows in groups with equal numbers of new tokens: indices of the rows, places of their tokens in the
        sequence, and the tokens of a pass over them alone."""
        for count in np.unique(self._counts):
            of_count = np.flatnonzero(self._counts == count)
            places_N = (self.ends_B[of_count, None] - count + np.arange(count)).ravel()
            group = PackedRows(self._slots[of_count], self._starts[of_count], self._counts[of_count], self._device)
            yield self.order_B[of_count], places_N, group

    def mask(self, mask_function: Callable[..., Tensor], dtype: torch.dtype) -> PackedMask:
        """Return which columns each token attends to. `mask_function`: transformers' function for a kind of layer."""
        zero = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=self._device)
        masks: list[Tensor | None] = []
        for part in self._parts:
            columns = torch.arange(part.width, device=self._device)[None, None, None]
            positions = torch.from_numpy(part.positions_SL).to(self._device)[:, None, :, None]
            sees = mask_function(zero, zero, positions, columns).expand(*part.positions_SL.shape[:1], 1, -1, part.width)
            if part.positions_SL.size == 1 and bool(sees.all()):
                masks.append(None)
            else:
                masks.append(torch.zeros(sees.shape, dtype=dtype, device=self._device).masked_fill_(~sees, -torch.inf))
        return PackedMask(self._parts, masks)


class PackedMask:
    """Columns that the tokens of a pass attend to in layers of one kind. `PackedRows` makes it."""

    def __init__(self, parts: list[_Part], masks: list[Tensor | None]) -> None:
        self._parts, self._masks = parts, masks

    def attend(self, attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention output [1, N, H, D] for queries [1, H, N, D] over all slots of the cache, [S, H, W, D].
        Queries of rows with equal numbers of tokens may come as [B, H, L, D]; the output is then [B, L, H, D].

        `attend`: computes the output [B, L, H, D] of a part from queries, keys, values and mask."""
        if len(query) > 1:
            rows, heads, count, width = query.shape
            output_1NHD = self.attend(attend, query.transpose(0, 1).reshape(1, heads, -1, width), key, value)
            return output_1NHD.reshape(rows, count, *output_1NHD.shape[2:])
        found = []
        for part, mask in zip(self._parts, self._masks, strict=True):
            keys, values = (room[part.slots, :, : part.width] for room in (key, value))
            query_1HLD = query[:, :, part.tokens]
            if part.positions_SL.shape[1] > 1:
                found.append(attend(query_1HLD, keys, values, mask))
                continue
            query_SH1D = query_1HLD.transpose(0, 2)
            if part.holes is None:
                output_SHD = attend(query_SH1D, keys, values, mask)[:, 0]
            else:
                holes = torch.from_numpy(part.holes).to(query.device)
                wide_SH1D = query.new_zeros((len(keys), *query_SH1D.shape[1:]))
                wide_SH1D[holes] = query_SH1D
                output_SHD = attend(wide_SH1D, keys, values, mask)[holes, 0]
            found.append(output_SHD[None])
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)


def _neighbours(slots: np.ndarray, positions: np.ndarray) -> Iterator[_Part]:
    """Yield parts with one token for each of these slots, in ascending order."""
    if not len(slots):
        return
    edges = [0, *(np.flatnonzero(np.diff(slots) > MAX_HOLES + 1) + 1).tolist(), len(slots)]
    for first, end in itertools.pairwise(edges):
        places = slots[first:end] - slots[first]
        positions_S1 = np.full((int(places[-1]) + 1, 1), positions[first:end].max())
        positions_S1[places, 0] = positions[first:end]
        holes = None if len(positions_S1) == len(places) else places
        yield _Part(slice(first, end), slice(int(slots[first]), int(slots[end - 1]) + 1), positions_S1, holes)
