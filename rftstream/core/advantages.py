"""Advantages from the rewards of groups and of steps, and penalties that are subtracted from rewards before.

Shapes: N rollouts, `groups_N` names the group of each; T tokens of a rollout, S steps of all rollouts.

A group whose rewards are all equal except for rounding carries no signal: if their variance (with n - 1) is below
MIN_VARIANCE, all advantages are exactly 0. All computations are in float64, for every input float type.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MIN_VARIANCE = 1e-12
"""Values with less variance differ only by rounding: their standard deviation is below a millionth."""


def compute_group_advantages(rewards_N: np.ndarray, groups_N: np.ndarray, *, eps: float = 1e-6) -> np.ndarray:
    """Return how much better each rollout is than its siblings, in standard deviations.

    A = (R - mean_g) / (std_g + eps), std with n - 1; exactly 0 where a group's rewards are all equal, except for
    rounding; this includes a group of one. GRPO (arXiv 2402.03300), which leaves n or n - 1 open; n - 1 as in its
    implementations.

    rewards_N: float [N], finite. groups_N: int [N], any numbers. Returns float64 [N].
    """
    if not eps >= 0:
        raise ValueError(f"advantages: got eps {eps}, expected at least 0")
    rewards_N, inverse_N = _checked(rewards_N, groups_N)
    centred_N, variance_G = _spread(rewards_N, inverse_N)
    has_signal_N, std_N = (variance_G >= MIN_VARIANCE)[inverse_N], np.sqrt(variance_G)[inverse_N]
    return np.where(has_signal_N, centred_N / np.where(has_signal_N, std_N + eps, 1.0), 0.0)


def center_on_group_mean(rewards_N: np.ndarray, groups_N: np.ndarray) -> np.ndarray:
    """Return A = R - mean_g; exactly 0 where a group's rewards are all equal, except for rounding. Dr.GRPO (arXiv
    2503.20783).

    rewards_N: float [N], finite. groups_N: int [N]. Returns float64 [N].
    """
    rewards_N, inverse_N = _checked(rewards_N, groups_N)
    centred_N, variance_G = _spread(rewards_N, inverse_N)
    return np.where((variance_G >= MIN_VARIANCE)[inverse_N], centred_N, 0.0)


def scale_by_batch(centred_N: np.ndarray, rewards_N: np.ndarray, *, eps: float = 1e-6) -> np.ndarray:
    """Return A = centred / (std + eps), std with n - 1 over all rewards of the batch. PPO Lite (arXiv 2508.08221).

    centred_N: float [N], rewards minus the means of their groups. rewards_N: float [N]. Returns float64 [N].
    """
    if centred_N.shape != rewards_N.shape or not eps > 0:
        raise ValueError(
            f"advantages: got {centred_N.shape} and {rewards_N.shape}, eps {eps}, expected [N] twice, eps above 0"
        )
    spread = rewards_N.astype(np.float64).std(ddof=1) if len(rewards_N) > 1 else 0.0
    return np.asarray(centred_N / (spread + eps))


def compute_leave_one_out_advantages(rewards_N: np.ndarray, groups_N: np.ndarray) -> np.ndarray:
    """Return A = R - mean of the other siblings = n / (n - 1) (R - mean_g); 0 in a group of one. RLOO (arXiv
    2402.14740).

    rewards_N: float [N], finite. groups_N: int [N]. Returns float64 [N].
    """
    centred_N = center_on_group_mean(rewards_N, groups_N)
    _, inverse_N = _checked(rewards_N, groups_N)
    count_N = np.bincount(inverse_N)[inverse_N]
    return np.asarray(centred_N * count_N / np.maximum(count_N - 1, 1))


def compute_likelihood_advantages(rewards_N: np.ndarray, groups_N: np.ndarray) -> np.ndarray:
    """Return A = (R - mean_g) / mean_g, so that rare successes weigh most. 0 where all rewards are equal, except for
    rounding; this includes mean_g = 0. MaxRL (arXiv 2602.02710).

    rewards_N: float [N], finite, none negative (ValueError). groups_N: int [N]. Returns float64 [N].
    """
    centred_N = center_on_group_mean(rewards_N, groups_N)
    if (rewards_N < 0).any():
        raise ValueError(f"advantages: got a reward of {float(rewards_N.min())}, expected none below 0")
    rewards_N, inverse_N = _checked(rewards_N, groups_N)
    mean_N = _means(rewards_N, inverse_N)[1][inverse_N]
    return np.where(mean_N > 0, centred_N / np.where(mean_N > 0, mean_N, 1.0), 0.0)


def compute_soft_baseline_advantages(rewards_N: np.ndarray, groups_N: np.ndarray, *, tau: float) -> np.ndarray:
    """Return A = R - tau (logsumexp_g(R / tau) - log n). The subtracted term is the value of a group at the optimum of
    reward minus tau KL.

    Between the mean of the group (large tau) and its best (tau near 0); exactly 0 where all are equal, but for
    rounding. The exponents are at most 0, so nothing is clamped. OPMD (arXiv 2505.17826, appendix A). rewards_N: float
    [N], finite. groups_N: int [N]. tau above 0. Returns float64 [N].
    """
    if not tau > 0:
        raise ValueError(f"advantages: got tau {tau}, expected more than 0")
    rewards_N, inverse_N = _checked(rewards_N, groups_N)
    count_G, _ = _means(rewards_N, inverse_N)
    best_G = np.full(len(count_G), -np.inf)
    np.maximum.at(best_G, inverse_N, rewards_N)
    total_G = np.bincount(inverse_N, weights=np.exp((rewards_N - best_G[inverse_N]) / tau), minlength=len(count_G))
    baseline_G = best_G + tau * np.log(total_G / np.maximum(count_G, 1))
    _, variance_G = _spread(rewards_N, inverse_N)
    return np.where((variance_G >= MIN_VARIANCE)[inverse_N], rewards_N - baseline_G[inverse_N], 0.0)


def compute_baseline_advantages(rewards_N: np.ndarray, groups_N: np.ndarray, baseline_N: np.ndarray) -> np.ndarray:
    """Return A = R - R_b, where b is the baseline rollout of the group. ReMax (arXiv 2310.10505), where b is sampled
    greedily.

    0 for the baseline itself, in a group without one, and where all rewards of a group are equal, except for rounding.
    Of several baselines the first counts. rewards_N: float [N], finite. groups_N: int [N]. baseline_N: bool [N].
    Returns float64 [N].
    """
    rewards_N, inverse_N = _checked(rewards_N, groups_N)
    if baseline_N.shape != rewards_N.shape or baseline_N.dtype != bool:
        raise ValueError(f"advantages: got a baseline {baseline_N.dtype} {baseline_N.shape}, expected bool [N]")
    places, first = np.unique(inverse_N[baseline_N], return_index=True)
    baseline_G = np.full(int(inverse_N.max()) + 1 if len(inverse_N) else 0, np.nan)
    baseline_G[places] = rewards_N[baseline_N][first]
    found_N = rewards_N - baseline_G[inverse_N]
    _, variance_G = _spread(rewards_N, inverse_N)
    without_N = baseline_N | np.isnan(found_N) | (variance_G < MIN_VARIANCE)[inverse_N]
    return np.where(without_N, 0.0, found_N)


def whiten(values_N: np.ndarray, *, eps: float = 1e-8) -> np.ndarray:
    """Return (x - mean) / sqrt(var + eps), var with n - 1, as verl and TRL do. Return zeros where var is below
    MIN_VARIANCE: all values are equal except for rounding, or there is only one. float [N] -> float64."""
    if values_N.ndim != 1 or values_N.dtype.kind != "f" or not eps >= 0:
        raise ValueError(
            f"whiten: got {values_N.dtype} {values_N.shape}, eps {eps}, expected floats [N], eps 0 or more"
        )
    values_N = values_N.astype(np.float64)
    variance = values_N.var(ddof=1) if len(values_N) > 1 else 0.0
    if variance < MIN_VARIANCE:
        return np.zeros_like(values_N)
    return np.asarray((values_N - values_N.mean()) / np.sqrt(variance + eps))


def have_signal(rewards_N: np.ndarray, groups_N: np.ndarray) -> np.ndarray:
    """Return which rollouts are in a group whose rewards differ by more than rounding. The others carry no gradient.
    bool [N]."""
    rewards_N, inverse_N = _checked(rewards_N, groups_N)
    _, variance_G = _spread(rewards_N, inverse_N)
    return np.asarray((variance_G >= MIN_VARIANCE)[inverse_N])


def _means(rewards_N: np.ndarray, inverse_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    count_G = np.bincount(inverse_N)
    return count_G, np.bincount(inverse_N, weights=rewards_N) / np.maximum(count_G, 1)


def _spread(rewards_N: np.ndarray, inverse_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return R - mean_g of each rollout, and each group's variance with n - 1, which is 0 for a group of one."""
    count_G, mean_G = _means(rewards_N, inverse_N)
    centred_N = rewards_N - mean_G[inverse_N]
    square_G = np.bincount(inverse_N, weights=centred_N**2, minlength=len(count_G))
    return centred_N, square_G / np.maximum(count_G - 1, 1)


def _checked(rewards_N: np.ndarray, groups_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if rewards_N.ndim != 1 or groups_N.shape != rewards_N.shape:
        raise ValueError(f"advantages: got rewards {rewards_N.shape} and groups {groups_N.shape}, expected [N] twice")
    if rewards_N.dtype.kind != "f" or groups_N.dtype.kind not in "iu":
        raise TypeError(f"advantages: got {rewards_N.dtype} and {groups_N.dtype}, expected floats and integers")
    if not np.isfinite(rewards_N).all():
        raise ValueError("advantages: a reward is not finite; what can't be scored has no reward")
    _, inverse_N = np.unique(groups_N, return_inverse=True)
    return rewards_N.astype(np.float64), inverse_N


def compute_step_advantages(
    rewards_N: Sequence[np.ndarray], ends_N: Sequence[np.ndarray], groups_N: np.ndarray, *, eps: float = 1e-6
) -> list[np.ndarray]:
    """Return for each token how much better its step and the later steps are than the group's mean step.

    A_t = sum over steps s of the rollout that end at t or later of (r_s - mean_g) / (std_g + eps), mean and std (with
    n - 1) over all steps of all rollouts of the group: DeepSeekMath (arXiv 2402.03300, section 4.1.3, process
    supervision). Exactly 0 where all steps of a group have the same reward, except for rounding. Tokens after the
    last end have 0.

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


def compute_overlong_penalties(lengths_N: np.ndarray, limits_N: np.ndarray, *, share: float) -> np.ndarray:
    """Return a soft length penalty: from 0 to -1 along the last `share` of the allowed tokens.

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
    """Return for each token the sum of its own and all later values: y_t = sum_{s >= t} x_s. float [T] -> float64
    [T]."""
    return np.asarray(np.cumsum(values_T.astype(np.float64)[::-1])[::-1])


def compute_teacher_gaps(
    teacher_logprobs_T: np.ndarray, behavior_logprobs_T: np.ndarray, loss_mask_T: np.ndarray
) -> np.ndarray:
    """Return how much likelier each sampled token is under the teacher than under the sampling policy.

    d = logp_teacher - logp_behavior at sampled tokens, 0 elsewhere and at the first token, which nothing comes before.
    Its mean over samples of the policy is -KL(policy || teacher), and as advantage of a policy gradient it follows the
    gradient of that (GKD, arXiv 2306.13649; the k1 estimator).

    All float or integer [T] of one length; masked positions may hold anything. Returns float64 [T].
    """
    if not teacher_logprobs_T.shape == behavior_logprobs_T.shape == loss_mask_T.shape or loss_mask_T.ndim != 1:
        raise ValueError(
            f"teacher gaps: got {teacher_logprobs_T.shape}, {behavior_logprobs_T.shape} and {loss_mask_T.shape}, "
            "expected [T] three times"
        )
    if not np.isin(loss_mask_T, (0, 1)).all():
        raise ValueError("teacher gaps: loss mask holds values that are neither 0 nor 1, expected 1 where sampled")
    sampled_T = loss_mask_T != 0
    sampled_T[:1] = False
    gaps_T = np.zeros(len(loss_mask_T))
    gaps_T[sampled_T] = teacher_logprobs_T[sampled_T].astype(np.float64) - behavior_logprobs_T[sampled_T]
    if not np.isfinite(gaps_T).all():
        raise ValueError("teacher gaps: a logprob is not finite; what can't be compared has no verdict")
    return gaps_T
