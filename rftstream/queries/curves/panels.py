"""The panels of a run's plots, with their axes and lines. Some panels are left out if they have nothing to show."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from rftstream.contracts.versions import EvalResult, StepRecord
from rftstream.queries.curves.history import History

Floats = npt.NDArray[np.float64]

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8C6D1F", "#56B4E9", "#7F3C8D", "#666666")
"""Okabe and Ito's colours, which colour-blind people can tell apart; the yellow is darkened for white paper."""

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")

INK = "#333333"

THEMES = ("learning", "lengths", "staleness", "health", "speed")
"""Themes of the panels after the first ones, in the order in which they are shown."""

MAX_LINES = 6
"""Most lines in a panel. The number of further lines is shown."""

TIME_UNITS = ((120.0, 1.0, "s"), (7200.0, 60.0, "min"), (4 * 86400.0, 3600.0, "h"), (math.inf, 86400.0, "days"))
"""Largest number of seconds for which the unit is used -> seconds per unit, and its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """The horizontal axis of the panels."""

    file: str
    label: str
    steps: Floats
    """Position of each of history.steps."""
    resumes: Floats
    stages: Floats
    """The position of the last step of each stage except the last stage."""
    of_evaluation: Callable[[EvalResult], float]
    whole: bool
    """Whether only whole numbers have a meaning."""


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
    right: bool = False
    """Whether the line has its own axis on the right."""
    color: str | None = None
    """Default: the next of COLORS."""
    area: bool = False
    """Whether the line is a filled area, stacked on the areas before it, for parts of a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A panel of a plot: a title and lines over an axis. `panels` makes it."""

    title: str
    unit: str
    lines: Sequence[Line] = ()
    right_unit: str = ""
    from_zero: bool = False
    log_if_wide: bool = False
    empty: str = "not recorded"
    """The text that is shown if there is no line."""
    theme: str = ""
    """One of THEMES. Empty: the panel is among the first, which are shown large."""
    mixed: bool = False
    """Whether its lines may be of different quantities. Each line then has limits of its own if the scales differ."""
    optional: bool = False
    """Whether the panel is left out if there is no line."""
    of_rollouts: bool = False
    """Whether the panel is optional in a run that samples no rollouts."""
    varying: bool = False
    """Whether lines that are always 0 are left out; one of them stays."""
    marks_skipped: bool = False


def over_steps(history: History) -> Axis:
    """Return the axis of versions."""
    return Axis(
        file="by_step.png",
        label="version (trained batches)",
        steps=_floats(step.name.version for step in history.steps),
        resumes=_floats(step.name.version for step in history.resumes),
        stages=_floats(step.name.version for step in _ends_of_stages(history)),
        of_evaluation=lambda result: float(result.name.version),
        whole=True,
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
    return Axis(
        file="by_time.png",
        label=f"time without pauses ({unit})" if history.pauses else f"wall time ({unit})",
        steps=(steps - begin) / unit_s,
        resumes=(resumes - begin) / unit_s,
        stages=(at_work(_ends_of_stages(history)) - begin) / unit_s,
        of_evaluation=lambda result: (max(made.get(result.name.version, begin), begin) - begin) / unit_s,
        whole=False,
    )


def _ends_of_stages(history: History) -> Iterator[StepRecord]:
    for step, following in pairwise(history.steps):
        if step.metrics.get("stage") != following.metrics.get("stage"):
            yield step


def metric(history: History, axis: Axis, name: str, label: str, *, scale: float = 1.0, **style: Any) -> list[Line]:
    """Return the line of a metric, or none if no step has it."""
    values = _floats(step.metrics.get(name, math.nan) for step in history.steps) * scale
    there = np.isfinite(values)
    return [Line(x=axis.steps[there], y=values[there], label=label, **style)] if there.any() else []


def rates(history: History, axis: Axis, name: str, fallback: str, label: str, **style: Any) -> list[Line]:
    """Return the line of a recorded rate. If it is missing, divide each step's count by its seconds."""
    if lines := metric(history, axis, name, label, **style):
        return lines

    def rate(step: StepRecord) -> float:
        seconds = step.metrics.get("step_s", 0.0) + step.metrics.get("wait_s", 0.0)
        return step.metrics.get(fallback, math.nan) / seconds if seconds > 0 else math.nan

    values = _floats(rate(step) for step in history.steps)
    there = np.isfinite(values)
    return [Line(x=axis.steps[there], y=values[there], label=label, **style)] if there.any() else []


def per_taskset(history: History, axis: Axis) -> list[Line]:
    """Return a line for each taskset if there are several."""
    names = sorted({name for step in history.steps for name in step.metrics if name.startswith("reward/")})
    if len(names) < 2:
        return []
    return [line for name in names for line in metric(history, axis, name, name.removeprefix("reward/"))]


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
        drawn: list[Floats] = []
        for name in _shown({name for result in results for name in result.metrics}):
            y = _floats(result.metrics.get(name, math.nan) for result in results)
            there = np.isfinite(y)  # the metric is missing if too few samples have a reward, or if another k was set
            if there.any() and (name == "mean" or not any(_same(y, other) for other in drawn)):
                drawn.append(y)
                label = evaluation if name == "mean" else f"{evaluation} {name}"
                color = shade(COLORS[i % len(COLORS)], name) if len(names) > 1 else None
                line = Line(
                    x=x[there], y=y[there], label=label, dash=_dash(name, len(drawn) - 1), smooth=False, color=color
                )
                (means if name == "mean" else rest).append(line)
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
    tasksets = by_prefix(history, axis, "reward_std")
    return [*metric(history, axis, "reward_std", "all" if tasksets else "", color=INK if tasksets else None), *tasksets]


def evaluation_panel(history: History, axis: Axis, *, optional: bool = False) -> Panel:
    """Return the panel of all evaluations."""
    return Panel(
        title="Evaluations",
        unit="reward of samples",
        lines=evaluations(history, axis),
        empty="no evaluation yet",
        optional=optional,
    )


PANELS: tuple[tuple[Panel, str], ...] = (
    (
        Panel(
            title="Completion length",
            theme="lengths",
            unit="tokens",
            right_unit="truncated, %",
            from_zero=True,
            of_rollouts=True,
        ),
        "length_mean=mean | truncated_share=truncated percent right",
    ),
    (
        Panel(title="Staleness", theme="staleness", unit="versions", from_zero=True, of_rollouts=True),
        "staleness_in_flight=while sampled area color5 | staleness_in_queue=in the queue area color3 | "
        "staleness_mean=mean color0 | staleness_max=max dashed color1",
    ),
    (
        Panel(
            title="Groups without signal",
            theme="health",
            unit="% of decided groups",
            from_zero=True,
            of_rollouts=True,
            varying=True,
        ),
        "zero_variance_share=zero variance percent | filtered_share=filtered percent | expired_share=expired percent | "
        "dead_share=dead percent",
    ),
    (Panel(title="Loss", theme="learning", unit="loss", marks_skipped=True), "terms"),
    (
        Panel(
            title="Gradient norm",
            theme="health",
            unit="norm before clipping",
            right_unit="learning rate",
            log_if_wide=True,
        ),
        "grad_norm=norm | lr=learning rate right unsmoothed",
    ),
    (Panel(title="Entropy", theme="health", unit="nats per token", from_zero=True), "entropy="),
    (
        Panel(
            title="Trainer against sampler",
            theme="staleness",
            unit="KL (k3), 0.001 nats per token",
            log_if_wide=True,
            of_rollouts=True,
            right_unit="effective sample size, share",
        ),
        "mismatch_k3=KL thousandths | ess=ESS right",
    ),
    (
        Panel(title="Rates", theme="speed", unit="rollouts per s", right_unit="trained tokens per s", from_zero=True),
        "rates",
    ),
    (
        Panel(title="Time of a step", theme="speed", unit="s", from_zero=True),
        "step_s=training | wait_s=waiting for a batch | publish_s=publishing",
    ),
    (
        Panel(title="Advantages", theme="learning", unit="advantage over rollouts", optional=True),
        "advantage=mean | advantage_std=std | advantage_max=largest size | token_advantage_std=std of tokens",
    ),
    (
        Panel(title="Spread of rewards", theme="learning", unit="standard deviation", optional=True, from_zero=True),
        "spread",
    ),
    (Panel(title="Parts of the reward", theme="learning", unit="mean over scored rollouts", optional=True), "parts"),
    (
        Panel(title="Divergence", theme="health", unit="nats per token", optional=True),
        "kl=from version 0 | teacher_kl=from the teacher",
    ),
    (
        Panel(
            title="Experts of a mixture",
            theme="health",
            mixed=True,
            unit="multiple of the mean load; nats; % of experts",
            optional=True,
            from_zero=True,
        ),
        "router_max_load=largest load | router_entropy=entropy of routers | router_dead_experts=unused, % percent",
    ),
    (
        Panel(
            title="Clipped and left out",
            theme="health",
            unit="% of tokens",
            optional=True,
            from_zero=True,
            varying=True,
        ),
        "clip_fraction=clipped percent | importance_clamped=bounded percent | importance_dropped=weight 0 percent | "
        "sequences_dropped=rows percent | second_moment_dropped=M2PO percent | "
        "masked_fraction=prompt or masked percent",
    ),
    (
        Panel(
            title="Work of the trainer",
            theme="speed",
            unit="tokens through the model per s",
            right_unit="MFU, %",
            optional=True,
            from_zero=True,
        ),
        "computed_tokens_per_s=tokens/s | mfu=MFU percent right",
    ),
    (
        Panel(title="Critic", theme="learning", unit="loss", right_unit="explained variance", optional=True),
        "value_loss=loss | value_explained_variance=explained variance right",
    ),
    (
        Panel(
            title="What rewards and environments measured",
            theme="learning",
            mixed=True,
            unit="mean over the batch",
            optional=True,
        ),
        "measured",
    ),
)
"""The panels after the first two, with their lines: `metric=label`, followed by words of `STYLES`. A single word names
lines that `_special` makes, which are not plain metrics."""

STYLES: dict[str, dict[str, Any]] = {
    "percent": {"scale": 100},
    "thousandths": {"scale": 1000},
    "right": {"right": True},
    "unsmoothed": {"smooth": False},
    "area": {"area": True},
    "dashed": {"dash": "dash", "smooth": False},
    **{f"color{number}": {"color": color} for number, color in enumerate(COLORS)},
}
"""Word after the label of a line -> the line's style."""

_WITHOUT_ROLLOUTS = Panel(title="Loss", unit="loss", right_unit="share of pairs", marks_skipped=True)


def panels(history: History, axis: Axis) -> list[Panel]:
    """Return the panels in the order in which they are shown. The first one is wider."""
    tasksets = per_taskset(history, axis)
    reward = metric(history, axis, "reward", "all tasksets" if tasksets else "", color=INK if tasksets else None)
    explores = bool(reward) or not history.steps
    if explores:
        first = Panel(title="Reward", unit="mean over scored rollouts", lines=[*reward, *tasksets])
    else:  # demonstrations or pairs alone
        pairs = "accuracy=accuracy right | held_out_accuracy=accuracy, held out right"
        lines = _lines(history, axis, f"loss=trained | held_out_loss=held out | {pairs}")
        first = replace(_WITHOUT_ROLLOUTS, lines=lines)
    found = [first, evaluation_panel(history, axis, optional=not explores)]
    for panel, series in PANELS:
        lines = _lines(history, axis, series) if "=" in series else _special(history, axis, series, explores)
        if panel.varying:  # those that are not always 0, or else the first
            lines = [line for line in lines if line.y.any()] or lines[:1]
        if series != "terms" or explores:
            found.append(replace(panel, lines=lines, optional=panel.optional or (panel.of_rollouts and not explores)))
    return found


def _lines(history: History, axis: Axis, series: str) -> list[Line]:
    """Return the lines of a panel's metrics, those that were recorded."""
    found: list[Line] = []
    for one in series.split(" | "):
        name, _, rest = one.partition("=")
        words = rest.split(" ")
        styles = list(itertools.takewhile(STYLES.__contains__, reversed(words)))
        style = {key: value for word in styles for key, value in STYLES[word].items()}
        found += metric(history, axis, name, " ".join(words[: len(words) - len(styles)]), **style)
    return found


def _special(history: History, axis: Axis, name: str, explores: bool) -> list[Line]:
    """Return the lines of a panel that are not plain metrics."""
    if name == "terms":
        terms = _lines(history, axis, "policy_loss=policy | kl_loss=divergence | entropy_loss=entropy")
        several = len(terms) > 1
        return [*metric(history, axis, "loss", "all" if several else ""), *(terms if several else [])]
    if name == "rates":
        rollouts = rates(history, axis, "rollouts_per_s", "rollouts", "rollouts/s") if explores else []
        return [*rollouts, *rates(history, axis, "tokens_per_s", "tokens", "tokens/s", right=True)]
    if name == "spread":
        return spread(history, axis)
    return parts(history, axis) if name == "parts" else by_prefix(history, axis, "metric")


def _floats(values: Any) -> Floats:
    return np.fromiter(values, np.float64)


def _same(one: Floats, other: Floats) -> bool:
    return len(one) == len(other) and bool(np.allclose(one, other, equal_nan=True))
