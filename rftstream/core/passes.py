"""pass@k, unbiased."""

from __future__ import annotations

import math


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Chance that at least one of k samples passes, estimated from n samples without bias.

    1 - C(n - c, k) / C(n, k), with n = num_samples and c = num_passed (Chen et al. 2021, arXiv 2107.03374, eq. 1)."""
    if not 0 <= num_passed <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} of {num_passed} passed out of {num_samples}: expected passed <= samples >= k >= 1")
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)
