"""Learning from another model's probabilities. Shapes: T tokens."""

from __future__ import annotations

import numpy as np


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
