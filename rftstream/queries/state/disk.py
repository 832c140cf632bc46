"""What a run takes on the disk of its folder, what is free there, and for how long that lasts."""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rftstream.queries.curves.history import History
from rftstream.queries.formatting import size
from rftstream.queries.plain import Report
from rftstream.runs.folder import RunFolder

GROWING = ("log", "weights", "logs")
"""Folders that grow with the steps of a run. The others are there from the beginning, or are made once."""

LITTLE_BYTES = 5e9
"""Less free room than this is told in any case; so much is what the alert DiskLow has."""

SOON_HOURS = 48.0
"""A disk that will be full sooner than this is told: the next look at the run may be after a weekend."""

NEWEST_STEPS = 1000
"""Number of newest steps that the time of a step is measured over."""

LEAST_S = 60.0
"""Steps of less time than this tell nothing about hours."""


@dataclass(frozen=True, slots=True)
class DiskRoom(Report):
    """The room that a run has left."""

    free_bytes: int
    """Free bytes on the disk of the run folder."""
    hours_left: float | None
    """Until that disk is full, if the run goes on as it did, without pauses, and nobody else writes there. None: it has
    not made enough steps to tell."""

    @property
    def is_little(self) -> bool:
        """Whether somebody should look after it."""
        return self.free_bytes < LITTLE_BYTES or (self.hours_left is not None and self.hours_left < SOON_HOURS)

    def to_text(self) -> str:
        """Return a line for people."""
        text = f"{size(self.free_bytes)} on the disk of the run folder"
        if self.hours_left is not None:
            text += f", enough for about {self.hours_left:,.1f} h of this run"
        return text


def disk_bytes(folder: RunFolder) -> dict[str, int]:
    """Return the bytes in each folder of the run folder. Links are not followed."""
    found: Counter[str] = Counter()
    for base, _, files in os.walk(folder.path):  # passes over folders that are deleted meanwhile
        parts = Path(base).relative_to(folder.path).parts
        for name in files:
            with contextlib.suppress(OSError):
                found[parts[0] if parts else "other"] += os.lstat(os.path.join(base, name)).st_size
    return dict(sorted(found.items()))


def disk_room(folder: RunFolder, used: Mapping[str, int], history: History) -> DiskRoom:
    """Return the room that a run has left. `used` is what `disk_bytes` found. With retention
    a run soon grows less than it did at first, so the estimate is on the safe side."""
    there = next(path for path in (folder.path, *folder.path.parents) if path.exists())
    free = shutil.disk_usage(there).free
    times = [step.recorded_at for step in history.steps[-NEWEST_STEPS:] if step.recorded_at]
    gaps_s = [after - before for before, after in pairwise(times)]
    took_s = (
        statistics.median(gaps_s) * (history.num_steps - 1) if gaps_s else 0.0
    )  # of most steps: a pause is in one gap
    grown = sum(used.get(name, 0) for name in GROWING)
    return DiskRoom(free, free * took_s / grown / 3600 if took_s >= LEAST_S and grown else None)
