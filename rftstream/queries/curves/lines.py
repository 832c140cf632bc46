"""The lines of a run's charts and plots, and the axes that they are drawn over."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from rftstream.algorithms.reward_changes import find_reward_changes
from rftstream.contracts.versions import EvalResult, StepRecord
from rftstream.queries.curves.history import History
from rftstream.queries.formatting import duration

Floats = npt.NDArray[np.float64]

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8C6D1F", "#56B4E9", "#7F3C8D", "#666666")
"""Okabe and Ito's colours, which colour-blind people can tell apart; the yellow is darkened for white paper."""

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")

INK = "#333333"

TIME_UNITS = ((120.0, 1.0, "s"), (7200.0, 60.0, "min"), (4 * 86400.0, 3600.0, "h"), (math.inf, 86400.0, "days"))
"""Largest number of seconds for which the unit is used -> seconds per unit, and its name."""


OF_REWARDS = ("reward", "reward_std", "part", "role", "metric")
"""Beginnings, before a slash, of the names of metrics whose values rewards gave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """The horizontal axis of the panels."""

    file: str
    label: str
    steps: Floats
    """Position of each of history.steps."""
    resumes: Floats
    """Where a trainer started with the settings of before, without a pause."""
    stages: Floats
    """The position of the last step of each stage except the last stage."""
    of_evaluation: Callable[[EvalResult], float]
    whole: bool
    """Whether only whole numbers have a meaning."""
    changes: Mapping[str, tuple[float, ...]]
    """Taskset -> positions of the steps from which on another reward scores it."""
    settings: tuple[tuple[float, str], ...]
    """Positions from which the run went on with other settings, and a label for each."""
    pauses: tuple[tuple[float, str], ...]
    """Positions of the last steps before pauses, and a label for each."""

    @property
    def breaks(self) -> tuple[float, ...]:
        """Return the positions after which lines are interrupted: pauses on an axis of time, which leaves them out."""
        return () if self.whole else tuple(position for position, _ in self.pauses)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of a panel: its values and its style."""

    x: Floats
    y: Floats
    label: str
    dash: str = "solid"
    """One of DASHES."""
    smooth: bool = True
    """Whether a running mean is drawn, with the values themselves faintly behind it."""
    is_rate: bool = False
    """Whether its values are amounts by times that differ: the running mean is then their harmonic mean, since the
    mean of rates is above the rate of the whole."""
    right: bool = False
    """Whether the line has its own axis on the right."""
    color: str | None = None
    """Default: the next of COLORS."""
    area: bool = False
    """Whether the line is a filled area, stacked on the areas before it, for parts of a whole."""
    changes: tuple[float, ...] = ()
    """Positions from which on its values are by another reward, and do not compare with those before: the line has a
    gap there."""
    breaks: tuple[float, ...] = ()
    """Positions after which the line is interrupted, though its values compare: those of `Axis.breaks`."""

    @property
    def changed(self) -> list[int]:
        """Return the numbers of the values from which on another reward scores."""
        return self._within(np.searchsorted(self.x, self.changes).tolist())

    @property
    def gaps(self) -> list[int]:
        """Return the numbers of the values that have a gap before them."""
        return self._within([*self.changed, *np.searchsorted(self.x, self.breaks, side="right").tolist()])

    def _within(self, places: Iterable[int]) -> list[int]:
        return sorted({place for place in places if 0 < place < len(self.x)})


def over_steps(history: History) -> Axis:
    """Return the axis of versions."""
    settings = tuple((float(change.version), change.label) for change in history.setting_changes)
    times, steps = [step.recorded_at for step in history.steps], history.steps
    places = [(bisect_left(times, end) - 1, end - begin) for begin, end in history.pauses]
    pauses = tuple((float(steps[place].name.version), pause_text(s)) for place, s in places if place >= 0)
    return Axis(
        file="by_step.png",
        label="version (trained batches)",
        steps=_floats(step.name.version for step in history.steps),
        resumes=_others(_floats(step.name.version for step in history.resumes), (*settings, *pauses)),
        stages=_floats(step.name.version for step in _ends_of_stages(history)),
        of_evaluation=lambda result: float(result.name.version),
        whole=True,
        changes=_changes(history, _floats(step.name.version for step in history.steps)),
        settings=settings,
        pauses=pauses,
    )


def over_time(history: History) -> Axis:
    """Return the axis of time. Time begins at the first record and stops in pauses. An evaluation is placed at the time
    when its version was made."""

    def at_work(steps: Iterable[StepRecord]) -> Floats:
        return _floats(history.at_work_s(step.recorded_at) for step in steps)

    steps, resumes = at_work(history.steps), at_work(history.resumes)
    times = np.concatenate([steps, resumes])
    begin = float(times.min(initial=math.inf)) if len(times) else 0.0
    if history.steps:  # the first step began before it was recorded
        metrics = history.steps[0].metrics
        begin = min(begin, float(steps[0]) - metrics.get("step_s", 0.0) - metrics.get("wait_s", 0.0))
    span = float(times.max(initial=begin)) - begin
    _, unit_s, unit = next(item for item in TIME_UNITS if span <= item[0])
    made = {step.name.version: at for step, at in zip(history.steps, steps.tolist(), strict=True)}
    settings = tuple(
        ((history.at_work_s(change.start.recorded_at) - begin) / unit_s, change.label)
        for change in history.setting_changes
    )
    pauses = tuple(
        ((history.at_work_s(end) - begin) / unit_s, pause_text(end - start)) for start, end in history.pauses
    )
    return Axis(
        file="by_time.png",
        label=f"time without pauses ({unit})" if history.pauses else f"wall time ({unit})",
        steps=(steps - begin) / unit_s,
        resumes=_others((resumes - begin) / unit_s, (*settings, *pauses)),
        stages=(at_work(_ends_of_stages(history)) - begin) / unit_s,
        of_evaluation=lambda result: (max(made.get(result.name.version, begin), begin) - begin) / unit_s,
        whole=False,
        changes=_changes(history, (steps - begin) / unit_s),
        settings=settings,
        pauses=pauses,
    )


def _changes(history: History, positions: Floats) -> dict[str, tuple[float, ...]]:
    """Return taskset -> positions of its changes of the reward. `positions`: of history.steps."""
    found: dict[str, tuple[float, ...]] = {taskset: () for step in history.steps for taskset in step.scorers}
    versions = [step.name.version for step in history.steps]
    for change in history.reward_changes:
        after = positions[bisect_left(versions, change.version) :].tolist()
        found[change.taskset] = (*found.get(change.taskset, ()), *after[:1])
    return found


def pause_text(seconds: float) -> str:
    """Return the words beside a pause."""
    return f"pause of {duration(seconds)}"


def _others(resumes: Floats, labelled: tuple[tuple[float, str], ...]) -> Floats:
    return resumes[~np.isin(resumes, [x for x, _ in labelled])]


def _ends_of_stages(history: History) -> Iterator[StepRecord]:
    for step, following in pairwise(history.steps):
        if step.metrics.get("stage") != following.metrics.get("stage"):
            yield step


def metric(history: History, axis: Axis, name: str, label: str, *, scale: float = 1.0, **style: Any) -> list[Line]:
    """Return the line of a metric, or none if no step has it. What rewards gave has gaps where the reward changed."""
    values = _floats(step.metrics.get(name, math.nan) for step in history.steps) * scale
    there = np.isfinite(values)
    changes = _changes_of(axis, name)
    return [Line(x=axis.steps[there], y=values[there], label=label, changes=changes, **style)] if there.any() else []


def _changes_of(axis: Axis, name: str) -> tuple[float, ...]:
    """Return the changes that a metric shows: those of its taskset, or of all tasksets if it is of none alone."""
    kind, _, rest = name.partition("/")
    every = tuple(sorted({position for some in axis.changes.values() for position in some}))
    return axis.changes.get(rest.partition("/")[0], every) if kind in OF_REWARDS else ()


def rates(history: History, axis: Axis, name: str, fallback: str, label: str, **style: Any) -> list[Line]:
    """Return the line of a recorded rate. If it is missing, divide each step's count by its seconds."""
    style["is_rate"] = True
    if lines := metric(history, axis, name, label, **style):
        return lines

    def rate(step: StepRecord) -> float:
        seconds = step.metrics.get("step_s", 0.0) + step.metrics.get("wait_s", 0.0)
        return step.metrics.get(fallback, math.nan) / seconds if seconds > 0 else math.nan

    values = _floats(rate(step) for step in history.steps)
    there = np.isfinite(values)
    return [Line(x=axis.steps[there], y=values[there], label=label, **style)] if there.any() else []


def per_taskset(history: History, axis: Axis) -> list[Line]:
    """Return a line for each taskset if there are several, each of the same colour as in other panels."""
    names = sorted({name for step in history.steps for name in step.metrics if name.startswith("reward/")})
    if len(names) < 2:
        return []
    colors = zip(names, itertools.cycle(COLORS))
    return [line for name, color in colors for line in metric(history, axis, name, name.partition("/")[2], color=color)]


def evaluations(history: History, axis: Axis) -> list[Line]:
    """Return the lines of the means of all evaluations, then of their pass@k, and of best and worst of the most
    samples, if these add information.

    No two lines look the same. With one evaluation, each line has its own colour. With several, each evaluation has a
    colour, with a lighter shade for best and a darker one for worst. The dashes distinguish the metrics.
    """
    means: list[Line] = []
    rest: list[Line] = []
    names = sorted({result.evaluation for result in history.evaluations})
    for i, evaluation in enumerate(names):
        results = [result for result in history.evaluations if result.evaluation == evaluation]
        x = _floats(axis.of_evaluation(result) for result in results)
        scored = enumerate({"": one.scored_by} if one.scored_by else {} for one in results)
        changes = tuple(x[[change.version for change in find_reward_changes(scored)]].tolist())
        drawn: list[Floats] = []
        for name in _shown({name for result in results for name in result.metrics}):
            y = _floats(result.metrics.get(name, math.nan) for result in results)
            there = np.isfinite(y)  # the metric is missing if too few samples have a reward, or if another k was set
            if there.any() and (name == "mean" or not any(_same(y, other) for other in drawn)):
                drawn.append(y)
                label = evaluation if name == "mean" else f"{evaluation} {name}"
                color = shade(COLORS[i % len(COLORS)], name) if len(names) > 1 else None
                line = Line(x=x[there], y=y[there], label=label, smooth=False, color=color, changes=changes)
                (means if name == "mean" else rest).append(replace(line, dash=_dash(name, len(drawn) - 1)))
    return means + rest


def _dash(name: str, place: int) -> str:
    """Return the dashes of a line: dotted for best, dash-dotted for worst, and different dashes for each pass@k."""
    kind = name.partition("@")[0]
    if kind == "pass":
        return ("dash", "longdash", "longdashdot")[(place - 1) % 3]
    return {"best": "dot", "worst": "dashdot"}.get(kind, "solid")


def shade(color: str, name: str) -> str:
    """Return a colour halfway to white for the best of k, halfway to black for the worst; else the colour itself."""
    target = {"best": 255, "worst": 0}.get(name.partition("@")[0])
    if target is None:
        return color
    parts = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{(part + target) // 2:02x}" for part in parts)


def _shown(names: Collection[str]) -> list[str]:
    """Return the metrics to show: mean, pass@k by k, and best@k and worst@k of the largest k."""
    of = {
        kind: sorted((name for name in names if name.startswith(f"{kind}@")), key=lambda name: (len(name), name))
        for kind in ("pass", "best", "worst")
    }
    return [*(name for name in names if name == "mean"), *of["pass"], *of["best"][-1:], *of["worst"][-1:]]


def by_prefix(history: History, axis: Axis, prefix: str, *, deep: bool = False) -> list[Line]:
    """Return a line for each metric `PREFIX/NAME`, or for each `PREFIX/TASKSET/NAME` if `deep`."""
    names = {name for step in history.steps for name in step.metrics if name.startswith(f"{prefix}/")}
    chosen = sorted(name for name in names if (name.count("/") > 1) == deep)
    return [line for name in chosen for line in metric(history, axis, name, name.removeprefix(f"{prefix}/"))]


def parts(history: History, axis: Axis) -> list[Line]:
    """Return the lines of the reward's parts, by taskset if there are several; none if the only part is the reward
    itself."""
    lines = by_prefix(history, axis, "part", deep=True) or by_prefix(history, axis, "part")
    return lines if len(lines) > 1 else []


def spread(history: History, axis: Axis) -> list[Line]:
    """Return the standard deviation of the rewards, over all and by taskset."""
    lines = by_prefix(history, axis, "reward_std")
    tasksets = [replace(line, color=color) for line, color in zip(lines, itertools.cycle(COLORS))]
    return [*metric(history, axis, "reward_std", "all" if tasksets else "", color=INK if tasksets else None), *tasksets]


def _floats(values: Any) -> Floats:
    return np.fromiter(values, np.float64)


def _same(one: Floats, other: Floats) -> bool:
    return len(one) == len(other) and bool(np.allclose(one, other, equal_nan=True))
