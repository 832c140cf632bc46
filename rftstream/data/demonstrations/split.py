"""The choice of held-out demonstrations: evenly spread, exact in every prefix, and stable when more are added."""

from __future__ import annotations

import numpy as np


def trained_numbers(size: int, held_out: float) -> np.ndarray:
    """Return the numbers below `size` that are trained on, int64, in order. `held_out`: the share that is held out."""
    return np.flatnonzero(~_is_held_out(size, held_out))


def held_out_numbers(size: int, held_out: float) -> np.ndarray:
    """Return the numbers below `size` that are held out, int64, in order."""
    return np.flatnonzero(_is_held_out(size, held_out))


def _is_held_out(size: int, held_out: float) -> np.ndarray:
    """Return which numbers are held out: number n is, if the share of n + 1 rounds down to more than the share of n."""
    counts = np.floor(np.arange(size + 1, dtype=np.float64) * held_out)
    return np.diff(counts) > 0
