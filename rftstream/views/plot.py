"""Curves of a run as PNG: over steps and over wall time. Only records in force are drawn.

Drawn by matplotlib's Agg without pyplot, so that nothing global is touched and no display is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rftstream.messages import EvalResult, StepRecord
from rftstream.views.history import History
from rftstream.views.layout import duration, number, plural

Floats = npt.NDArray[np.float64]

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8C6D1F", "#56B4E9", "#7F3C8D", "#666666")
"""Okabe and Ito's, told apart by the colour-blind too; the yellow darkened for white paper."""

MAX_LINES = 6
"""Of one panel."""

NUM_MARKED = 40
"""Up to so many points a line shows them."""

FACE, INK, FAINT = "white", "#333333", "#999999"
DPI = 110

TIME_UNITS = ((120.0, 1.0, "s"), (7200.0, 60.0, "min"), (4 * 86400.0, 3600.0, "h"), (math.inf, 86400.0, "days"))
"""Up to so many seconds -> seconds per unit, its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """What the panels are drawn over."""

    file: str
    label: str
    steps: Floats
    """Places of history.steps."""
    resumes: Floats
    of_evaluation: Callable[[EvalResult], float]
    whole: bool
    """Only whole numbers have a meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    x: Floats
    y: Floats
    label: str
    dashed: bool = False
    smooth: bool = True
    """Draw a running mean, and the values themselves faintly behind it."""
    right: bool = False
    """On an axis of its own at the right."""
    color: str | None = None
    """Default: the next of COLORS."""


def plot(history: History, *, run: str, folder: Path) -> list[Path]:
    """Writes by_step.png and by_time.png into the folder."""
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"font.size": 9, "axes.formatter.useoffset": False, "text.parse_math": False}):
        return [_draw(history, axis, run, folder / axis.file) for axis in (over_steps(history), over_time(history))]


def write_events(history: History, folder: Path) -> Path:
    """The same for TensorBoard: event files in the folder."""
    from rftstream.trackers.tensorboard import TensorBoard

    tracker = TensorBoard(folder)
    tracker.update([*history.steps, *history.evaluations])
    tracker.close()
    return folder


# --------------------------------------------------------------------------------------------- what is drawn


def over_steps(history: History) -> Axis:
    return Axis(
        file="by_step.png",
        label="version (trained batches)",
        steps=_floats(step.name.version for step in history.steps),
        resumes=_floats(step.name.version for step in history.resumes),
        of_evaluation=lambda result: float(result.name.version),
        whole=True,
    )


def over_time(history: History) -> Axis:
    """Time runs from the first record on. An evaluation stands where its version was made."""
    times = [step.recorded_at for step in (*history.steps, *history.resumes)]
    begin = min(times, default=0.0)
    first = history.steps[0] if history.steps else None
    if first is not None:  # the first step began before it was recorded
        begin = min(begin, first.recorded_at - first.metrics.get("step_s", 0.0) - first.metrics.get("wait_s", 0.0))
    span = max(times, default=0.0) - begin
    _, unit_s, unit = next(item for item in TIME_UNITS if span <= item[0])
    made = {step.name.version: step.recorded_at for step in history.steps}
    return Axis(
        file="by_time.png",
        label=f"wall time ({unit})",
        steps=(_floats(step.recorded_at for step in history.steps) - begin) / unit_s,
        resumes=(_floats(step.recorded_at for step in history.resumes) - begin) / unit_s,
        of_evaluation=lambda result: (max(made.get(result.name.version, begin), begin) - begin) / unit_s,
        whole=False,
    )


def metric(history: History, axis: Axis, name: str, label: str, *, scale: float = 1.0, **style: Any) -> list[Line]:
    """The line of a metric, or none if no step has it."""
    values = _floats(step.metrics.get(name, math.nan) for step in history.steps) * scale
    there = np.isfinite(values)
    return [Line(x=axis.steps[there], y=values[there], label=label, **style)] if there.any() else []


def rates(history: History, axis: Axis, name: str, fallback: str, label: str, **style: Any) -> list[Line]:
    """A recorded rate, or what a step counted over the time that it took."""
    if lines := metric(history, axis, name, label, **style):
        return lines

    def rate(step: StepRecord) -> float:
        seconds = step.metrics.get("step_s", 0.0) + step.metrics.get("wait_s", 0.0)
        return step.metrics.get(fallback, math.nan) / seconds if seconds > 0 else math.nan

    values = _floats(rate(step) for step in history.steps)
    there = np.isfinite(values)
    return [Line(x=axis.steps[there], y=values[there], label=label, **style)] if there.any() else []


def per_taskset(history: History, axis: Axis) -> list[Line]:
    """One line for each taskset if there are several."""
    names = sorted({name for step in history.steps for name in step.metrics if name.startswith("reward/")})
    if len(names) < 2:
        return []
    return [line for name in names for line in metric(history, axis, name, name.removeprefix("reward/"))]


def shares(history: History, axis: Axis) -> list[Line]:
    """Groups that gave no gradient, by why; results that never occurred are left out."""
    names = {"zero_variance_share": "zero variance", "filtered_share": "filtered", "expired_share": "expired",
             "dead_share": "dead"}  # fmt: skip
    lines = [line for name, label in names.items() for line in metric(history, axis, name, label, scale=100)]
    return [line for line in lines if line.y.any()] or lines[:1]


def evaluations(history: History, axis: Axis) -> list[Line]:
    """The mean of each evaluation, its pass@k, and best and worst of the most samples, where these say more."""
    lines: list[Line] = []
    for i, evaluation in enumerate(sorted({result.evaluation for result in history.evaluations})):
        results = [result for result in history.evaluations if result.evaluation == evaluation]
        x = _floats(axis.of_evaluation(result) for result in results)
        drawn: list[Floats] = []
        for name in _shown({name for result in results for name in result.metrics}):
            y = _floats(result.metrics.get(name, math.nan) for result in results)
            if name == "mean" or not any(_same(y, other) for other in drawn):
                drawn.append(y)
                label = evaluation if name == "mean" else f"{evaluation} {name}"
                color = COLORS[i % len(COLORS)]
                lines.append(Line(x=x, y=y, label=label, dashed=name != "mean", smooth=False, color=color))
    return lines


def _shown(names: Collection[str]) -> list[str]:
    """mean, pass@k by k, and best@k and worst@k of the largest k."""
    of = {
        kind: sorted((name for name in names if name.startswith(f"{kind}@")), key=lambda name: (len(name), name))
        for kind in ("pass", "best", "worst")
    }
    return [*(name for name in names if name == "mean"), *of["pass"], *of["best"][-1:], *of["worst"][-1:]]


def smoothed(values: Floats, width: int) -> Floats:
    """Running mean over `width` values, centred; at the ends over as many as there are."""
    if width < 2 or len(values) < 3:
        return values
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    low, high = np.maximum(0, places - width // 2), np.minimum(len(values), places + width // 2 + 1)
    means: Floats = (sums[high] - sums[low]) / (high - low)
    return means


def window(num_values: int) -> int:
    """Width of the running mean: none for a handful, 4 % of a long run."""
    return 1 if num_values < 12 else max(5, num_values // 25)


def view(lines: Sequence[Line]) -> tuple[float, float] | None:
    """Limits that a few outliers do not dictate; None if all can be shown."""
    values = np.concatenate([line.y for line in lines]) if lines else np.empty(0)
    if len(values) < 50:
        return None
    low, high = np.percentile(values, [1, 99])
    room = max(high - low, 1e-12)
    if values.max() <= high + 3 * room and values.min() >= low - 3 * room:
        return None
    return max(values.min(), low - room / 2), min(values.max(), high + room / 2)


# --------------------------------------------------------------------------------------------- drawing


def _draw(history: History, axis: Axis, run: str, file: Path) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 14), dpi=DPI, facecolor=FACE)
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(4, 3, left=0.05, right=0.955, top=0.9, bottom=0.045, hspace=0.42, wspace=0.34)
    figure.text(0.05, 0.968, run, fontsize=17, fontweight="bold", color=INK)
    figure.text(0.05, 0.949, _subtitle(history), fontsize=10, color=FAINT)

    def panel(row: int, column: Any, title: str, unit: str, lines: list[Line], **options: Any) -> Any:
        return _panel(figure.add_subplot(grid[row, column]), axis, title, unit, lines, **options)

    def of(name: str, label: str, **style: Any) -> list[Line]:
        return metric(history, axis, name, label, **style)

    tasksets = per_taskset(history, axis)
    reward = of("reward", "all tasksets", color=INK) if tasksets else of("reward", "")
    if reward:
        main = panel(0, slice(0, 2), "Reward", "mean over scored rollouts", [*tasksets[: MAX_LINES - 1], *reward])
    else:  # demonstrations or pairs alone
        main = panel(0, slice(0, 2), "Loss", "", [
            *of("loss", "trained"), *of("held_out_loss", "held out"),
            *of("accuracy", "accuracy", right=True), *of("held_out_accuracy", "accuracy, held out", right=True),
        ], right_unit="share of pairs")  # fmt: skip
    _label_resumes(main, axis)
    panel(
        0,
        2,
        "Held-out evaluation",
        "mean, pass@k, best and worst of k",
        evaluations(history, axis),
        empty="no evaluation yet",
    )
    panel(
        1,
        0,
        "Completion length",
        "tokens",
        [*of("length_mean", "mean"), *of("truncated_share", "truncated", scale=100, right=True)],
        from_zero=True,
        right_unit="truncated, %",
    )
    panel(1, 1, "Staleness", "versions", [*of("staleness_mean", "mean"), *of("staleness_max", "max")], from_zero=True)
    panel(1, 2, "Groups without signal", "% of decided groups", shares(history, axis), from_zero=True)
    loss = panel(2, 0, "Loss", "", of("loss", ""))
    _mark_skipped(loss, history, axis)
    panel(2, 1, "Gradient norm", "before clipping", of("grad_norm", ""), log_if_wide=True)
    panel(2, 2, "Entropy", "nats per token", of("entropy", ""), from_zero=True)
    panel(
        3,
        0,
        "Trainer against sampler",
        "KL (k3), 0.001 nats per token",
        [*of("mismatch_k3", "KL", scale=1000), *of("ess", "ESS", right=True)],
        log_if_wide=True,
        right_unit="effective sample size, share",
    )
    panel(3, 1, "Rates", "rollouts per s", [
        *rates(history, axis, "rollouts_per_s", "rollouts", "rollouts/s"),
        *rates(history, axis, "tokens_per_s", "tokens", "tokens/s", right=True),
    ], from_zero=True, right_unit="trained tokens per s")  # fmt: skip
    panel(3, 2, "Time of a step", "s", [*of("step_s", "training"), *of("wait_s", "waiting for a batch"),
                                        *of("publish_s", "publishing")], from_zero=True)  # fmt: skip
    figure.savefig(file)
    return file


def _subtitle(history: History) -> str:
    facts = [plural(len(history.steps), "step")]
    if rewards := history.rewards():
        tenth = max(1, len(rewards) // 10)
        first, last = (number(float(np.mean(some))) for some in (rewards[:tenth], rewards[-tenth:]))
        long = len(rewards) >= 10
        facts.append(f"reward {first} in the first tenth, {last} in the last" if long else f"reward {last}")
    if len(history.steps) > 1:
        facts.append(duration(history.steps[-1].recorded_at - history.steps[0].recorded_at))
    if history.resumes:
        facts.append(f"resumed {len(history.resumes)} times" if len(history.resumes) > 1 else "resumed once")
    return "   ·   ".join(facts)


def _panel(
    ax: Any, axis: Axis, title: str, unit: str, lines: list[Line], *,
    from_zero: bool = False, log_if_wide: bool = False, right_unit: str = "", empty: str = "not recorded",
) -> Any:  # fmt: skip
    ax.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=19)
    _frame(ax)
    ax.set_xlabel(axis.label, color=FAINT, fontsize=8)
    ax.set_ylabel(unit, color=FAINT, fontsize=8)
    _x_limits(ax, axis)
    for x in axis.resumes:
        ax.axvline(x, color=FAINT, linewidth=0.9, linestyle=(0, (2, 3)), zorder=1)
    if not lines:
        ax.text(0.5, 0.5, empty, transform=ax.transAxes, ha="center", va="center", color=FAINT)
        ax.set_yticks([])
        return ax
    left, right = [line for line in lines if not line.right], [line for line in lines if line.right]
    _draw_lines(ax, left, COLORS, from_zero=from_zero, log_if_wide=log_if_wide)
    handles = list(ax.get_lines())
    if right:
        twin = ax.twinx()
        _frame(twin, is_right=True)
        _draw_lines(twin, right, COLORS[len(left) :], from_zero=True)
        twin.set_ylabel(right_unit, color=COLORS[len(left)], fontsize=8)
        twin.tick_params(axis="y", colors=COLORS[len(left)])
        if left:
            ax.set_ylabel(unit, color=COLORS[0], fontsize=8)
            ax.tick_params(axis="y", colors=COLORS[0])
        handles += twin.get_lines()
    shown = [handle for handle in handles if not handle.get_label().startswith("_")]
    if shown:
        ax.legend(
            handles=shown,
            loc="lower left",
            bbox_to_anchor=(0.0, 0.985),
            ncols=len(shown),
            frameon=False,
            fontsize=8,
            handlelength=1.3,
            columnspacing=1.2,
            labelcolor=INK,
            borderaxespad=0.1,
        )
    return ax


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
    ax: Any, lines: Sequence[Line], colors: Sequence[str], *, from_zero: bool, log_if_wide: bool = False
) -> None:
    values = np.concatenate([line.y for line in lines]) if lines else np.empty(0)
    limits = view(lines)
    for line, default in zip(lines[:MAX_LINES], colors, strict=False):
        color = line.color or default
        width = window(len(line.y)) if line.smooth else 1
        marked = len(line.x) <= NUM_MARKED
        style: dict[str, Any] = {
            "color": color,
            "linestyle": (0, (4, 2)) if line.dashed else "-",
            "label": line.label or "_",
        }
        if width > 1:
            faint = {"color": color, "alpha": 0.3 if len(line.y) < 1000 else 0.18, "linewidth": 0.8, "label": "_"}
            ax.plot(line.x, line.y, **faint)
            usual = line.y if limits is None else np.clip(line.y, *limits)
            ax.plot(line.x, smoothed(usual, width), linewidth=1.8, **style)
        else:
            ax.plot(line.x, line.y, linewidth=1.5, marker="o" if marked else None, markersize=4, **style)
    if log_if_wide and len(values) and values.min() > 0 and values.max() > 100 * values.min():
        ax.set_yscale("log")
        ax.yaxis.set_minor_formatter(lambda value, _: "")
    elif limits is not None:
        ax.set_ylim(*limits)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    if from_zero and len(values) and values.min() >= 0:
        top = ax.get_ylim()[1]
        ax.set_ylim(0, 1.04 * top if top > 0 and values.max() > 0 else 1)


def _x_limits(ax: Any, axis: Axis) -> None:
    """All panels the same, with room at both ends also for a single point."""
    from matplotlib.ticker import MaxNLocator

    places = np.concatenate([axis.steps, axis.resumes, [0.0]])
    span = max(float(places.max()), 1.0 if axis.whole else 1e-9)
    ax.set_xlim(-0.02 * span, 1.03 * span)
    ax.xaxis.set_major_locator(
        MaxNLocator(nbins=10 if ax.get_position().width > 0.4 else 6, steps=[1, 2, 2.5, 5, 10], integer=axis.whole)
    )
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")


def _label_resumes(ax: Any, axis: Axis) -> None:
    for x in axis.resumes[:12]:
        ax.annotate(
            "resumed",
            (x, 1),
            xycoords=("data", "axes fraction"),
            xytext=(3, -4),
            textcoords="offset points",
            rotation=90,
            va="top",
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
            f"{plural(len(skipped), 'batch') if len(skipped) == 1 else f'{len(skipped)} batches'} skipped (not finite)",
            transform=ax.transAxes,
            ha="right",
            fontsize=8,
            color="#B00020",
        )


def _floats(values: Any) -> Floats:
    return np.fromiter(values, np.float64)


def _same(one: Floats, other: Floats) -> bool:
    return len(one) == len(other) and bool(np.allclose(one, other, equal_nan=True))
