"""Rows into mini-batches (one optimizer step each) and micro-batches (one forward pass each). Shapes: N rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def split_minibatches(groups_N: np.ndarray, num_minibatches: int) -> list[np.ndarray]:
    """Row numbers of each mini-batch: groups stay together, in order, as evenly many groups as can be.

    groups_N: int [N]. With fewer groups than mini-batches there are only as many as groups.
    """
    if groups_N.ndim != 1 or groups_N.dtype.kind not in "iu":
        raise ValueError(f"packing: got groups {groups_N.dtype} {groups_N.shape}, expected integers [N]")
    if num_minibatches < 1:
        raise ValueError(f"packing: got {num_minibatches} mini-batches, expected at least 1")
    unique_G, first_G = np.unique(groups_N, return_index=True)
    ordered_G = unique_G[np.argsort(first_G)]
    parts = np.array_split(ordered_G, min(num_minibatches, max(len(ordered_G), 1)))
    return [np.flatnonzero(np.isin(groups_N, part)) for part in parts if len(part)]


def split_microbatches(
    lengths_N: np.ndarray, max_tokens: int, *, packed: bool, groups_N: np.ndarray | None = None
) -> list[np.ndarray]:
    """Row numbers of each micro-batch, each of at most `max_tokens` tokens, longest rows first.

    Not packed, padding counts, and rows of like lengths come together. Packed, a row goes to the first micro-batch that
    has room for it. A row longer than `max_tokens` is a micro-batch of its own. lengths_N: int [N]; rows of no tokens
    are left out. groups_N: int [N], rows of a group stay together, as if they were one.
    """
    if lengths_N.ndim != 1 or lengths_N.dtype.kind not in "iu":
        raise ValueError(f"packing: got lengths {lengths_N.dtype} {lengths_N.shape}, expected integers [N]")
    if max_tokens < 1:
        raise ValueError(f"packing: got a budget of {max_tokens} tokens, expected at least 1")
    numbers_N = np.arange(len(lengths_N)) if groups_N is None else np.unique(groups_N, return_inverse=True)[1]
    parts: dict[int, list[int]] = {}
    for row in np.argsort(-lengths_N, kind="stable").tolist():
        if lengths_N[row]:
            parts.setdefault(int(numbers_N[row]), []).append(row)  # in the order of their longest rows
    batches = (_first_fit if packed else _in_order)(lengths_N, list(parts.values()), max_tokens)
    return [np.asarray(batch, dtype=np.int64) for batch in batches]


def _in_order(lengths_N: np.ndarray, parts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    batches: list[list[int]] = []
    for part in parts:
        # longest first, so the first row of a micro-batch sets its padded length
        if batches and (len(batches[-1]) + len(part)) * int(lengths_N[batches[-1][0]]) <= max_tokens:
            batches[-1] += part
        else:
            batches.append([*part])
    return batches


def _first_fit(lengths_N: np.ndarray, parts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    """Of single rows at most 11/9 of the fewest that there could be, and one (first fit decreasing)."""
    batches: list[list[int]] = []
    rooms: list[int] = []
    for part in parts:
        length = int(lengths_N[part].sum())
        place = next((number for number, room in enumerate(rooms) if room >= length), None)
        if place is None:
            batches.append([*part])
            rooms.append(max_tokens - length)
        else:
            batches[place] += part
            rooms[place] -= length
    return batches


def count_padded_tokens(lengths_N: np.ndarray, microbatches: Sequence[np.ndarray]) -> int:
    """What the forward passes cost if they are padded: rows times the longest row, summed over the micro-batches."""
    return int(sum(len(rows) * int(lengths_N[rows].max()) for rows in microbatches))


def pad_rows(rows: Sequence[np.ndarray], fill: float = 0) -> np.ndarray:
    """Rows of different lengths -> [B, T], padded on the right with `fill`; dtype of the first row."""
    lengths_B = np.asarray([len(row) for row in rows])
    padded_BT = np.full((len(rows), int(lengths_B.max())), fill, dtype=rows[0].dtype)
    padded_BT[np.arange(padded_BT.shape[1])[None, :] < lengths_B[:, None]] = np.concatenate(list(rows))
    return padded_BT
