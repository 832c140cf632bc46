"""The exporter: it follows runs, and serves metrics of each run as a whole."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry

from rftstream.errors import RftError
from rftstream.launch.health import Health, HealthServer
from rftstream.queries.curves.exported import Figures, RunCollector, figures_of, unreadable
from rftstream.queries.people.feedback import FeedbackRecords, FeedbackView, read_feedback
from rftstream.queries.state.following import RunFollower
from rftstream.runs.folder import OpenRun, named_runs, open_run
from rftstream.service.role import Log

log = logging.getLogger(__name__)

ENDING_S = 5.0
"""Seconds that a thread may take to finish its poll when the exporter ends. It is a daemon thread, and dies with the
process after that."""


class FollowedRun:
    """Follows one run in its own thread, since a transport belongs to one thread. The exporter makes it, calls `start`,
    and at the end `stop`. `figures` may be read at any time."""

    def __init__(self, name: str, open_it: Callable[[], OpenRun], *, every_s: float, health: Health) -> None:
        self.name = name
        self.figures: Figures = {}
        """Nothing before the first look, which may take minutes: it reads the whole log."""
        self._open, self._every_s, self._health = open_it, every_s, health
        self._stopped = threading.Event()
        self._follower: RunFollower | None = None
        self._people = FeedbackRecords()
        self._trouble = ""
        self._thread = threading.Thread(target=self._follow, name=f"follow-{name}", daemon=True)

    def start(self) -> None:
        """Start to follow the run."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join(ENDING_S)

    def _follow(self) -> None:
        try:
            while not self._stopped.is_set():
                self.follow_once()
                self._health.beat()
                self._stopped.wait(self._every_s)
        finally:
            self._close()

    def follow_once(self) -> None:
        """Poll the run once. If the run cannot be read, all metrics but `rftstream_run_up` keep their values."""
        try:
            if self._follower is None:
                self._follower = RunFollower(self._open())
            look = self._follower.look(self._stopped.is_set)
            self.figures = figures_of(self._follower.run.config, look, self._read_people(self._follower), time.time())
            trouble = ""
        except RftError as error:
            trouble = str(error)
        except Exception as error:  # an error in one run must not stop the metrics of the others
            log.debug("%s", self.name, exc_info=True)
            trouble = f"{type(error).__name__}: {error}"
        if trouble:
            self.figures = {**self.figures, **unreadable()}
            self._close()
        if trouble != self._trouble:
            self._trouble = trouble
            log.warning("%s: %s", self.name, trouble or "can be looked at again")

    def _read_people(self, follower: RunFollower) -> FeedbackView:
        # The effect of votes that the buffer has not read yet is left out: it would need a read of all outcomes.
        log_of_run, config = Log(follower.run.transport), follower.run.config
        return read_feedback(log_of_run, config, find_statuses=lambda votes: {}, kept=self._people)

    def _close(self) -> None:
        if self._follower is not None:
            self._follower.close()
            self._follower, self._people = None, FeedbackRecords()


def serve(
    runs: Sequence[Path], *, host: str, port: int, every_s: float, ready: Callable[[str], None] = lambda url: None
) -> None:
    """Follow the runs and serve their metrics until SIGTERM or SIGINT. `ready` is called with the URL."""
    health, registry, ended = Health(), CollectorRegistry(), threading.Event()
    followed = [
        FollowedRun(name, lambda run=run: open_run(run), every_s=every_s, health=health)  # type: ignore[misc]
        for name, run in named_runs(runs).items()
    ]
    registry.register(RunCollector(lambda: [(one.name, one.figures) for one in followed]))
    server = HealthServer(health, port=port, host=host, registry=registry, option="--port")
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: ended.set())
    health.update({"runs": [one.name for one in followed]})
    for one in followed:
        one.start()
    ready(f"http://{host}:{server.port}/metrics")
    try:
        ended.wait()
    finally:
        for one in followed:
            one.stop()
        server.close()
