"""Running means of lines, and lines of fewer points. Neither mixes values of two stages, rewards or settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rftstream.queries.curves.lines import Axis, Floats, Line

MAX_POINTS = 2_000
"""Most points of a line on a page. A longer line is drawn by the means of equal parts, so that the page opens
quickly."""


def smoothed(values: Floats, width: int) -> Floats:
    """Return the running mean over `width` values, centred; at the ends, over the values that there are."""
    if width < 2 or len(values) < 3:
        return values
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    low, high = np.maximum(0, places - width // 2), np.minimum(len(values), places + width // 2 + 1)
    means: Floats = (sums[high] - sums[low]) / (high - low)
    return means


def smoothed_by_stage(line: Line, values: Floats, width: int, stages: Floats) -> Floats:
    """Smooth each stage separately, since the loss of one stage says nothing about the next; so for each reward."""
    parts = np.split(values, _cuts(line, stages))
    return np.concatenate([_by_rates(line, part, lambda some: smoothed(some, width)) for part in parts])


def _by_rates(line: Line, values: Floats, mean: Callable[[Floats], Floats]) -> Floats:
    """Return means, of a rate the harmonic ones."""
    return 1.0 / mean(1.0 / values) if line.is_rate and (values > 0).all() else mean(values)


def thinned(line: Line, axis: Axis, most: int = MAX_POINTS) -> Line:
    """Return the line with at most about `most` values. A longer line is replaced by the means of equal parts."""
    if len(line.x) <= most:
        return line
    cuts = _cuts(line, np.concatenate([axis.stages, [x for x, _ in axis.settings]]))

    def means(part: Floats) -> Floats:
        return _means(part, round(most * len(part) / len(line.x)))

    x = np.concatenate([means(part) for part in np.split(line.x, cuts)])
    y = np.concatenate([_by_rates(line, part, means) for part in np.split(line.y, cuts)])
    return replace(line, x=x, y=y)


def _means(values: Floats, count: int) -> Floats:
    return np.asarray([part.mean() for part in np.array_split(values, max(1, count))]) if len(values) else values


def _cuts(line: Line, ends: Floats) -> list[int]:
    """Return the numbers of the values before which something begins that does not compare: after `ends`, positions,
    and where another reward scores."""
    return sorted({*np.searchsorted(line.x, ends, side="right").tolist(), *line.changed})


def window(num_values: int) -> int:
    """Return the width of the running mean: 1 for a handful of values, 4 % of a long run."""
    return 1 if num_values < 12 else max(5, num_values // 25)
