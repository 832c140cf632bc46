"""Weights & Biases: one run there for each run here, also after a resume; steps in force as `train/...`, evaluations as
`eval/...`, both over `version`; tables of samples as `samples`.

The position is saved beside the run (`wandb/written.json`), since offline no service can be asked. Rows are numbered
without gaps, and the number is W&B's own step, so W&B drops rows that are repeated after an interruption. If a trainer
went back, the retrained steps are beside the first ones. `train/trainer_epoch` distinguishes them.

Command line, environment, packages, code and console output are not sent, since they may contain keys.
"""

from __future__ import annotations

import netrc
import os
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from rftstream.errors import ConfigError, importing
from rftstream.trackers.served import CLOSE_S, News, PositionFile, Written
from rftstream.trackers.tracked import SampleTable, TrackedRun, point

LOCAL_MODES = ("offline", "disabled", "dryrun")
"""Values of WANDB_MODE with which nothing is sent, so that no key is needed."""


class WeightsAndBiases:
    """A run at Weights & Biases, as `TrackingService` describes it. `open_trackers` makes it."""

    shows_samples = True

    def __init__(self, project: str, run: TrackedRun) -> None:
        self._entity, _, self._project = project.rpartition("/")
        self._tracked = run
        self._position = PositionFile(run, "wandb")
        self._run: Any = None

    def open(self) -> Written:
        """Start or continue the run, and return the position in `written.json`. ConfigError without a key or the
        package."""
        if os.environ.get("WANDB_MODE") not in LOCAL_MODES and not _has_key(os.environ):
            raise ConfigError(
                "trackers.wandb: WANDB_API_KEY is not set, expected the key in the environment; export it, run `wandb "
                "login`, or set WANDB_MODE=offline"
            )
        with importing("trackers.wandb", "wandb", install="rftstream[wandb]"):
            import wandb
        settings = wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            x_save_requirements=False,
            x_disable_meta=True,
            finish_timeout=CLOSE_S,
            finish_timeout_raises=False,
        )
        found = self._position.read()
        self._run = wandb.init(
            entity=self._entity or None,
            project=self._project,
            id=self._tracked.key,
            name=self._tracked.name,
            resume="allow",
            dir=os.environ.get("WANDB_DIR", str(self._tracked.folder)),
            settings=settings,
        )
        self._run.config.update(dict(self._tracked.config), allow_val_change=True)
        self._run.define_metric("version", hidden=True)
        for series in ("train/*", "eval/*"):
            self._run.define_metric(series, step_metric="version")
        return found

    def write(self, news: Sequence[News], written: Written) -> None:
        """Write a row for each record, and then the new position into `written.json`."""
        for number, one in enumerate(news, self._position.rows):
            self._run.log(_row(one), step=number)
        self._position.write(written, len(news))

    def close(self, *, ended: bool) -> None:
        """End the run. Weights & Biases does not distinguish ended runs from those that may be resumed."""
        self._run.finish()


def _row(one: News) -> dict[str, Any]:
    if isinstance(one, SampleTable):
        import wandb

        table = wandb.Table(columns=list(SampleTable.COLUMNS), data=one.values)
        return {"samples": table, "version": one.name.version}
    version, at, values = point(one)
    return {**values, "version": version, "_timestamp": at}


def _has_key(environment: Mapping[str, str]) -> bool:
    """Return whether there is a key in the environment, or in the file of `wandb login`. Without one, wandb would ask
    for it at the terminal."""
    if environment.get("WANDB_API_KEY"):
        return True
    host = urlsplit(environment.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(environment.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
