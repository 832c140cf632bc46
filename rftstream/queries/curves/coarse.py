"""Steps and results of evaluations put together, so that curves of a long run cost no more than of a short one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Generic, TypeVar

from rftstream.contracts.versions import EvalResult, StepRecord

MAX_CHARTED = 1_000
"""Steps, and results of an evaluation, that a chart is drawn of. Of more, some neighbours are put together."""

Measured = TypeVar("Measured", StepRecord, EvalResult)


class Coarse(Generic[Measured]):
    """Items put together, some at a time, so that there are at most MAX_CHARTED. Its owner calls `through` for what
    there is, again and again: what was put together before is not put together again."""

    def __init__(self) -> None:
        self._taken: tuple[Measured, ...] = ()
        self._width = 1
        self._parts: list[_Neighbours[Measured]] = []

    def through(self, items: tuple[Measured, ...]) -> list[Measured]:
        """Return the means of all items. It begins anew if they are not those of the last call and more."""
        if items[: len(self._taken)] != self._taken:
            self._taken, self._width, self._parts = (), 1, []
        for place in range(len(self._taken), len(items)):
            self._take(items[place])
        self._taken = items
        return [part.mean() for part in self._parts]

    def _take(self, item: Measured) -> None:
        if self._parts and self._parts[-1].num_items < self._width:
            self._parts[-1].add(item)
            return
        if len(self._parts) == MAX_CHARTED:
            self._width *= 2
            for one, other in zip(self._parts[::2], self._parts[1::2], strict=True):
                one.join(other)
            del self._parts[1::2]
        self._parts.append(_Neighbours(item))


class _Neighbours(Generic[Measured]):
    """Neighbours, as the newest of them with the means of their metrics."""

    def __init__(self, item: Measured) -> None:
        self.num_items = 0
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self.add(item)

    def add(self, item: Measured) -> None:
        """Take the next item."""
        self._newest: Measured = item
        self._mean: Measured | None = None
        self.num_items += 1
        for name, value in item.metrics.items():
            self._add(name, value, 1)

    def join(self, other: _Neighbours[Measured]) -> None:
        """Take all of the neighbour that comes next."""
        self._newest, self._mean = other._newest, None
        self.num_items += other.num_items
        for name, value in other._sums.items():
            self._add(name, value, other._counts[name])

    def _add(self, name: str, value: float, count: int) -> None:
        if math.isfinite(value):
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._counts[name] = self._counts.get(name, 0) + count

    def mean(self) -> Measured:
        """Return the newest item with the means of the metrics; the stage is that of the newest."""
        if self._mean is None:
            own = {name: value for name, value in self._newest.metrics.items() if name == "stage"}
            means = {name: value / self._counts[name] for name, value in self._sums.items()} | own
            self._mean = self._newest if self.num_items == 1 else replace(self._newest, metrics=means)
        return self._mean
