"""What a caller of `run` or `resume` says about the session: how it is shown, and how long its end may take."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TextIO

from rftstream.launch.processes import Spawner

DEADLINE_S = 35.0
"""Seconds for all workers to leave; a little more than each of them takes by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """How a run is shown and ended. Who starts a session makes it, before anything else."""

    progress: str
    """auto, live, plain or none."""
    stream: TextIO | None
    """The stream that the progress is written to; None: stdout."""
    deadline_s: float
    """Seconds for all workers to leave."""
    spawner: Spawner | None
    began: float = field(default_factory=time.monotonic)
