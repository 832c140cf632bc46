"""MLflow: a run of the experiment, found again by its tag; steps in force as metrics `train/...`, evaluations as
`eval/...`.

A tag of the run records how far the log was written. It is written after the metrics. If the process ends between the
two, these metrics are written again with equal steps and times, and a database store keeps them only once. If a trainer
went back, the retrained steps are beside the first ones, since MLflow deletes no points. The metric
`train/trainer_epoch` distinguishes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rftstream.errors import importing
from rftstream.trackers.served import News, Written
from rftstream.trackers.tracked import SampleTable, TrackedRun, point

RUN_TAG, WRITTEN_TAG = "rftstream.run", "rftstream.written"
MAX_METRICS, MAX_PARAMS, MAX_VALUE = 1000, 100, 6000
"""Limits of one request: number of metrics, number of parameters, and characters of a parameter's value."""


class Mlflow:
    """A run of an MLflow experiment, as `TrackingService` describes it. `open_trackers` makes it."""

    shows_samples = False

    def __init__(self, experiment: str, run: TrackedRun) -> None:
        self._experiment, self._tracked = experiment, run
        self._client: Any = None
        self._run_id = ""

    def open(self) -> Written:
        """Find the run by its tag, or make it, and return the position recorded in its tag. ConfigError without the
        package."""
        with importing("trackers.mlflow", "mlflow-skinny or mlflow", install="rftstream[mlflow]"):
            from mlflow import MlflowClient
        self._client = MlflowClient()
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        wanted = f"tags.`{RUN_TAG}` = '{self._tracked.key}'"
        runs = self._client.search_runs([experiment], filter_string=wanted, max_results=1)
        run = runs[0] if runs else self._create(experiment)
        self._run_id = run.info.run_id
        self._client.update_run(self._run_id, status="RUNNING")
        return Written(*json.loads(run.data.tags.get(WRITTEN_TAG, "[]")))

    def _create(self, experiment: str) -> Any:
        from mlflow.entities import Param

        run = self._client.create_run(experiment, tags={RUN_TAG: self._tracked.key}, run_name=self._tracked.name)
        params = [Param(_name(key), str(value)[:MAX_VALUE]) for key, value in _flat(self._tracked.config)]
        for start in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(run.info.run_id, params=params[start : start + MAX_PARAMS])
        return run

    def write(self, news: Sequence[News], written: Written) -> None:
        """Write the records as metrics, and then the tag with the new position."""
        from mlflow.entities import Metric, RunTag

        metrics = [
            Metric(_name(name), value, round(1000 * at), version)
            for version, at, values in (point(one) for one in news if not isinstance(one, SampleTable))
            for name, value in values.items()
        ]
        tag = RunTag(WRITTEN_TAG, json.dumps(written))
        for start in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + MAX_METRICS])
        self._client.log_batch(self._run_id, tags=[tag])

    def close(self, *, ended: bool) -> None:
        """End the run as FINISHED; or as KILLED, MLflow's word for a run that stopped before its end."""
        self._client.set_terminated(self._run_id, "FINISHED" if ended else "KILLED")


def _name(name: str) -> str:
    """Return a name that MLflow accepts. Other characters become _. Only the first / stays, since no name may be a
    folder of another."""
    section, slash, rest = name.partition("/")
    return re.sub(r"[^\w\-. :/]", "_", section + slash + rest.replace("/", "."), flags=re.ASCII)[:250]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value
