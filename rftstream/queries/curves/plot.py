"""Curves of a run as PNG: over steps and over wall time. Only records in force are drawn.

They are drawn by matplotlib's Agg without pyplot, so that nothing global changes and no display is needed.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from rftstream.config.parts.registry import suggest
from rftstream.errors import ConfigError, importing
from rftstream.queries.curves.history import History
from rftstream.queries.curves.lines import (
    COLORS,
    INK,
    Axis,
    Floats,
    Line,
    evaluations,
    metric,
    over_steps,
    over_time,
)
from rftstream.queries.curves.panels import MAX_LINES, Panel, panels
from rftstream.queries.curves.smoothing import smoothed_by_stage, window
from rftstream.queries.formatting import duration, number, plural

NUM_MARKED = 40
"""Most points of a line that are marked."""

MOST_DECADES = 4
"""Most decades of a logarithmic axis."""

NUM_COLUMNS = 3
ROW_INCHES, MARGIN_INCHES = 3.15, 1.4

FACE, FAINT = "white", "#999999"
STROKES = {
    "solid": "-",
    "dash": (0, (4, 2)),
    "dot": (0, (1, 1.5)),
    "dashdot": (0, (5, 1.5, 1, 1.5)),
    "longdash": (0, (8, 2)),
    "longdashdot": (0, (8, 1.5, 1, 1.5)),
}
"""Strokes for the names in panels.DASHES."""
REWARD_CHANGED = "reward changed"
"""Words beside the line from which on another reward scores."""
DPI = 110


STYLE: Any = {"font.size": 9, "axes.formatter.useoffset": False, "text.parse_math": False}


def can_draw() -> bool:
    """Return whether the package that draws pictures is installed."""
    return find_spec("matplotlib") is not None


def plot(history: History, *, run: str, folder: Path) -> list[Path]:
    """Write by_step.png and by_time.png into the folder."""
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        return [_draw(history, axis, run, folder / axis.file) for axis in (over_steps(history), over_time(history))]


@dataclass(frozen=True, slots=True)
class Picture:
    """Curves of a run as a picture. `draw` makes it, and a notebook shows it."""

    png: bytes

    def save(self, file: str | Path) -> Path:
        """Write the picture as a PNG file, and return its path."""
        Path(file).write_bytes(self.png)
        return Path(file)

    def _repr_png_(self) -> bytes:
        return self.png


def draw(history: History, *, run: str, metrics: Sequence[str] = (), by_time: bool = False) -> Picture:
    """Draw the curves of these metrics of steps, or of evaluations by their names; of none: all that `plot` draws.
    ConfigError for one that the run does not have, or if matplotlib is missing."""
    with importing("plot", "matplotlib", install="rftstream[plots]"):
        import matplotlib
    axis = over_time(history) if by_time else over_steps(history)
    every = [panel for panel in panels(history, axis) if panel.lines or not panel.optional]
    shown = [_panel_of(history, axis, name) for name in metrics] or every
    content = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        _figure(history, axis, run, shown).savefig(content, format="png")
    return Picture(content.getvalue())


def _panel_of(history: History, axis: Axis, name: str) -> Panel:
    own = [result for result in history.evaluations if result.evaluation == name]
    if own:
        return Panel(title=name, unit="", lines=evaluations(replace(history, evaluations=tuple(own)), axis))
    if lines := metric(history, axis, name, ""):
        return Panel(title=name, unit="", lines=lines)
    known = {name for step in history.steps for name in step.metrics} | {one.evaluation for one in history.evaluations}
    raise ConfigError(f"plot: unknown {name!r}; {suggest(name, sorted(known))}")


def write_events(history: History, folder: Path) -> Path:
    """Write the history as TensorBoard event files into the folder."""
    from rftstream.trackers.tensorboard import TensorBoard

    tracker = TensorBoard(folder)
    tracker.update([*history.steps, *history.evaluations])
    tracker.close(ended=True)
    return folder


def view(lines: Sequence[Line]) -> tuple[float, float] | None:
    """Return limits that ignore outliers, up to 1 % of a line at each end; None if all values can be shown. Each line
    is judged by itself, so that a short line does not count as the outliers of a long one."""
    ranges = [_usual(np.sort(line.y)) for line in lines if len(line.y)]
    if not any(is_cut for _, _, is_cut in ranges):
        return None
    return min(low for low, _, _ in ranges), max(high for _, high, _ in ranges)


def _usual(values: Floats) -> tuple[float, float, bool]:
    """Return limits for sorted values, and whether some of them are outside."""
    whole = float(values[0]), float(values[-1]), False
    if len(values) < 50:
        return whole
    few = math.ceil(len(values) / 100)
    low, high = values[few], values[-1 - few]
    room = high - low
    if room == 0:  # a line that is constant except for its outliers is drawn to show these
        return whole
    if values[-1] <= high + 3 * room and values[0] >= low - 3 * room:
        return whole
    return float(max(values[0], low - room / 2)), float(min(values[-1], high + room / 2)), True


def goes_wide(values: Floats) -> bool:
    """Return whether the values span over two orders of magnitude, so that a logarithmic axis shows more."""
    return bool(len(values) and values.min() > 0 and values.max() > 100 * values.min())


def log_view(values: Floats) -> tuple[float, float]:
    """Return the limits of a logarithmic axis. Negligible values, such as rounding errors, are below them."""
    top = float(values.max())
    return max(float(values.min()), top / 10**MOST_DECADES), top


def above(line: Line, least: float) -> Line:
    """Return a line without its values below `least`, which would look like drops on a logarithmic axis."""
    there = line.y >= least
    return replace(line, x=line.x[there], y=line.y[there])


def subtitle(history: History) -> str:
    """Return the run's main numbers in a line."""
    facts = [plural(len(history.steps), "step")]
    if rewards := history.rewards():
        first, last = map(number, history.reward_ends()[:2])
        long = len(rewards) >= 10
        means = f"reward {first} in the first tenth, {last} in the last" if long else f"reward {last}"
        facts.append(means + history.since_change)
    if len(history.steps) > 1:
        first_s, last_s = (history.at_work_s(history.steps[place].recorded_at) for place in (0, -1))
        facts.append(duration(last_s - first_s) + (" without pauses" if history.pauses else ""))
    if history.resumes:
        facts.append(f"resumed {len(history.resumes)} times" if len(history.resumes) > 1 else "resumed once")
    if skipped := sum(step.skipped for step in history.steps):
        facts.append(skipped_text(skipped))
    return "   ·   ".join(facts)


def skipped_text(count: int) -> str:
    """Return the number of skipped batches in words."""
    return f"{count:,} batch{'' if count == 1 else 'es'} skipped (not finite)"


# --------------------------------------------------------------------------------------------- drawing


def _draw(history: History, axis: Axis, run: str, file: Path) -> Path:
    shown = [panel for panel in panels(history, axis) if panel.lines or not panel.optional]
    partial = file.with_suffix(".partial")
    try:
        _figure(history, axis, run, shown).savefig(partial, format="png")
        partial.replace(file)  # so that a reader, or a full disk, never leaves half a picture
    finally:
        partial.unlink(missing_ok=True)
    return file


def _figure(history: History, axis: Axis, run: str, shown: Sequence[Panel]) -> Any:
    """Return a figure of these panels. Where there are many, the first is two wide."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_columns = min(len(shown), NUM_COLUMNS)
    shift = 1 if len(shown) > NUM_COLUMNS else 0
    rows = math.ceil((len(shown) + shift) / num_columns)
    height = rows * ROW_INCHES + MARGIN_INCHES
    figure = Figure(figsize=(15 if num_columns == NUM_COLUMNS else 8 * num_columns, height), dpi=DPI, facecolor=FACE)
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(
        rows, num_columns, left=0.06, right=0.94, top=1 - 1.4 / height, bottom=0.63 / height, hspace=0.42, wspace=0.34
    )
    figure.text(0.05, 1 - 0.45 / height, run, fontsize=17, fontweight="bold", color=INK)
    figure.text(0.05, 1 - 0.72 / height, subtitle(history), fontsize=10, color=FAINT)
    for place, panel in enumerate(shown, shift):
        columns = slice(0, 2) if shift and place == 1 else place % num_columns
        ax = _panel(figure.add_subplot(grid[place // num_columns, columns]), axis, panel)
        if place == shift:
            _label(ax, "resumed", axis.resumes[:12])
            _label(ax, "next stage", axis.stages[:12])
            for x, text in (*axis.settings, *axis.pauses)[:12]:
                _label(ax, shorten(text, 40), [x], at_top=False)
        if panel.marks_skipped:
            _mark_skipped(ax, history, axis)
    return figure


def _panel(ax: Any, axis: Axis, panel: Panel) -> Any:
    unit, lines = panel.unit, panel.lines
    left, right = [line for line in lines if not line.right], [line for line in lines if line.right]
    if not left:
        left, right, unit = right, [], panel.right_unit or unit
    ax.set_title(panel.title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=22)
    _frame(ax)
    ax.set_xlabel(axis.label, color=FAINT, fontsize=8)
    ax.set_ylabel(unit, color=FAINT, fontsize=8)
    _x_limits(ax, axis)
    for x in axis.resumes:
        ax.axvline(x, color=FAINT, linewidth=0.9, linestyle=(0, (2, 3)), zorder=1)
    for x in axis.stages:
        ax.axvline(x, color="#cccccc", linewidth=0.9, zorder=1)
    for x, _ in (*axis.settings, *axis.pauses):
        ax.axvline(x, color=INK, linewidth=0.8, zorder=1)
    if not lines:
        ax.text(0.5, 0.5, panel.empty, transform=ax.transAxes, ha="center", va="center", color=FAINT)
        ax.set_yticks([])
        return ax
    _draw_lines(ax, left, COLORS, axis.stages, from_zero=panel.from_zero, log_if_wide=panel.log_if_wide)
    handles = [*ax.collections, *ax.get_lines()]
    if right:
        twin = ax.twinx()
        _frame(twin, is_right=True)
        _draw_lines(twin, right, COLORS[len(left) :], axis.stages, from_zero=True)
        twin.set_ylabel(panel.right_unit, color=COLORS[len(left)], fontsize=8)
        twin.tick_params(axis="y", colors=COLORS[len(left)])
        ax.set_ylabel(unit, color=COLORS[0], fontsize=8)
        ax.tick_params(axis="y", colors=COLORS[0])
        handles += twin.get_lines()
    changes = sorted({position for line in lines for position in line.x[line.changed].tolist()})
    for x in changes:
        ax.axvline(x, color=INK, linewidth=0.8, zorder=1)
    _label(ax, REWARD_CHANGED, changes[:12], at_top=False)
    if len(left) > MAX_LINES:
        handles += ax.plot([], [], linestyle="none", label=f"+{len(left) - MAX_LINES:,} more")
    if shown := [handle for handle in handles if not handle.get_label().startswith("_")]:
        _legend(ax, shown)
    return ax


def _legend(ax: Any, handles: Sequence[Any]) -> None:
    """Draw the legend below the title: in one row, or in two of small letters with long names shortened."""
    labels = [handle.get_label() for handle in handles]
    width = ax.get_position().width * ax.figure.get_figwidth()
    fits = sum(len(label) + 5 for label in labels) < 15 * width
    columns = len(labels) if fits else math.ceil(len(labels) / 2)
    ax.legend(
        handles=handles,
        labels=labels if fits else [shorten(label, int(18 * width / columns) - 6) for label in labels],
        loc="lower left",
        bbox_to_anchor=(0.0, 0.985),
        ncols=columns,
        frameon=False,
        fontsize=8 if fits else 6.5,
        handlelength=1.3,
        columnspacing=1.2,
        labelspacing=0.15,
        labelcolor=INK,
        borderaxespad=0.1,
    )


def shorten(label: str, length: int) -> str:
    """Cut the middle out of a long label, since similar names often differ at an end."""
    if len(label) <= length:
        return label
    end = (length - 1) // 2
    return f"{label[: length - 1 - end]}…{label[len(label) - end :]}"


def _frame(ax: Any, *, is_right: bool = False) -> None:
    for side in ("top", "left" if is_right else "right"):
        ax.spines[side].set_visible(False)
    for spine in ax.spines.values():
        spine.set_color("#cccccc")
    ax.tick_params(colors="#666666", length=3, labelsize=8)
    if not is_right:
        ax.grid(axis="y", color="#e8e8e8", linewidth=0.8)
        ax.set_axisbelow(True)


def _draw_lines(
    ax: Any, lines: Sequence[Line], colors: Sequence[str], stages: Floats, *, from_zero: bool, log_if_wide: bool = False
) -> None:
    lines = lines[:MAX_LINES]
    values = np.concatenate([line.y for line in lines]) if lines else np.empty(0)
    is_log = log_if_wide and goes_wide(values)
    limits = view(lines)
    stacked: Floats | None = None
    for line, default in zip(lines, colors, strict=False):
        color = line.color or default
        if line.area:
            stacked = _draw_area(ax, line, color, stages, stacked)
            continue
        width = window(len(line.y)) if line.smooth else 1
        marked = len(line.x) <= NUM_MARKED
        style: dict[str, Any] = {
            "color": color,
            "linestyle": STROKES[line.dash],
            "label": f" {line.label}" if line.label.startswith("_") else line.label or "_",  # _ is hidden
        }
        if width > 1:
            faint = {"color": color, "alpha": 0.3 if len(line.y) < 1000 else 0.18, "linewidth": 0.8, "label": "_"}
            raw = above(line, log_view(values)[0]) if is_log else line
            ax.plot(*_with_gaps(raw, raw.y), **faint)
            usual = line.y if limits is None or is_log else np.clip(line.y, *limits)
            ax.plot(*_with_gaps(line, smoothed_by_stage(line, usual, width, stages)), linewidth=1.8, **style)
        else:
            ax.plot(*_with_gaps(line, line.y), linewidth=1.5, marker="o" if marked else None, markersize=4, **style)
    if is_log:
        ax.set_yscale("log")
        low, high = log_view(values)
        ax.set_ylim(low / 1.3, high * 1.3)
        ax.yaxis.set_minor_formatter(lambda value, _: "")
    elif limits is not None:
        ax.set_ylim(*limits)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    if from_zero and len(values) and values.min() >= 0:
        top = ax.get_ylim()[1]
        ax.set_ylim(0, 1.04 * top if top > 0 and values.max() > 0 else 1)


def _with_gaps(line: Line, values: Floats) -> tuple[Floats, Floats]:
    """Return positions and values of a line, with a NaN in each gap."""
    return np.insert(line.x, line.gaps, line.x[line.gaps]), np.insert(values, line.gaps, math.nan)


def _draw_area(ax: Any, line: Line, color: str, stages: Floats, below: Floats | None) -> Floats:
    """Draw an area. Return its upper edge, on which the next area is stacked."""
    values = smoothed_by_stage(line, line.y, window(len(line.y)) if line.smooth else 1, stages)
    if below is None or len(below) != len(values):
        below = np.zeros(len(values))
    top: Floats = below + values
    ax.fill_between(line.x, below, top, color=color, alpha=0.45, linewidth=0, label=line.label)
    return top


def _x_limits(ax: Any, axis: Axis) -> None:
    """Give all panels the same limits, with room at both ends even for a single point."""
    from matplotlib.ticker import MaxNLocator

    places = np.concatenate([axis.steps, axis.resumes, [0.0]])
    span = max(float(places.max()), 1.0 if axis.whole else 1e-9)
    ax.set_xlim(-0.02 * span, 1.03 * span)
    ax.xaxis.set_major_locator(
        MaxNLocator(nbins=10 if ax.get_position().width > 0.4 else 6, steps=[1, 2, 2.5, 5, 10], integer=axis.whole)
    )
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")


def _label(ax: Any, text: str, places: Sequence[float] | Floats, *, at_top: bool = True) -> None:
    for x in places:
        ax.annotate(
            text,
            (x, 1 if at_top else 0),
            xycoords=("data", "axes fraction"),
            xytext=(3, -4 if at_top else 4),
            textcoords="offset points",
            rotation=90,
            va="top" if at_top else "bottom",
            fontsize=7,
            color=FAINT,
        )


def _mark_skipped(ax: Any, history: History, axis: Axis) -> None:
    skipped = axis.steps[[step.skipped for step in history.steps]] if history.steps else axis.steps
    if len(skipped):
        ax.plot(
            skipped, np.full(len(skipped), 0.02), "|", transform=ax.get_xaxis_transform(), color="#B00020", markersize=9
        )
        ax.text(
            0.99,
            0.94,
            skipped_text(len(skipped)),
            transform=ax.transAxes,
            ha="right",
            fontsize=8,
            color="#B00020",
        )
