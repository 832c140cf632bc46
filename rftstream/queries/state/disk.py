"""Disk use of a run's folder, free space, and an estimate of how long it lasts."""

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
"""Folders that grow with the steps of a run. The others exist from the beginning, or are made once."""

LITTLE_BYTES = 5e9
"""Free space below which a warning is always given, the same as in the alert DiskLow."""

SOON_HOURS = 48.0
"""Hours until the disk is full below which a warning is given, since nobody may look at the run over a weekend."""

NEWEST_STEPS = 1000
"""Number of newest steps that the time of a step is measured over."""

LEAST_S = 60.0
"""Shortest total time of steps from which hours can be estimated."""


@dataclass(frozen=True, slots=True)
class DiskRoom(Report):
    """The disk space that a run has left."""

    free_bytes: int
    """Free bytes on the disk of the run folder."""
    hours_left: float | None
    """Hours until that disk is full, at the run's present rate, without pauses, and if nobody else writes there. None:
    too few steps to estimate."""

    @property
    def is_little(self) -> bool:
        """Whether somebody should make room."""
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
    for base, _, files in os.walk(folder.path):  # skips folders that are deleted meanwhile
        parts = Path(base).relative_to(folder.path).parts
        for name in files:
            with contextlib.suppress(OSError):
                found[parts[0] if parts else "other"] += os.lstat(os.path.join(base, name)).st_size
    return dict(sorted(found.items()))


def disk_room(folder: RunFolder, used: Mapping[str, int], history: History) -> DiskRoom:
    """Return the disk space that a run has left. `used` is the result of `disk_bytes`. With retention a run soon grows
    more slowly than at first, so the estimate is on the safe side."""
    there = next(path for path in (folder.path, *folder.path.parents) if path.exists())
    free = shutil.disk_usage(there).free
    times = [step.recorded_at for step in history.steps[-NEWEST_STEPS:] if step.recorded_at]
    gaps_s = [after - before for before, after in pairwise(times)]
    took_s = (
        statistics.median(gaps_s) * (history.num_steps - 1) if gaps_s else 0.0
    )  # the median: a pause is in only one gap
    grown = sum(used.get(name, 0) for name in GROWING)
    return DiskRoom(free, free * took_s / grown / 3600 if took_s >= LEAST_S and grown else None)


def lasts_to_the_end(room: DiskRoom, used: Mapping[str, int], history: History, num_steps: int | None) -> bool:
    """Return whether the rest of `num_steps` fits, each as large as those before, with LITTLE_BYTES left."""
    if num_steps is None or history.num_steps < 2:
        return False
    step_bytes = sum(used.get(name, 0) for name in GROWING) / (history.num_steps - 1)
    return room.free_bytes - step_bytes * max(0, num_steps - history.version) >= LITTLE_BYTES
