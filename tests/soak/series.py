"""What a soak measures: samples over time, the slope of each after the warm-up, and whether it may be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rftstream.queries.formatting import columns

WARM_UP_SHARE = 0.25
"""Of the time. Caches fill, modules are loaded, the first checkpoints are kept."""
ENDS_SHARE = 0.25
"""Of what comes after the warm-up: the medians of its first and of its last so much are compared, too."""


@dataclass(frozen=True, slots=True)
class Limit:
    """How much a series may grow. It has grown if both its slope and the difference of its ends say so: the slope
    alone is led astray by a step, and the ends by a wave."""

    per_hour: float
    """In the unit of the series."""
    share: float = 0.1
    """Of its median, which is always allowed as the difference of its ends."""


@dataclass(frozen=True, slots=True)
class Line:
    """What came of one series."""

    name: str
    unit: str
    num_samples: int
    first: float
    """Median of the first part after the warm-up."""
    last: float
    most: float
    per_hour: float
    """Slope of the line of least squares after the warm-up."""
    limit: Limit | None

    @property
    def grows(self) -> bool:
        """Whether it has grown by more than it may."""
        if self.limit is None:
            return False
        slack = self.limit.share * abs(self.first)
        return self.per_hour > self.limit.per_hour and self.last - self.first > slack

    def to_json(self) -> dict[str, Any]:
        limit = None if self.limit is None else self.limit.per_hour
        return {
            "name": self.name, "unit": self.unit, "samples": self.num_samples, "first": round(self.first, 3),
            "last": round(self.last, 3), "most": round(self.most, 3), "per_hour": round(self.per_hour, 4),
            "limit_per_hour": limit, "grows": self.grows,
        }  # fmt: skip


@dataclass
class Series:
    """Samples by name. Whoever soaks calls `add` again and again, and `lines` at the end."""

    began_s: float
    units: dict[str, str] = field(default_factory=dict)
    samples: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, now_s: float, values: Mapping[str, float], unit: str) -> None:
        """Note values of one moment, all of one unit."""
        for name, value in values.items():
            self.units[name] = unit
            self.samples[name].append((now_s - self.began_s, value))

    def lines(self, limits: Mapping[str, Limit]) -> list[Line]:
        """Return what came of each series. `limits` are by unit."""
        return [
            line
            for name in sorted(self.samples)
            if (line := self._line(name, limits.get(self.units[name]))) is not None
        ]

    def _line(self, name: str, limit: Limit | None) -> Line | None:
        """None for what was not there long enough to be judged: a process that was started again."""
        at, values = np.array(self.samples[name]).T
        took = max(one[-1][0] for one in self.samples.values())
        warm = at >= WARM_UP_SHARE * took
        if warm.sum() < 8 or np.ptp(at[warm]) < 0.5 * (1 - WARM_UP_SHARE) * took:
            return None
        at, kept = at[warm], values[warm]
        slope, _ = np.polyfit(at - at.mean(), kept, 1)
        ends = max(1, int(ENDS_SHARE * len(kept)))
        first, last = float(np.median(kept[:ends])), float(np.median(kept[-ends:]))
        return Line(
            name, self.units[name], len(values), first, last, float(values.max()), float(slope) * 3600.0, limit
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        return {name: [[round(at, 1), value] for at, value in samples] for name, samples in self.samples.items()}


def table(lines: Iterable[Line]) -> str:
    """Return the lines as a table for people, the ones that grow marked."""
    rows = [("", "unit", "first", "last", "most", "per hour", "limit", "")]
    for line in lines:
        limit = "-" if line.limit is None else f"{line.limit.per_hour:g}"
        numbers = [f"{value:,.1f}" for value in (line.first, line.last, line.most, line.per_hour)]
        rows.append((line.name, line.unit, *numbers, limit, "GROWS" if line.grows else ""))
    return "\n".join(columns(rows, left=2))


def draw(series: Series, path: Path, title: str) -> None:
    """Write a picture: one panel a unit, one line a series."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    units = sorted(set(series.units.values()))
    figure = Figure(figsize=(9, 2.4 * len(units)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    for number, unit in enumerate(units, start=1):
        axes = figure.add_subplot(len(units), 1, number)
        for name in sorted(name for name, own in series.units.items() if own == unit):
            at, values = zip(*series.samples[name], strict=True)
            axes.plot([one / 60 for one in at], values, linewidth=1, label=name)
        axes.set_ylabel(unit)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=5, ncols=4, loc="lower right")
    axes.set_xlabel("minutes")
    figure.savefig(path, dpi=110)
