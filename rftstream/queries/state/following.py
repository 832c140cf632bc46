"""A run as somebody follows it who keeps looking: its status and counts, without reading again what was read before.

The studio and the exporter follow runs. Neither writes where the run writes, and nobody waits for them.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from rftstream.config.sections import RunConfig
from rftstream.queries.audits.balance import Balance
from rftstream.queries.audits.operator_totals import OperatorTotals, read_totals
from rftstream.queries.catalog.counts import CatalogCounts, count_fates, count_letters, oldest_open
from rftstream.queries.catalog.database import CatalogReader
from rftstream.queries.catalog.moments import Moment
from rftstream.queries.catalog.updating import CatalogUpdater
from rftstream.queries.curves.history import HistoryReader
from rftstream.queries.formatting import columns
from rftstream.queries.plain import Report
from rftstream.queries.state.status import NUM_DEAD_ERRORS, KnownFacts, Status, read_status
from rftstream.roles.explorer import EXPLORER
from rftstream.roles.verifier import VERIFIER
from rftstream.runs.folder import OpenRun
from rftstream.service.control_view import ControlView, read_control
from rftstream.service.role import Log

OPERATORS_S = 30.0
"""Seconds between two counts of what operators did: that reads all outcomes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The snapshot that a `RunFollower` takes of a run at one look."""

    status: Status
    counts: CatalogCounts | None
    """None: no catalog yet, since the run has not begun."""
    oldest_open_at: float | None
    """When the oldest group without an outcome was admitted, in log time in seconds; None if there is none."""
    share_read: float
    """How much of the log is in the catalog, 0 to 1."""


class RunFollower:
    """Follows one run in one thread, which makes it, calls `look` now and then, and `close` in the end. It takes over
    the run's transport."""

    def __init__(self, run: OpenRun) -> None:
        self.run = run
        self.updater = CatalogUpdater(run)
        self.history = HistoryReader(Log(run.transport))
        """Steps, evaluations and announcements so far."""
        self._operators: tuple[float, OperatorTotals | None] | None = None

    def look(self, should_stop: Callable[[], bool] = lambda: False) -> Look:
        """Read what has come since the last look. It stops early, with what it has, if `should_stop` says so."""
        run, updater, history = self.run, self.updater, self.history
        began = run.folder.is_live(), read_control(run.transport)  # first, in this order: see `KnownFacts`
        history.read()
        while updater.update(should_stop) and not should_stop():
            history.read()
            if updater.done >= updater.total:
                break
        counts, known, oldest = None, None, None
        if (catalog := updater.open_catalog()) is not None:
            moment = Moment(version=history.history().version)
            with catalog:
                counts = count_fates(catalog, moment)
                known = self._known(began, catalog, counts, moment)
                oldest = oldest_open(catalog)
        return Look(
            status=read_status(run, known=known),
            counts=counts,
            oldest_open_at=oldest,
            share_read=updater.done / updater.total if updater.total else 1.0,
        )

    def _known(
        self, began: tuple[bool, ControlView], catalog: CatalogReader, counts: CatalogCounts, moment: Moment
    ) -> KnownFacts:
        kinds, dead = count_letters(catalog, moment), Counter[str]()
        for kind in kinds:
            dead[kind.reason] += kind.count
        results = Counter[str]()
        for (result, _), count in counts.reasons.items():
            results[result] += count
        if self._operators is None or time.monotonic() - self._operators[0] > OPERATORS_S:
            self._operators = (time.monotonic(), read_totals(Log(self.run.transport)))
        return KnownFacts(
            live=began[0],
            control=began[1],
            history=self.history.glance(),
            groups={result: results[result] for result in ("batched", "filtered", "expired", "dead")},
            newest_batch=counts.newest_batch,
            dead_letters=dict(dead.most_common()),
            dead_errors=tuple(kind for kind in kinds if kind.error)[:NUM_DEAD_ERRORS],
            operators=self._operators[1],
        )

    def close(self) -> None:
        """Close what it opened."""
        self.updater.close()
        self.run.transport.close()


# -------------------- how many workers of the roles that share work a backlog asks for: ceil(backlog / max_concurrent)


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedWorkers(Report):
    """How many workers of a role are wanted. `scale_plan` makes it."""

    role: str
    backlog: int
    """Rollouts whose next step is this role's, in hand or not."""
    max_concurrent: int
    """Rollouts that one worker has in hand at most."""
    most: int
    """More have nothing to do: each owns at least one partition."""
    wanted: int


def scale_plan(config: RunConfig, rollouts: Balance, *, at_least: int = 0) -> tuple[WantedWorkers, ...]:
    """Return how many explorers and verifiers are wanted. `rollouts`: where the pending ones stand. Other roles do not
    share their work: one of each is in force. `at_least` workers are wanted also without a backlog."""
    found = []
    for role, stage, settings in (
        (EXPLORER.name, "to_be_sampled", config.explorer),
        (VERIFIER.name, "sampled", config.verifier),
    ):
        backlog, most = rollouts.pending_by_stage[stage], config.transport.partitions
        wanted = min(most, max(at_least, math.ceil(backlog / settings.max_concurrent)))
        found.append(
            WantedWorkers(role=role, backlog=backlog, max_concurrent=settings.max_concurrent, most=most, wanted=wanted)
        )
    return tuple(found)


def plan_text(plan: tuple[WantedWorkers, ...]) -> str:
    """Return the plan as a table for people."""
    rows = [(one.role, one.backlog, one.max_concurrent, one.most, one.wanted) for one in plan]
    return "\n".join(columns([("role", "backlog", "max_concurrent", "most", "wanted"), *rows], left=1))
