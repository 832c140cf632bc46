"""The panels of a run's plots, with their lines. Some panels are left out if they have nothing to show."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rftstream.queries.curves.history import History
from rftstream.queries.curves.lines import (
    COLORS,
    INK,
    Axis,
    Line,
    by_prefix,
    evaluations,
    metric,
    parts,
    per_taskset,
    rates,
    spread,
)

THEMES = ("learning", "lengths", "staleness", "health", "speed")
"""Themes of the panels after the first ones, in the order in which they are shown."""

MAX_LINES = 6
"""Most lines in a panel. The number of further lines is shown."""


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
        Panel(title="Rates", theme="speed", unit="trained rollouts/s", right_unit="trained tokens/s", from_zero=True),
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
        first = Panel(title="Reward", unit="mean of scored rollouts with filtered ones", lines=[*reward, *tasksets])
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
    if not history.steps:
        found = [panel if "yet" in panel.empty else replace(panel, empty="no step yet") for panel in found]
    breaks = axis.breaks
    return [replace(panel, lines=[replace(line, breaks=breaks) for line in panel.lines]) for panel in found]


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
