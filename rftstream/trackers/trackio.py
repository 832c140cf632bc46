"""Trackio: one run of the project for each run here, also after a resume; steps in force as `train/...`, evaluations as
`eval/...`, samples as tables, all over the version.

It writes a local database, which `trackio show` draws; TRACKIO_SPACE_ID or TRACKIO_SERVER_URL name a server. The
position is saved beside the run (`trackio/written.json`); rows between the last position and a kill are written twice.
If a trainer went back, the retrained steps are beside the first ones, and `train/trainer_epoch` distinguishes them.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any

from rftstream.errors import importing
from rftstream.trackers.served import News, PositionFile, Written
from rftstream.trackers.tracked import SampleTable, TrackedRun, point


class Trackio:
    """A run of a Trackio project, as `TrackingService` describes it. `open_trackers` makes it."""

    shows_samples = True

    def __init__(self, project: str, run: TrackedRun) -> None:
        self._project, self._tracked = project, run
        self._position = PositionFile(run, "trackio")
        self._run: Any = None

    def open(self) -> Written:
        """Start or continue the run, and return the position in `written.json`. ConfigError without the package."""
        with importing("trackers.trackio", "trackio", install="rftstream[trackio]"), redirect_stdout(io.StringIO()):
            import trackio

            self._run = trackio.init(
                project=self._project,
                name=f"{self._tracked.name}-{self._tracked.key[:6]}",
                resume="allow",
                config=dict(self._tracked.config),
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        return self._position.read()

    def write(self, news: Sequence[News], written: Written) -> None:
        """Write a row for each record, and then the new position into `written.json`."""
        import trackio

        for one in news:
            if isinstance(one, SampleTable):
                table = trackio.Table(columns=list(SampleTable.COLUMNS), data=one.values)
                self._run.log({"samples": table}, step=one.name.version)
            else:
                version, _, values = point(one)
                self._run.log(values, step=version)
        self._position.write(written, len(news))

    def close(self, *, ended: bool) -> None:
        """Send the rest. Trackio does not distinguish ended runs from those that may be resumed."""
        with redirect_stdout(io.StringIO()):
            self._run.finish()
