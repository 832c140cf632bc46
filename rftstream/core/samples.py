"""Statistics of n samples of each problem, unbiased and without random draws: pass@k, best@k, worst@k. And sums of
floats that every Python gives alike."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Sequence


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Return the probability that at least one of k samples passes, an unbiased estimate from n samples.

    1 - C(n - c, k) / C(n, k), with n = num_samples and c = num_passed (Chen et al. 2021, arXiv 2107.03374, eq. 1)."""
    if not 0 <= num_passed <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} of {num_passed} passed out of {num_samples}: expected passed <= samples >= k >= 1")
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def best_at_k(values: Sequence[float], k: int) -> float:
    """Return the expected maximum of k samples, an unbiased estimate from n: the mean over all subsets of size k.

    sum_i C(i - 1, k - 1) / C(n, k) x_(i), with x_(1) <= ... <= x_(n): x_(i) is the largest of C(i - 1, k - 1) subsets.
    For values of 0 and 1 it is pass@k. The implementations that draw subsets (verl, Trinity-RFT) estimate this number.
    """
    n = len(values)
    if not 1 <= k <= n:
        raise ValueError(f"best@{k} of {n} samples: expected samples >= k >= 1")
    subsets = math.comb(n, k)
    return math.fsum(math.comb(i, k - 1) / subsets * value for i, value in enumerate(sorted(values)))


def worst_at_k(values: Sequence[float], k: int) -> float:
    """Return the expected minimum of k samples, estimated as in `best_at_k`."""
    return -best_at_k([-value for value in values], k)


def sample_std(values: Sequence[float]) -> float:
    """Return the standard deviation with n - 1. At least two values are needed."""
    if len(values) < 2:
        raise ValueError(f"standard deviation of {len(values)} values, expected at least 2")
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def summarise_samples(groups: Iterable[Sequence[float]], ks: Sequence[int], *, pass_reward: float) -> dict[str, float]:
    """Return the metrics of an evaluation from the rewards of each problem's scored samples.

    mean: of all samples. std: among the samples of a problem, as a mean over the problems with at least two. pass@k,
    and for k > 1 best@k and worst@k: means over the problems with at least k. A number without such a problem is left
    out.
    """
    groups = [group for group in groups if group]
    samples = [reward for group in groups for reward in group]
    if not samples:
        return {}
    values = {"mean": math.fsum(samples) / len(samples)}
    if several := [sample_std(group) for group in groups if len(group) > 1]:
        values["std"] = math.fsum(several) / len(several)
    for k in ks:
        enough = [group for group in groups if len(group) >= k]
        if not enough:
            continue
        passed = [pass_at_k(len(group), sum(reward >= pass_reward for reward in group), k) for group in enough]
        values[f"pass@{k}"] = math.fsum(passed) / len(enough)
        if k > 1:
            values[f"best@{k}"] = math.fsum(best_at_k(group, k) for group in enough) / len(enough)
            values[f"worst@{k}"] = math.fsum(worst_at_k(group, k) for group in enough) / len(enough)
    return values


def plain_sum(values: Iterable[float]) -> float:
    """Add floats one after another, rounding each time. From Python 3.12 on `sum` makes up for rounding, so a run that
    another Python recorded would be replayed with other bits."""
    return functools.reduce(operator.add, values, 0.0)
