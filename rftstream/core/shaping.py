"""What is taken from rewards. Shapes: N rollouts, T tokens."""

from __future__ import annotations

import numpy as np


def compute_overlong_penalties(lengths_N: np.ndarray, limits_N: np.ndarray, *, share: float) -> np.ndarray:
    """Soft length penalty: from 0 to -1 along the last `share` of the tokens that were allowed.

    With c = share limit: 0 where length <= limit - c;  (limit - c - length) / c inside;  -1 beyond the limit.
    DAPO (arXiv 2503.14476, equation 13).

    lengths_N, limits_N: numbers [N], limits above 0. share in (0, 1]. Returns float64 [N].
    """
    if lengths_N.ndim != 1 or limits_N.shape != lengths_N.shape:
        raise ValueError(f"overlong: got {lengths_N.shape} and {limits_N.shape}, expected [N] twice")
    if not 0 < share <= 1:
        raise ValueError(f"overlong: got a share of {share}, expected one in (0, 1]")
    if not (limits_N > 0).all():
        raise ValueError(f"overlong: got a limit of {limits_N[~(limits_N > 0)][0]}, expected all above 0")
    limits_N = limits_N.astype(np.float64)
    return np.asarray(np.clip((limits_N - lengths_N) / (share * limits_N) - 1, -1.0, 0.0))


def sum_of_later(values_T: np.ndarray) -> np.ndarray:
    """Sum the values from each token on, itself included: y_t = sum_{s >= t} x_s. float [T] -> float64 [T]."""
    return np.asarray(np.cumsum(values_T.astype(np.float64)[::-1])[::-1])
