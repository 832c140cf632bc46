"""Detection of repeated text. Shapes: T tokens."""

from __future__ import annotations

import numpy as np

from rftstream.errors import ContractError


def repeats(token_ids_T: np.ndarray, count: int, max_period: int) -> bool:
    """Return whether the last `count` tokens repeat one pattern: for some p <= max_period, t[i] = t[i - p] for all of
    them except the first p. False while there are fewer tokens. int [T].

    Kimi k1.5 (arXiv:2501.12599, section 2.6.2) detects repeated sequences during generation and ends them early,
    without giving a rule. This rule requires all examined tokens to be periodic, so that text with merely common
    phrases never meets it."""
    if token_ids_T.ndim != 1 or token_ids_T.dtype.kind != "i":
        raise ContractError(f"token_ids: got {token_ids_T.dtype} {token_ids_T.shape}, expected integers [T]")
    if len(token_ids_T) < count:
        return False
    tail_T = token_ids_T[len(token_ids_T) - count :]
    # The last token also occurs one period before the end. This excludes most periods quickly.
    periods = count - 1 - np.flatnonzero(tail_T[:-1] == tail_T[-1])[::-1]
    return any(bool((tail_T[period:] == tail_T[:-period]).all()) for period in periods if period <= max_period)
