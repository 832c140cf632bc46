"""The sampled tokens of a rollout, for operators.

Shapes: N sampled tokens of all segments, in order.
"""

from __future__ import annotations

import functools
import hashlib

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


def hash_ngrams(tokens_N: np.ndarray, size: int) -> list[int]:
    """Return a number for each n-gram of tokens, in order; none if there are fewer tokens.

    Equal n-grams have equal numbers. Different ones share a number with a probability of about 2**-64. n-grams are not
    compared directly, since the buffer checks each rollout, and rollouts have many tokens."""
    count = len(tokens_N) - size + 1
    if count < 1:
        return []
    tokens_N = tokens_N.astype(np.uint64)
    hashes = np.zeros(count, np.uint64)
    for place, factor in enumerate(_factors(size)):
        hashes += tokens_N[place : place + count] * factor  # modulo 2**64
    return hashes.tolist()


@functools.cache
def _factors(size: int) -> tuple[np.uint64, ...]:
    """Return fixed odd numbers without a pattern. They never change, since any release may recompute decisions from the
    log."""
    digests = (hashlib.sha256(b"%d" % place).digest() for place in range(size))
    return tuple(np.uint64(int.from_bytes(digest[:8], "little") | 1) for digest in digests)


def _is_sampled(segment: Segment) -> np.ndarray:
    return np.asarray(segment.loss_mask.numpy() == 1)


def is_right(scored: ScoredRollout, on: str, right_from: float) -> bool:
    """Return whether a rollout's reward or named part is large enough. A rollout that lacks the part is wrong."""
    score = scored.score(on)
    return score is not None and score >= right_from
