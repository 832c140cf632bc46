"""How far annotators agree: shares of equal answers, Krippendorff's alpha and Wilson's interval. Functions of answers
alone.

Answers of different kinds are no common scale: whoever calls this gives answers of one kind.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Answer = float | str
Z_95 = 1.959963984540054
"""Standard deviations within which the normal distribution has 95 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far some answers agree."""

    num_questions: int
    """Questions that at least two have answered."""
    similarity: float | None
    """Mean of the questions: of labels and choices the share of pairs of answers that are equal, of ratings 1 minus the
    mean distance over the scale. None: no such question."""
    alpha: float | None
    """Krippendorff's: 1 if all are equal, 0 as by chance, less if they are systematically different. None: there is
    nothing to compare, or all answers are the same."""


class Coincidences:
    """Pairs of answers to the same question, as Krippendorff counts them. The caller makes one, calls `add` for each
    pair, and then `alpha`."""

    def __init__(self, *, is_interval: bool) -> None:
        """`is_interval`: answers are numbers, and their squared distance counts; else whether they are equal."""
        self._is_interval = is_interval
        self._weights: dict[Answer, float] = defaultdict(float)
        self._observed = 0.0
        """Sum of the distances of the pairs."""

    def add(self, first: Answer, second: Answer, weight: float) -> None:
        """Count a pair, in both orders."""
        self._weights[first] += weight
        self._weights[second] += weight
        distance = (float(first) - float(second)) ** 2 if self._is_interval else float(first != second)
        self._observed += 2.0 * weight * distance

    def alpha(self) -> float | None:
        """Return 1 - observed / expected disagreement (Krippendorff 2004, Content Analysis, chapter 11). None if
        nothing is expected to differ."""
        total = sum(self._weights.values())
        if self._is_interval:
            squares = sum(weight * float(answer) ** 2 for answer, weight in self._weights.items())
            linear = sum(weight * float(answer) for answer, weight in self._weights.items())
            expected = 2.0 * (total * squares - linear**2)
        else:
            expected = total**2 - sum(weight**2 for weight in self._weights.values())
        if len(self._weights) < 2 or expected <= 0.0:
            return None
        return 1.0 - self._observed * (total - 1.0) / expected


def agreement_of_all(questions: Iterable[Sequence[Answer]], *, scale: tuple[float, float] | None) -> Agreement:
    """Return how far the answers to each question agree. `scale`: of ratings, which are numbers on it; None for labels
    and choices, which are equal or not."""
    sums = Coincidences(is_interval=scale is not None)
    means = []
    for answers in questions:
        pairs = list(itertools.combinations(answers, 2))
        for first, second in pairs:
            sums.add(first, second, 1.0 / (len(answers) - 1))
        if pairs:
            means.append(statistics.fmean(_similarity(first, second, scale) for first, second in pairs))
    return _agreement(means, sums)


def agreement_with_others(
    questions: Iterable[tuple[Answer, Sequence[Answer]]], *, scale: tuple[float, float] | None
) -> Agreement:
    """Return how far the answers of one annotator agree with those of the others to the same questions. Each question
    counts the same, however many have answered it. With one other it is Krippendorff's alpha of the two. `scale`: as
    in `agreement_of_all`."""
    sums = Coincidences(is_interval=scale is not None)
    means = []
    for own, others in questions:
        for other in others:
            sums.add(own, other, 1.0 / len(others))
        if others:
            means.append(statistics.fmean(_similarity(own, other, scale) for other in others))
    return _agreement(means, sums)


def _agreement(means: Sequence[float], sums: Coincidences) -> Agreement:
    return Agreement(
        num_questions=len(means), similarity=statistics.fmean(means) if means else None, alpha=sums.alpha()
    )


def _similarity(first: Answer, second: Answer, scale: tuple[float, float] | None) -> float:
    if scale is None:
        return float(first == second)
    return 1.0 - abs(float(first) - float(second)) / (scale[1] - scale[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """How many of some are of a kind."""

    count: int
    total: int

    @property
    def share(self) -> float | None:
        """Return the share; None of none."""
        return self.count / self.total if self.total else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return Wilson's interval, which has the true share in it with 95 %; None of none (Wilson 1927)."""
        if not self.total:
            return None
        share, spread = self.count / self.total, Z_95**2 / self.total
        centre = share + spread / 2.0
        width = Z_95 * math.sqrt(share * (1.0 - share) / self.total + spread / (4.0 * self.total))
        low, high = (centre - width) / (1.0 + spread), (centre + width) / (1.0 + spread)
        return max(0.0, low), min(1.0, high)

    def to_json(self) -> Mapping[str, object]:
        """Return the numbers as a dict for JSON."""
        return {"count": self.count, "total": self.total, "share": self.share, "interval": self.interval}
