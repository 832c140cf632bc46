"""Trackers: what shows a run's curves outside of it. They read `steps` and `evals`, nothing else, and nobody waits for
them.

The log is the truth: a tracker that starts again goes on with the same series, and no step in force is missing there.
Each stands behind an extra and is off by default ([trackers]).

To add one: a module with a class that keeps `Tracker`, or `rftstream.trackers.served.TrackingService` for one behind a
network; a setting in `[trackers]`, an extra, and a line in `TRACKERS`, all of the same name.
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
from rftstream.contracts.versions import EvalResult, StepRecord
from rftstream.errors import ConfigError, pip_install
from rftstream.trackers.tracked import TrackedRun


class Tracker(Protocol):
    """Shows a run's curves in a program outside of rftstream. `open_trackers` makes those that the run file asks
    for. Their owner calls `update` with the records of `steps` and `evals`, and `close` at the end. The first
    `update` gets all records since the run began."""

    def update(self, news: Sequence[StepRecord | EvalResult]) -> None:
        """Show new records, given in the order of the log: steps that were in force when they were read, and
        evaluations."""

    def close(self, *, ended: bool) -> None:
        """Write what is left, and end. `ended` says whether the run is over; otherwise it may be resumed."""


TRACKERS = {
    "tensorboard": TrackerSpec(
        "rftstream.trackers.tensorboard:TensorBoard", package="tensorboard", is_service=False, folder="{setting}"
    ),
    "wandb": TrackerSpec("rftstream.trackers.wandb:WeightsAndBiases", package="wandb", folder="wandb"),
    "mlflow": TrackerSpec("rftstream.trackers.mlflow:Mlflow", package="mlflow"),
}
"""Name of a tracker, as in `[trackers]` -> its class, the package that it needs, and the folder that it has in the
run folder."""

DATABASES = ("sqlite", "mysql", "postgresql", "mssql")
"""Schemes of the URLs of MLflow's stores in a database."""


def check_trackers(config: RunConfig) -> None:
    """Raise ConfigError if a tracker that the run file asks for cannot be used: its package is absent, or MLflow's
    store is not named or lacks a package. No tracker is imported."""
    for name, spec, _ in _wanted(config):
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
    if absent:  # mlflow-skinny, which the extra brings, has none and would say so at every try
        raise ConfigError(
            f"trackers.mlflow: MLFLOW_TRACKING_URI names a database, which needs {' and '.join(absent)}; "
            "pip install mlflow, or name a server"
        )


def open_trackers(config: RunConfig, run: TrackedRun, say: Callable[[str], None]) -> list[Tracker]:
    """Return the trackers that the run file asks for. ConfigError as from `check_trackers`.

    `say` is called with a text when something goes wrong later."""
    check_trackers(config)
    trackers = list[Tracker]()
    for name, spec, setting in _wanted(config):
        part = registry.import_path(spec.path, what=f"trackers.{name}")
        if spec.is_service:
            from rftstream.trackers.served import ServedTracker

            trackers.append(ServedTracker(name, part(setting, run), say))
        else:
            trackers.append(part(run.folder / setting))
    return trackers


def folders_of_trackers(config: RunConfig) -> list[str]:
    """Return the names of the folders that the run's trackers have for themselves in the run folder."""
    folders = [spec.folder.format(setting=setting) for _, spec, setting in _wanted(config)]
    return [folder for folder in folders if folder and Path(folder).name == folder]


def _wanted(config: RunConfig) -> Iterator[tuple[str, TrackerSpec, str]]:
    """Yield name, record and setting of each tracker that the run file asks for."""
    for name, spec in TRACKERS.items():
        if (setting := getattr(config.trackers, name)) is not None:
            yield name, spec, setting
