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


def pack_microbatches(lengths_N: np.ndarray, max_tokens: int) -> list[np.ndarray]:
    """Row numbers of each micro-batch: sorted by length, each of at most `max_tokens` tokens with padding.

    A row longer than that is a micro-batch of its own. lengths_N: int [N]; rows of no tokens are left out.
    """
    if lengths_N.ndim != 1 or lengths_N.dtype.kind not in "iu":
        raise ValueError(f"packing: got lengths {lengths_N.dtype} {lengths_N.shape}, expected integers [N]")
    if max_tokens < 1:
        raise ValueError(f"packing: got a budget of {max_tokens} tokens, expected at least 1")
    batches: list[list[int]] = []
    for row in np.argsort(-lengths_N, kind="stable").tolist():
        if lengths_N[row] == 0:
            continue
        # longest first, so the first row of a micro-batch sets its padded length
        if batches and (len(batches[-1]) + 1) * int(lengths_N[batches[-1][0]]) <= max_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return [np.asarray(batch, dtype=np.int64) for batch in batches]


def pack_groups(lengths_N: np.ndarray, groups_N: np.ndarray, max_tokens: int) -> list[np.ndarray]:
    """As `pack_microbatches`, but rows of a group stay together; a group larger than that is a micro-batch of its own.

    lengths_N, groups_N: int [N].
    """
    unique_G, place_N = np.unique(groups_N, return_inverse=True)
    longest_G = np.zeros(len(unique_G), np.int64)
    np.maximum.at(longest_G, place_N, lengths_N)
    rows_G = np.bincount(place_N, minlength=len(unique_G))
    batches: list[list[int]] = []
    longest = count = 0
    for group in np.argsort(-longest_G, kind="stable").tolist():
        if longest_G[group] == 0:
            continue
        if not batches or (count + int(rows_G[group])) * longest > max_tokens:
            batches.append([])
            longest, count = int(longest_G[group]), 0
        batches[-1].append(group)
        count += int(rows_G[group])
    return [np.flatnonzero(np.isin(place_N, batch) & (lengths_N > 0)) for batch in batches]


def count_padded_tokens(lengths_N: np.ndarray, microbatches: Sequence[np.ndarray]) -> int:
    """What the forward passes cost: rows times the longest row, summed over the micro-batches."""
    return int(sum(len(rows) * int(lengths_N[rows].max()) for rows in microbatches))


def pad_rows(rows: Sequence[np.ndarray], fill: float = 0) -> np.ndarray:
    """Rows of different lengths -> [B, T], padded on the right with `fill`; dtype of the first row."""
    lengths_B = np.asarray([len(row) for row in rows])
    padded_BT = np.full((len(rows), int(lengths_B.max())), fill, dtype=rows[0].dtype)
    padded_BT[np.arange(padded_BT.shape[1])[None, :] < lengths_B[:, None]] = np.concatenate(list(rows))
    return padded_BT
