"""Trackers: what shows a run's curves outside of it. They read `steps` and `evals`, nothing else, and nobody waits for
them.

The log is the truth: a tracker that starts again goes on with the same series, and no step in force is missing there.
Each stands behind an extra and is off by default ([trackers]).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Protocol

from rftstream.config.sections import RunConfig
from rftstream.contracts.versions import EvalResult, StepRecord
from rftstream.errors import ConfigError
from rftstream.trackers.tracked import TrackedRun


class Tracker(Protocol):
    def update(self, news: Sequence[StepRecord | EvalResult]) -> None:
        """What is new, in the order of the log: steps that were in force when they came, and evaluations. The first
        call gets all there is."""

    def close(self, *, ended: bool) -> None:
        """`ended`: the run is over, else it may be resumed."""


PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
"""Setting, which is the name of the extra, too -> the package that it needs."""

DATABASES = ("sqlite", "mysql", "postgresql", "mssql")
"""Schemes of MLflow's stores in a database."""


def check_trackers(config: RunConfig) -> None:
    """ConfigError if the package of one that the run file asks for is absent, or MLflow's store is not named or
    out of reach for want of one. Imports none of them."""
    for name, package in PACKAGES.items():
        if getattr(config.trackers, name) is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"trackers.{name}: needs the package {package}; pip install 'rftstream[{name}]', or leave it out"
            )
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
    """Those that the run file asks for. ConfigError as from `check_trackers`; `say`: what goes wrong later."""
    check_trackers(config)
    wanted, trackers = config.trackers, list[Tracker]()
    if wanted.tensorboard is not None:
        from rftstream.trackers.tensorboard import TensorBoard

        trackers.append(TensorBoard(run.folder / wanted.tensorboard))
    if wanted.wandb is not None:
        from rftstream.trackers.served import ServedTracker
        from rftstream.trackers.wandb import WeightsAndBiases

        trackers.append(ServedTracker("wandb", WeightsAndBiases(wanted.wandb, run), say))
    if wanted.mlflow is not None:
        from rftstream.trackers.mlflow import Mlflow
        from rftstream.trackers.served import ServedTracker

        trackers.append(ServedTracker("mlflow", Mlflow(wanted.mlflow, run), say))
    return trackers
