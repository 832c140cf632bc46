"""Panels of curves in two forms: as data that a browser draws, and as a picture for a browser without scripts."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rftstream.queries.curves.history import History
from rftstream.queries.curves.lines import COLORS, Axis, Line, over_steps, over_time
from rftstream.queries.curves.panels import MAX_LINES, THEMES, Panel, evaluation_panel, panels
from rftstream.queries.curves.plot import REWARD_CHANGED, goes_wide, log_view, view
from rftstream.queries.curves.smoothing import MAX_POINTS, smoothed_by_stage, thinned, window
from rftstream.queries.formatting import number

FLAT_RATIO = 20
"""Ratio of the largest values of two lines above which each has its own limits, in panels of different quantities."""
WIDTH, HEIGHT, MARGIN = 640, 200, 8
"""Size and margin of a picture, in the units of its view box."""
FIRST_PANELS = ("Reward", "Loss", "Evaluations", "Completion length", "Staleness")
"""Titles of the panels that a run's glance shows, if the run has them."""
NUM_FIRST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnCurve:
    """A line of a chart, in the units of the picture."""

    points: str
    """For a polyline, in the units of the view box."""
    color: int
    """Number of its colour in COLORS."""
    dash: str
    """The line's dash, or `point` for one point alone, which is there twice."""
    faint: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A panel as templates show it. `make_chart` makes it."""

    title: str
    unit: str
    theme: str
    """Theme of the panel; empty for those that are shown large."""
    label: str
    """Label of the horizontal axis."""
    curves: tuple[DrawnCurve, ...]
    changes: tuple[tuple[str, str], ...]
    """Position in the view box of each change of the reward and of settings, and of each pause, with words about it."""
    low: str
    high: str
    """Limits of the vertical axis, as text."""
    begin: str
    end: str
    """Limits of the horizontal axis, as text."""
    summary: str
    """The newest values in words, for readers who do not see the picture."""
    data: Mapping[str, Any]
    """For the browser's own drawing, as JSON."""
    num_more: int
    """Number of further lines of the panel that the chart does not show."""
    empty: str
    """The text that is shown if there is no line."""


def run_charts(
    history: History,
    *,
    by_time: bool = False,
    only_first: bool = False,
    titles: Collection[str] = (),
    width: int | None = None,
    most_points: int = MAX_POINTS,
) -> list[Chart]:
    """Return the charts of a run, over versions or over time. `titles`: only these; `width`: see `make_chart`."""
    axis, shown = shown_panels(history, by_time=by_time)
    if only_first:
        shown = [panel for panel in shown if panel.title in FIRST_PANELS][:NUM_FIRST]
    chosen = [panel for panel in shown if panel.title in titles] or shown
    return [make_chart(panel, axis, width=width, most_points=most_points) for panel in chosen]


def shown_panels(history: History, *, by_time: bool = False) -> tuple[Axis, list[Panel]]:
    """Return the panels that have something to show, and their axis."""
    axis = over_time(history) if by_time else over_steps(history)
    return axis, [panel for panel in panels(history, axis) if panel.lines or not panel.optional]


def by_theme(charts: Sequence[Chart]) -> dict[str, list[Chart]]:
    """Return the charts by theme, in the order of THEMES. Those without a theme come first."""
    found = {theme: [chart for chart in charts if chart.theme == theme] for theme in ("", *THEMES)}
    return {theme: some for theme, some in found.items() if some}


def table_text(panel: Panel, axis: Axis) -> str:
    """Return the values of a panel as CSV: a row for each place on the axis, a column for each line."""
    columns = [dict(zip(line.x.tolist(), line.y.tolist(), strict=True)) for line in panel.lines]
    units = [panel.right_unit if line.right else panel.unit for line in panel.lines]
    heads = [
        f"{line.label or panel.title} ({unit})" if unit else line.label
        for line, unit in zip(panel.lines, units, strict=True)
    ]
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow([axis.label, *heads])
    for x in sorted(set().union(*columns)):
        writer.writerow([f"{x:.10g}", *(f"{column[x]:.10g}" if x in column else "" for column in columns)])
    return text.getvalue()


def evaluation_chart(history: History) -> Chart:
    """Return the chart of a run's evaluations, over versions."""
    axis = over_steps(history)
    return make_chart(evaluation_panel(history, axis), axis)


def runs_chart(title: str, runs: Mapping[str, History], *, by_time: bool = False) -> Chart:
    """Return one chart with a line of a panel for each run, labelled with the runs' names: of what most runs have, such
    as an evaluation, else the main line of each. Where runs have lines of different things, labels name these, too."""
    found: dict[str, list[Line]] = {}
    panel, axis = Panel(title=title, unit="", lines=()), None
    for name, history in runs.items():
        axis = over_time(history) if by_time else over_steps(history)
        for one in panels(history, axis):
            if one.title == title:
                panel = one
                found[name] = [line for line in one.lines if not line.right and not line.area]
    shared = Counter(line.label for lines in found.values() for line in lines)
    chosen = {
        name: max(lines, key=lambda line: shared[line.label])  # the first of those that most runs have
        for name, lines in found.items()
        if lines
    }
    differ = len({line.label for line in chosen.values()}) > 1
    lines = [
        replace(
            chosen[name],
            label=f"{name}: {chosen[name].label}" if differ and chosen[name].label else name,
            color=COLORS[i % len(COLORS)],
            dash="solid",
        )
        for i, name in enumerate(runs)
        if name in chosen
    ]
    axis = axis or over_steps(History(steps=(), resumes=(), evaluations=(), current=None))
    none = np.empty(0)
    axis = replace(axis, stages=none, resumes=none, settings=(), pauses=())
    return make_chart(replace(panel, lines=lines, right_unit=""), axis, of_runs=True)


def make_chart(
    panel: Panel, axis: Axis, *, width: int | None = None, most_points: int = MAX_POINTS, of_runs: bool = False
) -> Chart:
    """Return a panel as a chart. `width`: number of values in the running means, 1 for none; None: 4 % of them.
    `of_runs`: each line is of another run, by its name."""
    left = [line for line in panel.lines if not line.right][:MAX_LINES]
    right = [line for line in panel.lines if line.right] if left else []
    left = left or [line for line in panel.lines if line.right][:MAX_LINES]
    own = [thinned(_area_smoothed(line, axis), axis, most_points) for line in (*left, *right)]
    lines = _stacked(own)
    values = np.concatenate([line.y for line in left]) if left else np.empty(0)
    is_log = bool(panel.log_if_wide and goes_wide(values))
    least = log_view(values)[0] if is_log else -math.inf
    box = _Box.of(lines[: len(left)], panel, is_log=is_log)
    boxes = [_Box.of([line], panel, is_log=False) for line in left] if panel.mixed and _differ(left) else []
    frames = [*(boxes or [box] * len(left)), *[_Box.of(lines[len(left) :], panel, is_log=False)] * len(right)]
    drawn = [(line, i, _smooth(line, axis, width)) for i, line in enumerate(lines)]
    entries = [
        {
            "label": line.label or panel.title,
            "color": _color(line, i),
            "dash": line.dash,
            "area": line.area,
            "right": i >= len(left),
            "x": _numbers(line.x),
            "y": _numbers(line.y, -math.inf if i >= len(left) else least),
            "mean": _numbers(mean) if mean is not line.y else None,
            "last": number(float((own[i].y if line.area else mean)[-1])) if len(mean) else "",
            "suffix": _suffix(line, mean, panel.right_unit if i >= len(left) else panel.unit),
            "limits": [boxes[i].low, boxes[i].high] if i < len(boxes) else None,
            "range": f"{number(boxes[i].low)} to {number(boxes[i].high)}" if i < len(boxes) else "",
            "gaps": [_numbers(line.x[place - 1 : place + 1]) for place in line.gaps],
        }
        for line, i, mean in drawn
    ]
    changes = sorted({*_reward_changes(lines, of_runs=of_runs), *axis.settings, *axis.pauses[-100:]})
    return Chart(
        title=panel.title,
        theme=panel.theme,
        unit=(panel.right_unit or panel.unit) if left and left[0].right else panel.unit,
        label=axis.label,
        curves=tuple(curve for line, i, mean in drawn for curve in _curves(line, mean, _color(line, i), frames[i])),
        changes=tuple((box.across(x), f"{text} at {number(x)}") for x, text in changes if box.begin <= x <= box.end),
        low="" if boxes else number(box.low),
        high="" if boxes else number(box.high),
        begin=number(box.begin),
        end=number(box.end),
        summary="; ".join(f"{entry['label']} {entry['last']}" for entry in entries if entry["last"]),
        data={
            "title": panel.title,
            "xLabel": axis.label,
            "unit": "each line within its own limits" if boxes else panel.unit,
            "rightUnit": panel.right_unit if right else "",
            "log": is_log,
            "fromZero": panel.from_zero,
            "range": log_view(values) if is_log else view(left),
            "marks": [float(x) for x in (*axis.resumes[-100:], *axis.stages[-100:])],
            "changes": [{"x": x, "text": text} for x, text in changes],
            "lines": entries,
        },
        num_more=max(0, sum(line.right == left[0].right for line in panel.lines) - MAX_LINES) if left else 0,
        empty=panel.empty,
    )


def _reward_changes(lines: Sequence[Line], *, of_runs: bool) -> set[tuple[float, str]]:
    """Return the positions from which on another reward scores, with the words beside them."""
    return {
        (float(x), f"{line.label}: {REWARD_CHANGED}" if of_runs else REWARD_CHANGED)
        for line in lines
        for x in line.x[line.changed]
    }


def _suffix(line: Line, mean: Any, unit: str) -> str:
    """Return the words after the newest value of a line: a percent sign, and that the value is a running mean."""
    is_mean = mean is not line.y or (line.area and window(len(line.y)) > 1)
    return " %" * ("%" in unit) + " smoothed" * is_mean


def _color(line: Line, place: int) -> int:
    """Return the number of a line's colour. A line with another colour, such as a shade, gets a number by its place."""
    return COLORS.index(line.color) if line.color in COLORS else 7 if line.color == "#333333" else place % len(COLORS)


def _area_smoothed(line: Line, axis: Axis) -> Line:
    """Return a line. For an area, return only its running mean, as in the plots."""
    return replace(line, y=smoothed_by_stage(line, line.y, window(len(line.y)), axis.stages)) if line.area else line


def _stacked(lines: Sequence[Line]) -> list[Line]:
    """Return the lines. Each area gets its upper edge as values, since it is stacked on the area before it."""
    found: list[Line] = []
    for line in lines:
        below = found[-1].y if found and found[-1].area else np.zeros(len(line.y))
        found.append(replace(line, y=line.y + below) if line.area and len(below) == len(line.y) else line)
    return found


def _differ(lines: Sequence[Line]) -> bool:
    """Return whether the largest values of the lines differ so much that some lines would be flat."""
    sizes = [float(np.abs(line.y).max(initial=0.0)) for line in lines]
    sizes = [size for size in sizes if size > 0]
    return len(sizes) > 1 and max(sizes) > FLAT_RATIO * min(sizes)


def _smooth(line: Line, axis: Axis, width: int | None) -> Any:
    width = (width or window(len(line.y))) if line.smooth and not line.area else 1
    return smoothed_by_stage(line, line.y, width, axis.stages) if width > 1 else line.y


def _numbers(values: Any, least: float = -math.inf) -> list[float | None]:
    """Return values with the number of digits that is visible. Values below `least` become None and are not drawn."""
    return [float(f"{value:.6g}") if value >= least else None for value in values]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Box:
    """The limits of a picture."""

    begin: float
    end: float
    low: float
    high: float
    is_log: bool

    @staticmethod
    def of(lines: Sequence[Line], panel: Panel, *, is_log: bool) -> _Box:
        x = np.concatenate([line.x for line in lines]) if lines else np.empty(0)
        y = np.concatenate([line.y for line in lines]) if lines else np.empty(0)
        limits = log_view(y) if is_log else view(lines)
        low, high = limits or (float(y.min(initial=math.inf)), float(y.max(initial=-math.inf)))
        if not len(y):
            low, high = 0.0, 1.0
        if panel.from_zero and not is_log:
            low = min(low, 0.0)
        if high <= low:
            low, high = (0.0, 1.0) if panel.from_zero and low == 0 else (low - 0.5, high + 0.5)
        begin, end = (float(x.min()), float(x.max())) if len(x) else (0.0, 1.0)
        return _Box(begin=begin, end=end if end > begin else begin + 1.0, low=low, high=high, is_log=is_log)

    def point(self, x: float, y: float) -> str:
        """Return the position of a point in the picture."""
        low, high = (math.log(self.low), math.log(self.high)) if self.is_log else (self.low, self.high)
        y = min(max(math.log(y) if self.is_log else y, low), high)
        up = (y - low) / ((high - low) or 1.0)
        return f"{self.across(x)},{HEIGHT - MARGIN - up * (HEIGHT - 2 * MARGIN):.1f}"

    def across(self, x: float) -> str:
        """Return how far to the right a position of the axis is in the picture."""
        return f"{MARGIN + (x - self.begin) / (self.end - self.begin) * (WIDTH - 2 * MARGIN):.1f}"


MAX_DRAWN = 400
"""Most points of a line in a picture."""


def _curves(line: Line, mean: Any, color: int, box: _Box) -> list[DrawnCurve]:
    def drawn(y: Any, *, faint: bool) -> Iterator[DrawnCurve]:
        one_in = max(1, len(y) // MAX_DRAWN)
        least = box.low if box.is_log else -math.inf
        for xs, ys in zip(np.split(line.x, line.gaps), np.split(y, line.gaps), strict=True):
            places = zip(xs[::one_in].tolist(), ys[::one_in].tolist(), strict=True)
            points = [box.point(a, b) for a, b in places if b >= least]
            dash = "point" if len(points) == 1 else line.dash
            yield DrawnCurve(
                points=" ".join(points * (2 if dash == "point" else 1)), color=color, dash=dash, faint=faint
            )

    raw = [] if mean is line.y else drawn(line.y, faint=True)
    return [*raw, *drawn(mean, faint=False)]
