"""Advantages and returns from a critic's values. Shapes: N rollouts, T padded tokens."""

from __future__ import annotations

import numpy as np

from rftstream.core.advantages import MIN_VARIANCE


def compute_gae(
    rewards_NT: np.ndarray, values_NT: np.ndarray, mask_NT: np.ndarray, *, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return generalised advantage estimates: how much better the rollout went on from each token than the critic
    expected.

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = sum_k (gamma lam)^k delta_{t+k};  returns_t = A_t + V_t

    (arXiv 1506.02438). t + 1 is the next unmasked token, however many masked ones are in between: a tool's output is no
    step of the policy and is not discounted. V after the last unmasked token is 0, since the rollout ends there. V_t is
    the value of the text before token t.

    All arrays: float [N, T]; masked positions may hold anything. gamma and lam in [0, 1]. Returns advantages and
    returns, float64 [N, T], 0 at masked positions.
    """
    if rewards_NT.ndim != 2 or values_NT.shape != rewards_NT.shape or mask_NT.shape != rewards_NT.shape:
        raise ValueError(
            f"gae: got rewards {rewards_NT.shape}, values {values_NT.shape} and mask {mask_NT.shape}, expected [N, T] "
            "three times"
        )
    if not (0 <= gamma <= 1 and 0 <= lam <= 1):
        raise ValueError(f"gae: got gamma {gamma} and lam {lam}, expected both in [0, 1]")
    if not np.isin(mask_NT, (0, 1)).all():
        raise ValueError("gae: mask holds values that are neither 0 nor 1, expected 1 where a token counts")
    kept_NT = mask_NT > 0
    rewards_NT, values_NT = (np.where(kept_NT, one, 0.0).astype(np.float64) for one in (rewards_NT, values_NT))
    advantages_NT = np.zeros_like(values_NT)
    later_N, next_value_N = np.zeros(len(values_NT)), np.zeros(len(values_NT))
    for t in reversed(range(values_NT.shape[1])):
        delta_N = rewards_NT[:, t] + gamma * next_value_N - values_NT[:, t]
        later_N = np.where(kept_NT[:, t], delta_N + gamma * lam * later_N, later_N)
        next_value_N = np.where(kept_NT[:, t], values_NT[:, t], next_value_N)
        advantages_NT[:, t] = np.where(kept_NT[:, t], later_N, 0.0)
    return advantages_NT, advantages_NT + values_NT


def explained_variance(values_N: np.ndarray, returns_N: np.ndarray) -> float:
    """Return 1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for a constant one, negative for a
    worse one; 0 where all returns are equal, except for rounding. float [N] twice."""
    if values_N.ndim != 1 or returns_N.shape != values_N.shape:
        raise ValueError(f"explained variance: got {values_N.shape} and {returns_N.shape}, expected [N] twice")
    returns_N = returns_N.astype(np.float64)
    if not len(returns_N) or np.var(returns_N) < MIN_VARIANCE:
        return 0.0
    return float(1.0 - np.var(returns_N - values_N) / np.var(returns_N))
