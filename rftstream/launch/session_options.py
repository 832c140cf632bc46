"""Options of a session that a caller of `run` or `resume` gives: its display, and the time limit for its end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TextIO

from rftstream.launch.processes import Spawner

DEADLINE_S = 35.0
"""Seconds for all workers to leave; slightly more than the limit of each worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """Options for the display and the end of a session. The caller of a session makes it first."""

    progress: str
    """auto, live, plain or none."""
    stream: TextIO | None
    """The stream for the progress; None: stdout."""
    deadline_s: float
    """Seconds for all workers to leave."""
    spawner: Spawner | None
    began: float = field(default_factory=time.monotonic)
