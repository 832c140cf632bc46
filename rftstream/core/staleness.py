"""Staleness: how many versions the trainer is ahead of what sampled a token. Shapes: K spans of one version each, S
stalenesses that are counted apart."""

from __future__ import annotations

import numpy as np


def compute_staleness(versions_K: np.ndarray, counts_K: np.ndarray, trained_version: int) -> tuple[int, float]:
    """The largest staleness of any token, and the mean over tokens; (0, 0.0) without tokens.

    staleness_k = trained_version - versions_k, weighted by counts_k tokens in the mean.

    versions_K, counts_K: int [K]; spans of no token don't count.
    """
    if versions_K.ndim != 1 or counts_K.shape != versions_K.shape:
        raise ValueError(f"staleness: got {versions_K.shape} and {counts_K.shape}, expected [K] twice")
    if versions_K.dtype.kind not in "iu" or counts_K.dtype.kind not in "iu":
        raise TypeError(f"staleness: got {versions_K.dtype} and {counts_K.dtype}, expected integers")
    sampled_K = counts_K > 0
    if not sampled_K.any():
        return 0, 0.0
    staleness_K = trained_version - versions_K[sampled_K].astype(np.int64)
    return int(staleness_K.max()), float(np.average(staleness_K, weights=counts_K[sampled_K]))


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
