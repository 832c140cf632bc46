"""Advantages from rewards of steps. Shapes: N rollouts, T tokens of a rollout, S steps of all rollouts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rftstream.core.advantages import compute_group_advantages
from rftstream.core.shaping import sum_of_later


def compute_step_advantages(
    rewards_N: Sequence[np.ndarray], ends_N: Sequence[np.ndarray], groups_N: np.ndarray, *, eps: float = 1e-6
) -> list[np.ndarray]:
    """How much better than the group's steps are the step of each token and the steps after it.

    A_t = sum over steps s of the rollout that end at t or later of (r_s - mean_g) / (std_g + eps), mean and std (with
    n - 1) over all steps of all rollouts of the group: DeepSeekMath (arXiv 2402.03300, section 4.1.3, process
    supervision). Exactly 0 where all steps of a group have the same reward, but for rounding. Tokens after the last end
    have 0.

    rewards_N: float [T] of each rollout, read where a step ends only. ends_N: bool [T]. groups_N: int [N]. Returns
    float64 [T] of each rollout.
    """
    if not len(rewards_N) == len(ends_N) == len(groups_N):
        raise ValueError(
            f"steps: got {len(rewards_N)} rewards, {len(ends_N)} ends and {len(groups_N)} groups, expected as many"
        )
    for rewards_T, ends_T in zip(rewards_N, ends_N, strict=True):
        if rewards_T.ndim != 1 or ends_T.shape != rewards_T.shape or ends_T.dtype != bool:
            raise ValueError(
                f"steps: got rewards {rewards_T.shape} and ends {ends_T.dtype} {ends_T.shape}, expected float [T] and "
                "bool [T]"
            )
    counts_N = np.asarray([int(ends_T.sum()) for ends_T in ends_N], np.int64)
    if not counts_N.sum():
        return [np.zeros(len(rewards_T)) for rewards_T in rewards_N]
    rewards_S = np.concatenate(
        [rewards_T[ends_T].astype(np.float64) for rewards_T, ends_T in zip(rewards_N, ends_N, strict=True)]
    )
    normal_S = compute_group_advantages(rewards_S, np.repeat(groups_N, counts_N), eps=eps)
    result = []
    for ends_T, normal_s in zip(ends_N, np.split(normal_S, np.cumsum(counts_N)[:-1]), strict=True):
        placed_T = np.zeros(len(ends_T))
        placed_T[ends_T] = normal_s
        result.append(sum_of_later(placed_T))
    return result
