"""Staleness: how many versions the trainer is ahead of the version that sampled a token. Shapes: K spans of one version
each, S counts."""

from __future__ import annotations

import numpy as np


def count_by_staleness(staleness_K: np.ndarray, counts_K: np.ndarray, num_counts: int) -> tuple[int, ...]:
    """Return the sum of `counts_K` at each staleness from 0 on, without zeros at the end.

    The last of `num_counts` numbers is the sum of all that are older; below 0 counts as 0.

    staleness_K, counts_K: int [K]; result: int [S], S <= num_counts."""
    if staleness_K.ndim != 1 or counts_K.shape != staleness_K.shape:
        raise ValueError(f"staleness: got {staleness_K.shape} and {counts_K.shape}, expected [K] twice")
    if staleness_K.dtype.kind not in "iu" or counts_K.dtype.kind not in "iu":
        raise TypeError(f"staleness: got {staleness_K.dtype} and {counts_K.dtype}, expected integers")
    if num_counts < 1:
        raise ValueError(f"staleness: got {num_counts} numbers, expected at least 1")
    counts_S = np.zeros(num_counts, np.int64)
    np.add.at(counts_S, np.clip(staleness_K, 0, num_counts - 1), counts_K)
    return tuple(np.trim_zeros(counts_S, "b").tolist())
