"""What trackers behind a service are told: which run it is, and its records as points."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rftstream.contracts.versions import EvalResult, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    folder: Path
    """The run folder."""
    created_at: float
    """As the run's manifest says: another run of the same name is another one there, too."""
    config: Mapping[str, Any]
    """The resolved settings, secrets left out."""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def key(self) -> str:
        """The same after each resume, wherever the folder is."""
        return hashlib.sha256(f"{self.name}/{self.created_at!r}".encode()).hexdigest()[:24]


def point(one: StepRecord | EvalResult) -> tuple[int, float, dict[str, float]]:
    """Version, time, and named values."""
    if isinstance(one, EvalResult):
        values = {f"eval/{one.evaluation}/{name}": value for name, value in one.metrics.items()}
        return one.name.version, one.evaluated_at, values
    values = {f"train/{name}": value for name, value in one.metrics.items()}
    return one.name.version, one.recorded_at, {**values, "train/trainer_epoch": float(one.name.trainer_epoch)}
