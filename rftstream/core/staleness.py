"""Staleness: how many versions the trainer is ahead of what sampled a token. Shapes: K spans of one version each."""

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
