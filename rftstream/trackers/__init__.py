"""Trackers: what shows a run's curves outside of it. They read `steps` and `evals`, nothing else, and nobody waits for
them.

The log is the truth: a tracker that starts writes all of it anew, so that a resumed run goes on with the same series
and no step is there twice. Each stands behind an extra and is off by default ([trackers]).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rftstream.errors import ConfigError
from rftstream.messages import EvalResult, StepRecord
from rftstream.sections import RunConfig


class Tracker(Protocol):
    def update(self, news: Sequence[StepRecord | EvalResult]) -> None:
        """What is new, in the order of the log: steps that were in force when they came, and evaluations. The first
        call gets all there is."""

    def close(self) -> None: ...


def check_trackers(config: RunConfig) -> None:
    """ConfigError if the package of one that the run file asks for is absent. Imports none of them."""
    if config.trackers.tensorboard is not None and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "trackers.tensorboard: needs the package tensorboard; pip install 'rftstream[tensorboard]', or leave it out"
        )


def open_trackers(config: RunConfig, folder: Path) -> list[Tracker]:
    """Those that the run file asks for; `folder`: of the run. ConfigError as from `check_trackers`."""
    check_trackers(config)
    if config.trackers.tensorboard is None:
        return []
    from rftstream.trackers.tensorboard import TensorBoard

    return [TensorBoard(folder / config.trackers.tensorboard)]
