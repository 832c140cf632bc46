"""The reports of a run, which are those that the commands print."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rftstream.queries.audits.audit import audit
from rftstream.queries.audits.balance import AuditReport
from rftstream.queries.catalog.run_index import RunIndex
from rftstream.queries.decisions.run_difference import RunDifference, compare
from rftstream.queries.facts.database import opened_index
from rftstream.queries.state.status import Status
from rftstream.queries.state.status_reading import read_status
from rftstream.queries.traces.lineage import Node
from rftstream.queries.traces.trace import trace
from rftstream.runs import folder as run_folder
from rftstream.runs.folder import OpenRun

if TYPE_CHECKING:
    from rftstream.queries.curves.plot import Picture


class RunReports:
    """The reports of the commands as objects: `to_text` gives their text, `to_json` their JSON, and a notebook
    shows them. `Run` is one."""

    _index: RunIndex

    def _as_it_is(self) -> OpenRun:
        """Return the run with the settings that it has now: a resume may have changed some."""
        folder = self._index.run.folder
        return replace(self._index.run, config=run_folder.read_config(folder)) if folder.exists() else self._index.run

    def status(self) -> Status:
        """Return where the run stands, as `rftstream status` does."""
        return read_status(self._as_it_is())

    def audit(self, *, decisions: bool = False) -> AuditReport:
        """Count what became of every rollout and group, as `rftstream audit` does; `fine` says whether all is well.
        `decisions`: compute the operators' decisions again, too."""
        with opened_index(self._index.run) as index:
            report = audit(self._index.run.transport, index)
        if not decisions:
            return report
        from rftstream.queries.decisions.recompute import recompute_run

        return replace(report, recomputation=recompute_run(self._as_it_is()))

    def trace(self, name: str) -> Node:
        """Follow a rollout, a group, a batch (`batch:17`) or a version (`v12`) up and down the log, as `rftstream
        trace` does. ConfigError if there is none of this id."""
        with opened_index(self._index.run, looking=True) as index:
            return trace(self._index.run, name, index)

    def diff(self, other: RunReports | str | Path) -> RunDifference:
        """Compare with another run: the settings that differ, and batches, rewards, rejections and evaluations beside
        each other. `other`: a run, its folder or its run file."""
        if isinstance(other, RunReports):
            return compare(self._as_it_is(), other._as_it_is())
        opened = run_folder.open_run(other)
        with closing(opened.transport):
            return compare(self._as_it_is(), opened)

    def plot(self, *metrics: str, by: Literal["step", "time"] = "step") -> Picture:
        """Draw curves of the run: those of the metrics that are named (`reward`, `loss`, the name of an evaluation),
        or all that `rftstream plot` draws. ConfigError for a metric that no step has."""
        from rftstream.queries.curves.plot import draw

        return draw(self._index.history().history(), run=self._index.run.run_id, metrics=metrics, by_time=by == "time")
