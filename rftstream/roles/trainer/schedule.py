"""The learning rate of each step: a pure function of the settings and the version."""

from __future__ import annotations

import math

from rftstream.config.role_sections import TrainerSection
from rftstream.config.stages import Stages

NEARLY_OVER = 0.05
"""Share of `trainer.lr` below which a schedule has nearly ended."""


def rate_at(stages: Stages, version: int) -> float:
    """Return the learning rate of the batch that is trained at `version`. Each stage has its own schedule."""
    stage = stages.at(version)
    return learning_rate(stage.trainer, version - stage.first, stage.steps)


def rate_change(before: Stages, after: Stages, version: int, recorded: float | None = None) -> str | None:
    """Describe for users how the learning rate at `version` differs under another schedule; None if it is the same. The
    first version has no rate before it. `recorded`: the rate of the step before, if the log has it; `before` is what a
    resume recorded, which may have trained nothing."""
    if version == 0:
        return None
    last, new, stage = rate_at(before, version - 1), rate_at(after, version), after.at(version)
    planned = rate_at(before, version)
    if recorded is not None and not _are_close(last, recorded):
        last = planned = recorded
    if _are_close(planned, new):
        return None
    end = "" if stage.end is None else f", to version {stage.end:,}"
    advice = ""
    if new < stage.trainer.lr * NEARLY_OVER and version - stage.first >= stage.trainer.warmup_steps:
        advice = "; little is learned at the end of a schedule: trainer.lr_schedule=constant keeps trainer.lr"
    elif new > last > 0:
        advice = f"; it rises: trainer.lr={stage.trainer.lr * last / new:.3g} goes on where it was"
    return (
        f"learning rate {last:.3g} at the last step, {new:.3g} at the next (trainer.lr_schedule "
        f"'{stage.trainer.lr_schedule}' from {stage.trainer.lr:.3g}{end}){advice}"
    )


def _are_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-12)


def learning_rate(settings: TrainerSection, version: int, steps: int | None) -> float:
    """Return a schedule's learning rate at `version`. Without an end (`steps`) all schedules are constant after
    warm-up."""
    if version < settings.warmup_steps:
        return settings.lr * (version + 1) / settings.warmup_steps
    if settings.lr_schedule == "constant" or steps is None:
        return settings.lr
    progress = min(1.0, (version - settings.warmup_steps) / max(1, steps - settings.warmup_steps))
    share = 1 - progress if settings.lr_schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return settings.lr * (settings.min_lr_share + (1 - settings.min_lr_share) * share)
