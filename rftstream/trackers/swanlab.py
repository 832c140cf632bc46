"""SwanLab: one experiment for each run here, also after a resume; steps in force as `train/...`, evaluations as
`eval/...`, both over `version`; tables of samples as `samples`.

The position is saved beside the run (`swanlab/written.json`), with the files of `SWANLAB_MODE=offline`, for `swanlab
sync`. Rows are numbered without gaps, and the number is SwanLab's own step, so a row that is repeated after an
interruption counts once. Machine, packages, code and console output are not sent.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

from rftstream.errors import ConfigError, importing
from rftstream.trackers.served import News, PositionFile, Written
from rftstream.trackers.tracked import SampleTable, TrackedRun, point

NOT_SENT = ("hardware", "runtime", "requirements", "conda", "git", "monitor")


class SwanLab:
    """A SwanLab experiment, as `TrackingService` describes it. `open_trackers` makes it."""

    shows_samples = True

    def __init__(self, project: str, run: TrackedRun) -> None:
        workspace, _, self._project = project.rpartition("/")
        self._workspace, self._tracked = workspace or None, run
        self._position = PositionFile(run, "swanlab")
        self._run: Any = None

    def open(self) -> Written:
        """Start or continue the experiment, and return the position in `written.json`. ConfigError without a key or the
        package."""
        with importing("trackers.swanlab", "swanlab", install="rftstream[swanlab]"):
            import swanlab
        settings = swanlab.Settings(
            interactive=False, terminal={"proxy_type": "none"}, probe=dict.fromkeys(NOT_SENT, False)
        )
        if settings.mode == "online" and not settings.api_key:
            raise ConfigError(
                "trackers.swanlab: SWANLAB_API_KEY is not set, expected the key in the environment; export it, run "
                "`swanlab login`, or set SWANLAB_MODE=offline"
            )
        found = self._position.read()
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            self._run = swanlab.init(
                project=self._project,
                workspace=self._workspace,
                name=self._tracked.name,
                id=self._tracked.key,
                resume="allow",
                log_dir=str(self._tracked.folder / "swanlab"),
                config=dict(self._tracked.config),
                settings=settings,
            )
        for series in ("train/*", "eval/*"):
            self._run.define_metric(series, x_axis="version")
        return found

    def write(self, news: Sequence[News], written: Written) -> None:
        """Write a row for each record, and then the new position into `written.json`."""
        for number, one in enumerate(news, self._position.rows):
            self._run.log(_row(one), step=number)
        self._position.write(written, len(news))

    def close(self, *, ended: bool) -> None:
        """End the experiment. SwanLab does not distinguish ended runs from those that may be resumed."""
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            self._run.finish()


def _row(one: News) -> dict[str, Any]:
    if isinstance(one, SampleTable):
        import swanlab

        table = swanlab.echarts.Table()
        table.add(list(SampleTable.COLUMNS), one.values)
        return {"samples": table, "version": one.name.version}
    version, _, values = point(one)
    return {**values, "version": version}
