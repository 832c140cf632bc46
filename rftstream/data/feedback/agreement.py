"""The agreement of annotators: shares of equal answers, Krippendorff's alpha and Wilson's interval, computed from
answers alone.

Answers of different kinds have no common scale, so callers pass answers of one kind.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rftstream.core.samples import plain_sum

Answer = float | str
Z_95 = 1.959963984540054
"""Number of standard deviations around the mean that contain 95 % of the normal distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The agreement of a set of answers."""

    num_questions: int
    """Number of questions with at least two answers."""
    similarity: float | None
    """Mean over the questions. For labels and choices: the share of pairs of answers that are equal. For ratings: 1
    minus the mean distance divided by the scale. None: no such question."""
    alpha: float | None
    """Krippendorff's alpha: 1 if all answers are equal, 0 for chance, negative for systematic differences. None: there
    is nothing to compare, or all answers are the same."""


class Coincidences:
    """Pairs of answers to the same question, counted as Krippendorff does. The caller makes one, calls `add` for each
    pair, and then `alpha`."""

    def __init__(self, *, is_interval: bool) -> None:
        """`is_interval`: answers are numbers, compared by squared distance; otherwise they are equal or not."""
        self._is_interval = is_interval
        self._weights: dict[Answer, float] = defaultdict(float)
        self._observed = 0.0
        """Sum of the pairs' distances."""

    def add(self, first: Answer, second: Answer, weight: float) -> None:
        """Count a pair, in both orders."""
        self._weights[first] += weight
        self._weights[second] += weight
        distance = (float(first) - float(second)) ** 2 if self._is_interval else float(first != second)
        self._observed += 2.0 * weight * distance

    def alpha(self) -> float | None:
        """Return 1 - observed / expected disagreement (Krippendorff 2004, Content Analysis, chapter 11). None if no
        disagreement is expected."""
        total = plain_sum(self._weights.values())
        if self._is_interval:
            squares = plain_sum(weight * float(answer) ** 2 for answer, weight in self._weights.items())
            linear = plain_sum(weight * float(answer) for answer, weight in self._weights.items())
            expected = 2.0 * (total * squares - linear**2)
        else:
            expected = total**2 - plain_sum(weight**2 for weight in self._weights.values())
        if len(self._weights) < 2 or expected <= 0.0:
            return None
        return 1.0 - self._observed * (total - 1.0) / expected


def agreement_of_all(questions: Iterable[Sequence[Answer]], *, scale: tuple[float, float] | None) -> Agreement:
    """Return the agreement of the answers to each question. `scale`: smallest and largest rating; None for labels and
    choices, which are equal or not."""
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
    """Return the agreement of one annotator's answers with the others' answers to the same questions. Each question has
    the same weight, however many answers it has. With one other annotator the result is Krippendorff's alpha of the
    two. `scale`: as in `agreement_of_all`."""
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
    """The share of items of one kind."""

    count: int
    total: int

    @property
    def share(self) -> float | None:
        """Return the share; None if there are no items."""
        return self.count / self.total if self.total else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return Wilson's interval, which contains the true share with 95 % probability; None if there are no items
        (Wilson 1927)."""
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
