"""The data for trackers with a service: the run's identity, and its records as points."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rftstream.contracts.versions import EvalResult, StepRecord, VersionName


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The run of a tracker. The session of `rftstream run` makes it, and `open_trackers` passes it on."""

    folder: Path
    """The run folder."""
    created_at: float
    """Time in the run's manifest, in seconds since the Unix epoch. It distinguishes runs of the same name."""
    config: Mapping[str, Any]
    """The resolved settings, secrets left out."""

    @property
    def name(self) -> str:
        """The run's name, which is the name of its folder."""
        return self.folder.name

    @property
    def key(self) -> str:
        """The run's id at the service. It stays the same after a resume, and if the folder moves."""
        return hashlib.sha256(f"{self.name}/{self.created_at!r}".encode()).hexdigest()[:24]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRow:
    """A rollout in a table of samples."""

    version: int
    """The oldest version that sampled a token of it."""
    reward: float | None
    """None: it could not be scored."""
    prompt: str
    completion: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTable:
    """Some of the newest rollouts when a version was trained, for trackers that show tables. The session of `rftstream
    run` makes one now and then."""

    COLUMNS: ClassVar = ("version", "reward", "prompt", "completion")

    name: VersionName
    """The version that was trained last."""
    rows: tuple[SampledRow, ...]

    @property
    def values(self) -> list[list[Any]]:
        """The rows as lists, in the order of `COLUMNS`."""
        return [[getattr(row, column) for column in self.COLUMNS] for row in self.rows]


def point(one: StepRecord | EvalResult) -> tuple[int, float, dict[str, float]]:
    """Return a record's version, its time in seconds since the Unix epoch, and its values by name."""
    if isinstance(one, EvalResult):
        values = {f"eval/{one.evaluation}/{name}": value for name, value in one.metrics.items()}
        return one.name.version, one.evaluated_at, values
    values = {f"train/{name}": value for name, value in one.metrics.items()}
    return one.name.version, one.recorded_at, {**values, "train/trainer_epoch": float(one.name.trainer_epoch)}
