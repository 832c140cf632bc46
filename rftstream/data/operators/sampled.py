"""What a policy sampled in a rollout, as operators look at it.

Shapes: N sampled tokens of all segments, in order.
"""

from __future__ import annotations

import numpy as np

from rftstream.contracts.rollouts import Rollout, Segment
from rftstream.data.operators.base import ScoredRollout


def rollout_of(scored: ScoredRollout) -> Rollout:
    """Return the whole rollout."""
    rollout = scored.verified.rollout
    assert isinstance(rollout, Rollout), "it was sampled"
    return rollout


def sampled_tokens(scored: ScoredRollout) -> np.ndarray:
    """Return the ids of the sampled tokens: int32 [N]."""
    parts = [segment.token_ids.numpy()[_is_sampled(segment)] for segment in rollout_of(scored).segments]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def sampled_logprobs(scored: ScoredRollout) -> np.ndarray:
    """Return the behavior logprobs of the sampled tokens: float64 [N]."""
    parts = [segment.behavior_logprobs.numpy()[_is_sampled(segment)] for segment in rollout_of(scored).segments]
    return (np.concatenate(parts) if parts else np.empty(0)).astype(np.float64)


def ngrams_of(tokens_N: np.ndarray, size: int) -> list[bytes]:
    """Return the n-grams of tokens in order, those that occur twice twice; none if there are fewer tokens."""
    if len(tokens_N) < size:
        return []
    return [ngram.tobytes() for ngram in np.lib.stride_tricks.sliding_window_view(tokens_N, size)]


def _is_sampled(segment: Segment) -> np.ndarray:
    return np.asarray(segment.loss_mask.numpy() == 1)
