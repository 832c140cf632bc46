"""Opens a run, and is one: `Run`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rftstream.api.acting import RunActions
from rftstream.api.looking import RunTables
from rftstream.api.on_log import open_on_log
from rftstream.config.sections import RunConfig
from rftstream.contracts.messages import Message
from rftstream.queries.catalog.run_index import RunIndex
from rftstream.runs import folder as run_folder
from rftstream.runs.folder import OpenRun
from rftstream.service.control_view import ControlReader
from rftstream.service.role import Log

FOLLOWED = ("steps", "evals", "weights")
"""Topics that `follow` reads unless it is told others."""


class Run(RunTables, RunActions):
    """A run, live or over. `rftstream.open` makes it; `close` or the end of a `with` block closes its log.

    It belongs to the thread that made it. It reads the run and writes nothing to its log, save for the methods that say
    so.
    """

    def __init__(self, opened: OpenRun) -> None:
        self._index = RunIndex(opened)

    @property
    def id(self) -> str:
        """Return the run's id, which is the name of its folder."""
        return self._index.run.run_id

    @property
    def path(self) -> Path:
        """Return the run's folder, which is missing on a host that has only the log."""
        return self._index.run.folder.path

    @property
    def config(self) -> RunConfig:
        """Return the settings that the run was started with, or was last resumed with."""
        return self._as_it_is().config

    @property
    def state(self) -> str:
        """Return its state: running, paused, draining, finished or stopped."""
        return self.status().state

    @property
    def summary(self) -> dict[str, float]:
        """Return the metrics of the newest step, and its version; empty before the first."""
        steps = self._index.history().history().steps
        return {"version": steps[-1].name.version, **steps[-1].metrics} if steps else {}

    def follow(self, *topics: str, every_s: float = 1.0) -> Iterator[Message]:
        """Yield the messages that come from now on, until the run is over.

        `topics`: those to follow; by default steps, evals and weights, whose messages are StepRecord, EvalResult and
        WeightsAnnounced. `every_s`: seconds between two looks at the log.
        """
        log, control = Log(self._index.run.transport), ControlReader(self._index.run.transport)
        positions = {topic: dict(log.ends(topic)) for topic in topics or FOLLOWED}
        while True:
            is_over = control.read().finished is not None or not self._goes_on()
            for topic, position in positions.items():
                for record, message in log.rule.messages(log.read(topic, start=position)):
                    position[record.place] = record.offset + 1
                    if message is not None:
                        yield message
            if is_over:
                return
            time.sleep(every_s)

    def _goes_on(self) -> bool:
        """Return whether a supervisor here, or workers of their own, go on with the run."""
        return self._index.run.folder.is_live() or self.state not in ("finished", "stopped")

    def close(self) -> None:
        """Close the log and the index."""
        self._index.close()

    def __enter__(self) -> Run:
        """Return the run; the end of the block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        """Return how it was opened."""
        return f"rftstream.open({str(self.path)!r})"

    def _repr_html_(self) -> str | None:
        """Return its state as HTML, for notebooks."""
        return self.status()._repr_html_()


def open_run(run: str | Path, *, servers: str | None = None, options: Mapping[str, Any] | None = None) -> Run:
    """Open a run to look at it, live or over.

    `run` is a run folder, or a run file (then its newest run). With `servers`, the addresses of Kafka's brokers, it is
    the id of a run there, and nothing of it need be on this host; `options` are those of `[transport] options`.
    ConfigError if there is no such run.
    """
    if servers is None:
        return Run(run_folder.open_run(run))
    return Run(open_on_log(str(run), servers, options or {}))
