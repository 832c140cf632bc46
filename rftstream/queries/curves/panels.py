"""What is drawn of a run, and where: axes, lines and panels. Of the panels that not every run fills those are left out
that have nothing to show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from rftstream.contracts.versions import EvalResult, StepRecord
from rftstream.queries.curves.history import History

Floats = npt.NDArray[np.float64]

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8C6D1F", "#56B4E9", "#7F3C8D", "#666666")
"""Okabe and Ito's, told apart by the colour-blind too; the yellow darkened for white paper."""

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")

INK = "#333333"

MAX_LINES = 6
"""How many lines a panel shows. The number of further lines is said."""

TIME_UNITS = ((120.0, 1.0, "s"), (7200.0, 60.0, "min"), (4 * 86400.0, 3600.0, "h"), (math.inf, 86400.0, "days"))
"""Greatest number of seconds that the unit is used for -> seconds per unit, and its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """The horizontal axis of the panels."""

    file: str
    label: str
    steps: Floats
    """Places of history.steps."""
    resumes: Floats
    stages: Floats
    """The last step of each stage but the last."""
    of_evaluation: Callable[[EvalResult], float]
    whole: bool
    """Only whole numbers have a meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of a panel, with its values and how it is drawn."""

    x: Floats
    y: Floats
    label: str
    dash: str = "solid"
    """One of DASHES."""
    smooth: bool = True
    """Draw a running mean, and the values themselves faintly behind it."""
    right: bool = False
    """On an axis of its own at the right."""
    color: str | None = None
    """Default: the next of COLORS."""
    area: bool = False
    """Filled, upon the areas before it: parts of a whole, which cover neither each other nor a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A picture in a plot: a title and lines over an axis. `panels` makes it."""

    title: str
    unit: str
    lines: Sequence[Line]
    right_unit: str = ""
    from_zero: bool = False
    log_if_wide: bool = False
    empty: str = "not recorded"
    """The text that is shown if there is no line."""
    optional: bool = False
    """Whether the panel is left out if there is no line."""
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
    """Return the axis of time. Time begins at the first record and stands still in pauses. An evaluation stands where
    its version was made."""

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
    """Return the line of a recorded rate, or of what each step counted divided by the seconds that it took."""
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


def shares(history: History, axis: Axis) -> list[Line]:
    """Groups that gave no gradient, by why; results that never occurred are left out."""
    names = {
        "zero_variance_share": "zero variance",
        "filtered_share": "filtered",
        "expired_share": "expired",
        "dead_share": "dead",
    }
    lines = [line for name, label in names.items() for line in metric(history, axis, name, label, scale=100)]
    return [line for line in lines if line.y.any()] or lines[:1]


def evaluations(history: History, axis: Axis) -> list[Line]:
    """The means of all evaluations, then their pass@k, and best and worst of the most samples, where these say more.

    No two lines look the same: of one evaluation each has a colour of its own; of several each evaluation has one, and
    best and worst a lighter and a darker shade of it. The dashes say which number it is."""
    means: list[Line] = []
    rest: list[Line] = []
    names = sorted({result.evaluation for result in history.evaluations})
    for i, evaluation in enumerate(names):
        results = [result for result in history.evaluations if result.evaluation == evaluation]
        x = _floats(axis.of_evaluation(result) for result in results)
        drawn: list[Floats] = []
        for name in _shown({name for result in results for name in result.metrics}):
            y = _floats(result.metrics.get(name, math.nan) for result in results)
            there = np.isfinite(y)  # where too few samples have a reward, or another k was asked for, it is missing
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
    """Best is dotted and worst dashed and dotted; of several pass@k each is dashed in another way."""
    kind = name.partition("@")[0]
    if kind == "pass":
        return ("dash", "longdash", "longdashdot")[(place - 1) % 3]
    return {"best": "dot", "worst": "dashdot"}.get(kind, "solid")


def shade(color: str, name: str) -> str:
    """Half the way to white for the best, to black for the worst of k; else the colour itself."""
    target = {"best": 255, "worst": 0}.get(name.partition("@")[0])
    if target is None:
        return color
    parts = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{(part + target) // 2:02x}" for part in parts)


def _shown(names: Collection[str]) -> list[str]:
    """mean, pass@k by k, and best@k and worst@k of the largest k."""
    of = {
        kind: sorted((name for name in names if name.startswith(f"{kind}@")), key=lambda name: (len(name), name))
        for kind in ("pass", "best", "worst")
    }
    return [*(name for name in names if name == "mean"), *of["pass"], *of["best"][-1:], *of["worst"][-1:]]


def by_prefix(history: History, axis: Axis, prefix: str, *, deep: bool = False) -> list[Line]:
    """A line for each metric `PREFIX/NAME`, or for each `PREFIX/TASKSET/NAME` if `deep`."""
    names = {name for step in history.steps for name in step.metrics if name.startswith(f"{prefix}/")}
    chosen = sorted(name for name in names if (name.count("/") > 1) == deep)
    return [line for name in chosen for line in metric(history, axis, name, name.removeprefix(f"{prefix}/"))]


def parts(history: History, axis: Axis) -> list[Line]:
    """Return the parts of the reward, by taskset if there are several; none if the only part is the reward itself."""
    lines = by_prefix(history, axis, "part", deep=True) or by_prefix(history, axis, "part")
    return lines if len(lines) > 1 else []


def spread(history: History, axis: Axis) -> list[Line]:
    """Return the standard deviation of the rewards, of all and by taskset."""
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


def panels(history: History, axis: Axis) -> list[Panel]:
    """Return the panels in the order in which they are shown. The first one is wider."""

    def of(name: str, label: str, **style: Any) -> list[Line]:
        return metric(history, axis, name, label, **style)

    def percent(names: dict[str, str]) -> list[Line]:
        """Those that are not 0 all the time, or else the first."""
        lines = [line for name, label in names.items() for line in of(name, label, scale=100)]
        return [line for line in lines if line.y.any()] or lines[:1]

    tasksets = per_taskset(history, axis)
    reward = of("reward", "all tasksets", color=INK) if tasksets else of("reward", "")
    explores = bool(reward) or not history.steps
    if explores:
        main = Panel(title="Reward", unit="mean over scored rollouts", lines=[*reward, *tasksets])
    else:  # demonstrations or pairs alone
        main = Panel(
            title="Loss",
            unit="loss",
            right_unit="share of pairs",
            marks_skipped=True,
            lines=[
                *of("loss", "trained"),
                *of("held_out_loss", "held out"),
                *of("accuracy", "accuracy", right=True),
                *of("held_out_accuracy", "accuracy, held out", right=True),
            ],
        )
    terms = [*of("policy_loss", "policy"), *of("kl_loss", "divergence"), *of("entropy_loss", "entropy")]
    return [
        main,
        evaluation_panel(history, axis, optional=not explores),
        Panel(
            title="Completion length",
            unit="tokens",
            right_unit="truncated, %",
            from_zero=True,
            optional=not explores,
            lines=[*of("length_mean", "mean"), *of("truncated_share", "truncated", scale=100, right=True)],
        ),
        Panel(
            title="Staleness",
            unit="versions",
            from_zero=True,
            optional=not explores,
            lines=[
                *of("staleness_in_flight", "while sampled", area=True, color=COLORS[5]),
                *of("staleness_in_queue", "in the queue", area=True, color=COLORS[3]),
                *of("staleness_mean", "mean", color=COLORS[0]),
                *of("staleness_max", "max", dash="dash", smooth=False, color=COLORS[1]),
            ],
        ),
        Panel(
            title="Groups without signal",
            unit="% of decided groups",
            lines=shares(history, axis),
            from_zero=True,
            optional=not explores,
        ),
        *(
            [
                Panel(
                    title="Loss",
                    unit="loss",
                    lines=[*of("loss", "all" if len(terms) > 1 else ""), *(terms if len(terms) > 1 else [])],
                    marks_skipped=True,
                )
            ]
            if explores
            else []
        ),
        Panel(
            title="Gradient norm",
            unit="norm before clipping",
            right_unit="learning rate",
            log_if_wide=True,
            lines=[*of("grad_norm", "norm"), *of("lr", "learning rate", right=True, smooth=False)],
        ),
        Panel(title="Entropy", unit="nats per token", lines=of("entropy", ""), from_zero=True),
        Panel(
            title="Trainer against sampler",
            unit="KL (k3), 0.001 nats per token",
            log_if_wide=True,
            optional=not explores,
            right_unit="effective sample size, share",
            lines=[*of("mismatch_k3", "KL", scale=1000), *of("ess", "ESS", right=True)],
        ),
        Panel(
            title="Rates",
            unit="rollouts per s",
            right_unit="trained tokens per s",
            from_zero=True,
            lines=[
                *(rates(history, axis, "rollouts_per_s", "rollouts", "rollouts/s") if explores else []),
                *rates(history, axis, "tokens_per_s", "tokens", "tokens/s", right=True),
            ],
        ),
        Panel(
            title="Time of a step",
            unit="s",
            from_zero=True,
            lines=[*of("step_s", "training"), *of("wait_s", "waiting for a batch"), *of("publish_s", "publishing")],
        ),
        Panel(
            title="Advantages",
            unit="advantage over rollouts",
            optional=True,
            lines=[
                *of("advantage", "mean"),
                *of("advantage_std", "std"),
                *of("advantage_max", "largest size"),
                *of("token_advantage_std", "std of tokens"),
            ],
        ),
        Panel(
            title="Spread of rewards",
            unit="standard deviation",
            optional=True,
            from_zero=True,
            lines=spread(history, axis),
        ),
        Panel(title="Parts of the reward", unit="mean over scored rollouts", optional=True, lines=parts(history, axis)),
        Panel(
            title="Divergence",
            unit="nats per token",
            optional=True,
            lines=[*of("kl", "from version 0"), *of("teacher_kl", "from the teacher")],
        ),
        Panel(
            title="Clipped and left out",
            unit="% of tokens",
            optional=True,
            from_zero=True,
            lines=percent(
                {
                    "clip_fraction": "clipped",
                    "importance_clamped": "bounded",
                    "importance_dropped": "weight 0",
                    "sequences_dropped": "rows",
                    "second_moment_dropped": "M2PO",
                    "masked_fraction": "prompt or masked",
                }
            ),
        ),
        Panel(
            title="Work of the trainer",
            unit="tokens through the model per s",
            right_unit="MFU, %",
            optional=True,
            from_zero=True,
            lines=[*of("computed_tokens_per_s", "tokens/s"), *of("mfu", "MFU", scale=100, right=True)],
        ),
        Panel(
            title="Critic",
            unit="loss",
            right_unit="explained variance",
            optional=True,
            lines=[*of("value_loss", "loss"), *of("value_explained_variance", "explained variance", right=True)],
        ),
        Panel(
            title="What rewards and environments measured",
            unit="mean over the batch",
            optional=True,
            lines=by_prefix(history, axis, "metric"),
        ),
    ]


def _floats(values: Any) -> Floats:
    return np.fromiter(values, np.float64)


def _same(one: Floats, other: Floats) -> bool:
    return len(one) == len(other) and bool(np.allclose(one, other, equal_nan=True))
