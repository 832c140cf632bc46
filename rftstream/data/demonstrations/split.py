"""The choice of demonstrations that are never trained on: evenly spread, exact in every prefix, stable when more
come."""

from __future__ import annotations

import numpy as np


def trained_numbers(size: int, held_out: float) -> np.ndarray:
    """Return the numbers below `size` that are trained on, int64, in order. `held_out` is the share that is left
    out."""
    return np.flatnonzero(~_is_held_out(size, held_out))


def held_out_numbers(size: int, held_out: float) -> np.ndarray:
    """Return the numbers below `size` that are held out, int64, in order."""
    return np.flatnonzero(_is_held_out(size, held_out))


def _is_held_out(size: int, held_out: float) -> np.ndarray:
    """Return which numbers are held out. Number n is held out if the share of n + 1 rounds down to more than that of
    n."""
    counts = np.floor(np.arange(size + 1, dtype=np.float64) * held_out)
    return np.diff(counts) > 0
