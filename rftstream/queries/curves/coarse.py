"""Merges neighbouring steps, or results of an evaluation, so that charts of long runs stay small."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Generic, TypeVar

from rftstream.contracts.versions import EvalResult, StepRecord

MAX_CHARTED = 1_000
"""Most steps, and most results of an evaluation, in a chart. Beyond that, neighbours are merged."""

Measured = TypeVar("Measured", StepRecord, EvalResult)


class Coarse(Generic[Measured]):
    """Merges neighbouring items so that at most MAX_CHARTED remain. Its owner calls `through` repeatedly with all
    items; earlier merges are kept. Items of two eras are never merged, so there may be one more for each era."""

    def __init__(self) -> None:
        self._taken: tuple[Measured, ...] = ()
        self._width = 1
        self._parts: list[_Neighbours[Measured]] = []

    def through(self, items: tuple[Measured, ...], eras: Sequence[int]) -> list[Measured]:
        """Return the means of all items. It starts anew if the items do not extend those of the last call. `eras`: a
        number for each item, which grows where items do not compare with those before."""
        if items[: len(self._taken)] != self._taken:
            self._taken, self._width, self._parts = (), 1, []
        for place in range(len(self._taken), len(items)):
            self._take(items[place], eras[place])
        self._taken = items
        return [part.mean() for part in self._parts]

    def _take(self, item: Measured, era: int) -> None:
        if self._parts and len(self._parts) >= MAX_CHARTED + self._parts[-1].era and not self._has_room(era):
            self._width *= 2
            self._join()
        if self._has_room(era):
            self._parts[-1].add(item)
        else:
            self._parts.append(_Neighbours(item, era))

    def _has_room(self, era: int) -> bool:
        return bool(self._parts) and self._parts[-1].era == era and self._parts[-1].num_items < self._width

    def _join(self) -> None:
        """Join each two neighbours of an era."""
        parts: list[_Neighbours[Measured]] = []
        for part in self._parts:
            if parts and parts[-1].era == part.era and parts[-1].num_items + part.num_items <= self._width:
                parts[-1].join(part)
            else:
                parts.append(part)
        self._parts = parts


class _Neighbours(Generic[Measured]):
    """Merged neighbours: the newest of them, with the means of their metrics."""

    def __init__(self, item: Measured, era: int) -> None:
        self.era = era
        self.num_items = 0
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self.add(item)

    def add(self, item: Measured) -> None:
        """Add the next item."""
        self._newest: Measured = item
        self._mean: Measured | None = None
        self.num_items += 1
        for name, value in item.metrics.items():
            self._add(name, value, 1)

    def join(self, other: _Neighbours[Measured]) -> None:
        """Add all items of the next neighbour."""
        self._newest, self._mean = other._newest, None
        self.num_items += other.num_items
        for name, value in other._sums.items():
            self._add(name, value, other._counts[name])

    def _add(self, name: str, value: float, count: int) -> None:
        if math.isfinite(value):
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._counts[name] = self._counts.get(name, 0) + count

    def mean(self) -> Measured:
        """Return the newest item with the means of the metrics. The stage is that of the newest."""
        if self._mean is None:
            own = {name: value for name, value in self._newest.metrics.items() if name == "stage"}
            means = {name: value / self._counts[name] for name, value in self._sums.items()} | own
            self._mean = self._newest if self.num_items == 1 else replace(self._newest, metrics=means)
        return self._mean


def eras(items: Iterable[StepRecord | EvalResult], begins: Collection[int]) -> list[int]:
    """Return the number of each item's era. `begins`: versions at which one begins."""
    ordered = sorted(begins)
    return [bisect_right(ordered, item.name.version) for item in items]


def begins_of_stages(steps: Sequence[StepRecord]) -> set[int]:
    """Return the versions at which a stage begins."""
    changed = (after for before, after in pairwise(steps) if before.metrics.get("stage") != after.metrics.get("stage"))
    return {step.name.version for step in changed}
