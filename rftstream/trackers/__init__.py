"""Trackers show a run's curves in other programs. They read only `steps` and `evals`, and nothing waits for them.

The log is the source of truth: a restarted tracker continues the same series, without a missing step in force. Each
needs an extra and is off by default ([trackers]).

To add one: a module with a class that implements `Tracker`, or `rftstream.trackers.served.TrackingService` for a
network service; a setting in `[trackers]`, an extra, and a line in `TRACKERS`, all of the same name.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import TrackerSpec
from rftstream.config.sections import RunConfig
from rftstream.errors import ConfigError, pip_install
from rftstream.trackers.served import News
from rftstream.trackers.tracked import TrackedRun


class Tracker(Protocol):
    """Shows a run's curves in a program outside of rftstream. `open_trackers` makes those in the run file. Their owner
    calls `update` with the records of `steps` and `evals` and with samples, and `close` at the end. The first `update`
    gets all records since the run began."""

    @property
    def shows_samples(self) -> bool:
        """Whether it shows tables of samples, which are then among the records."""

    def update(self, news: Sequence[News]) -> None:
        """Show new records, in the order of the log: steps that were in force when they were read, evaluations, and
        samples."""

    def close(self, *, ended: bool) -> None:
        """Write everything that is left, and end. `ended`: whether the run is over; otherwise it may be resumed."""


TRACKERS = {
    "tensorboard": TrackerSpec(
        "rftstream.trackers.tensorboard:TensorBoard", package="tensorboard", is_service=False, folder="{setting}"
    ),
    "wandb": TrackerSpec("rftstream.trackers.wandb:WeightsAndBiases", package="wandb", folder="wandb"),
    "mlflow": TrackerSpec("rftstream.trackers.mlflow:Mlflow", package="mlflow"),
    "trackio": TrackerSpec("rftstream.trackers.trackio:Trackio", package="trackio", folder="trackio"),
    "swanlab": TrackerSpec("rftstream.trackers.swanlab:SwanLab", package="swanlab", folder="swanlab"),
}
"""Name of a tracker, as in `[trackers]` -> its class, its package, and its folder in the run folder."""

DATABASES = ("sqlite", "mysql", "postgresql", "mssql")
"""Schemes of the URLs of MLflow's stores in a database."""


def check_trackers(config: RunConfig) -> None:
    """Raise ConfigError if a tracker in the run file cannot be used: its package is missing, or MLflow's store is not
    named or lacks a package. No tracker is imported."""
    for name, spec, _ in trackers_named(config):
        if importlib.util.find_spec(spec.package) is None:
            command = pip_install(f"rftstream[{name}]")
            raise ConfigError(f"trackers.{name}: needs the package {spec.package}; {command}, or leave it out")
    if config.trackers.mlflow is not None:
        _check_mlflow_store(os.environ.get("MLFLOW_TRACKING_URI", ""))


def _check_mlflow_store(url: str) -> None:
    if not url:
        raise ConfigError(
            "trackers.mlflow: MLFLOW_TRACKING_URI is not set, expected where the store is; export it, e.g. "
            "http://HOST:5000 or sqlite:////FOLDER/mlflow.db"
        )
    if url.partition(":")[0].partition("+")[0] not in DATABASES:
        return
    absent = [package for package in ("sqlalchemy", "alembic") if importlib.util.find_spec(package) is None]
    if absent:  # the extra brings mlflow-skinny, which lacks it and would report that at every try
        raise ConfigError(
            f"trackers.mlflow: MLFLOW_TRACKING_URI names a database, which needs {' and '.join(absent)}; "
            "pip install mlflow, or name a server"
        )


def open_trackers(config: RunConfig, run: TrackedRun, say: Callable[[str], None]) -> list[Tracker]:
    """Return the trackers in the run file. ConfigError as from `check_trackers`.

    `say` is called with a text for each later error.
    """
    check_trackers(config)
    trackers = list[Tracker]()
    for name, spec, setting in trackers_named(config):
        part = registry.import_path(spec.path, what=f"trackers.{name}")
        if spec.is_service:
            from rftstream.trackers.served import ServedTracker

            trackers.append(ServedTracker(name, part(setting, run), say))
        else:
            trackers.append(part(run.folder / setting))
    return trackers


def folders_of_trackers(config: RunConfig) -> list[str]:
    """Return the names of the folders in the run folder that belong to the run's trackers."""
    folders = [spec.folder.format(setting=setting) for _, spec, setting in trackers_named(config)]
    return [folder for folder in folders if folder and Path(folder).name == folder]


def trackers_named(config: RunConfig) -> Iterator[tuple[str, TrackerSpec, str]]:
    """Yield name, record and setting of each tracker in the run file."""
    for name, spec in TRACKERS.items():
        if (setting := getattr(config.trackers, name)) is not None:
            yield name, spec, setting
