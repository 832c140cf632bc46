"""The phases of a live run: how far loading, sampling, scoring, training and publishing have come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rftstream.runs.observer import Curve

UNTRAINED = "rollouts on their way"
"""The rollouts that were admitted and that no batch has yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseLine:
    """One phase of a run. `find_phases` makes it, and the progress views draw it."""

    name: str
    text: str
    """The state in words: 11 of 12."""
    done: int = 0
    total: int | None = None
    """The number at which the phase is done. None if it has no end, and so no bar."""


def find_phases(
    curve: Curve,
    lags: Mapping[str, int],
    *,
    steps: int | None,
    workers: int,
    num_loaded: int | None,
    imported: bool = False,
) -> list[PhaseLine]:
    """Return the phases that a run has now.

    Args:
        curve: the steps so far.
        lags: topic -> records that wait there: tasks to be sampled, rollouts to be scored, verified ones to be trained.
        steps: the steps of the whole run, if they are known.
        workers: the processes that the run has here.
        num_loaded: how many of them have loaded; None once all have.
        imported: whether another run sampled the rollouts, so that nobody samples here.
    """
    found = []
    if num_loaded is not None:
        found.append(_counted("loading", num_loaded, workers, "workers"))
    unsampled, unscored, scored = (lags.get(topic, 0) for topic in ("tasks", "rollouts", "verified"))
    if imported and not unscored:
        found += [PhaseLine(name="batching", text=f"{scored:,} recorded rollouts left")] if scored else []
    elif sampled := unscored + scored:
        if not imported:
            found.append(_counted("sampling", sampled, sampled + unsampled, UNTRAINED))
        found.append(_counted("scoring", scored, sampled, "sampled ones"))
    elif unsampled:
        found.append(_counted("sampling", 0, unsampled, UNTRAINED))
    step = f"step {curve.version:,}" + (f" of {steps:,}" if steps else "")
    found.append(PhaseLine(name="training", text=step, done=min(curve.version, steps or 0), total=steps))
    published = next((one.name.version for one in reversed(curve.recent) if one.weights_digest is not None), None)
    if published is not None:
        found.append(PhaseLine(name="publishing", text=f"version {published:,}"))
    return found


def _counted(name: str, done: int, total: int, noun: str) -> PhaseLine:
    return PhaseLine(name=name, text=f"{done:,} of {total:,} {noun}", done=done, total=total)
