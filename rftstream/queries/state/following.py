"""Follows a run: its status and counts at each poll, without reading any record twice.

The studio and the exporter follow runs. Neither writes to the run, and nothing waits for them.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from rftstream.config.sections import RunConfig
from rftstream.errors import ConfigError
from rftstream.queries.audits.balance import Balance
from rftstream.queries.audits.operator_totals import OperatorReader, OperatorTotals
from rftstream.queries.catalog.counts import CatalogCounts, count_fates, count_letters, count_put_back, oldest_open
from rftstream.queries.catalog.database import CatalogReader
from rftstream.queries.catalog.moments import Moment
from rftstream.queries.catalog.updating import CatalogUpdater
from rftstream.queries.curves.history import HistoryReader
from rftstream.queries.formatting import columns
from rftstream.queries.plain import Report
from rftstream.queries.state.elsewhere import look_elsewhere
from rftstream.queries.state.run_state import ending_of, state_of
from rftstream.queries.state.standstill import FailingTaskset, find_failing
from rftstream.queries.state.status import Status
from rftstream.queries.state.status_reading import NUM_DEAD_ERRORS, KnownFacts, read_status
from rftstream.queries.state.workers import ask_workers_of
from rftstream.roles.explorer import EXPLORER
from rftstream.roles.verifier import VERIFIER
from rftstream.runs.folder import OpenRun, read_config
from rftstream.service.control_view import ControlReader, ControlView, read_control
from rftstream.service.role import Log

OPERATORS_S = 30.0
"""Seconds between two counts of operators' actions, each of which opens a reader of outcomes."""
FAILING_S = 5.0
"""Seconds between two looks at the newest rollouts, each of which opens a reader."""
MOST_TEXTS_S = 10.0
"""Most seconds of one look that are for texts."""
WAIT_S = 120.0
"""Seconds to wait for another process that counts the log."""
LOOK_S = 0.2
"""Seconds between two looks at how far it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The state of a run at one poll. `RunFollower.look` makes it."""

    status: Status
    counts: CatalogCounts | None
    """Counts of the catalog. None: there is no catalog, since the run has not begun."""
    oldest_open_at: float | None
    """Admission time of the oldest group without an outcome, in log time in seconds; None if there is none."""
    share_read: float
    """Share of the log that the catalog has read, 0 to 1."""
    is_read: bool
    """Whether the catalog has read all that the log held at the first look."""
    has_more: bool
    """Whether texts are still to be read; the next look reads on."""


def with_present_state(status: Status, run: OpenRun) -> Status:
    """Return the status with the state of now if a session of the run has begun or ended since it was read. Little is
    read for that, whatever the log has grown by."""
    live = run.folder.is_live()  # first: see `KnownFacts`
    if live == status.live:
        return status
    control = read_control(run.transport)
    is_over = live or control.finished is not None
    elsewhere = None if is_over else look_elsewhere(control, run.transport, time.time())
    goes_on = live or (elsewhere is not None and elsewhere.goes_on)
    return replace(
        status,
        live=live,
        control=control,
        elsewhere=elsewhere,
        state=state_of(control, goes_on),
        stopped=ending_of(control, run.folder, goes_on),
        workers=ask_workers_of(run, control, live=live),
        standstill=None,
    )


class RunFollower:
    """Follows one run in one thread, which makes it, calls `look` at intervals, and `close` at the end. It takes
    ownership of the run's transport."""

    def __init__(self, run: OpenRun) -> None:
        self.run = run
        self.updater = CatalogUpdater(run)
        self.history = HistoryReader(Log(run.transport))
        """Steps, evaluations and announcements so far."""
        self._control = ControlReader(run.transport)
        self._reader_of_operators = OperatorReader(Log(run.transport))
        self._config_stamp = run.folder.config_stamp()
        self._held_at_first: int | None = None
        """Offsets of the log at the first look."""
        self._look_s = 0.0
        """Seconds that the last look took, without texts."""
        self._operators: tuple[float, OperatorTotals | None] | None = None
        self._failing: tuple[float, int, tuple[FailingTaskset, ...]] | None = None
        """When the newest rollouts were looked at, how many offsets there were, and which tasksets failed."""

    def look(self, should_stop: Callable[[], bool] = lambda: False) -> Look:
        """Read the new records. `should_stop` can end it early, with the results so far."""
        started = time.monotonic()
        self._read_config()
        run, updater, history = self.run, self.updater, self.history
        began = run.folder.is_live(), self._control.read()  # first, in this order: see `KnownFacts`
        history.read()
        while updater.update(should_stop) and not should_stop():
            history.read()
            if updater.done >= updater.total:
                break
        if self._held_at_first is None:
            self._held_at_first = updater.total
        texts_from = time.monotonic()
        # Texts take as long as all else: a look at a slow log takes seconds, whatever it finds.
        until = texts_from + self._look_s
        has_more = updater.done >= updater.total and updater.read_texts(
            history.history().evaluations, lambda: time.monotonic() < until and not should_stop()
        )
        texts_s = time.monotonic() - texts_from
        counts, known, oldest = None, None, None
        if (catalog := updater.open_catalog()) is not None:
            moment = Moment(version=history.history().version)
            with catalog:
                counts = count_fates(catalog, moment)
                known = self._known(began, catalog, counts, moment)
                oldest = oldest_open(catalog)
        status = read_status(run, known=known)
        self._look_s = min(MOST_TEXTS_S, time.monotonic() - started - texts_s)
        return Look(
            status=status,
            counts=counts,
            oldest_open_at=oldest,
            share_read=self.share_read,
            is_read=updater.done >= self._held_at_first,
            has_more=has_more,
        )

    def _read_config(self) -> None:
        """Read the run's settings anew if `resume --set` has changed them."""
        stamp = self.run.folder.config_stamp()
        if stamp != self._config_stamp:
            with contextlib.suppress(ConfigError):  # of a newer release: what was known stays
                self.run = replace(self.run, config=read_config(self.run.folder))
            self._config_stamp = stamp

    @property
    def share_read(self) -> float:
        """Return the share of the log that the catalog has read, also during a look."""
        return self.updater.done / self.updater.total if self.updater.total else 1.0

    def look_at_all(self, wait_s: float = WAIT_S) -> Look:
        """Look until all that was on the log at first is counted. Another process may be the one that reads it into the
        catalog, such as a studio. ConfigError if that takes longer than `wait_s` seconds."""
        look, deadline = self.look(), time.monotonic() + wait_s
        wanted = self.updater.total
        while self.updater.done < wanted:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"{self.run.folder.path}: {self.updater.done / wanted:.0%} of the log is counted, expected all; "
                    "a studio or exporter of this run is counting: wait for it, or end it"
                )
            time.sleep(LOOK_S)
            look = self.look()
        return look

    def _known(
        self, began: tuple[bool, ControlView], catalog: CatalogReader, counts: CatalogCounts, moment: Moment
    ) -> KnownFacts:
        kinds, dead = count_letters(catalog, moment), Counter[str]()
        for kind in kinds:
            dead[kind.reason] += kind.count
        results, filtered = Counter[str](), Counter[str]()
        for (result, reason), count in counts.reasons.items():
            results[result] += count
            filtered[reason] += count if result == "filtered" else 0
        if self._operators is None or time.monotonic() - self._operators[0] > OPERATORS_S:
            self._operators = (time.monotonic(), self._reader_of_operators.read(began[1]))
        return KnownFacts(
            live=began[0],
            control=began[1],
            history=self.history.glance(),
            groups={result: results[result] for result in ("batched", "filtered", "expired", "dead")},
            filtered={reason: count for reason, count in filtered.most_common() if count},
            newest_batch=counts.newest_batch,
            dead_letters=dict(dead.most_common()),
            dead_errors=tuple(kind for kind in kinds if kind.error)[:NUM_DEAD_ERRORS],
            operators=self._operators[1],
            all_put_back=bool(results["dead"]) and count_put_back(catalog, moment) >= results["dead"],
            failing=self._find_failing(),
        )

    def _find_failing(self) -> tuple[FailingTaskset, ...]:
        now, num_offsets = time.monotonic(), self.updater.texts.total
        before = self._failing
        if before is None or (before[1] != num_offsets and now - before[0] > FAILING_S):
            before = self._failing = (now, num_offsets, find_failing(self.run.transport))
        return before[2]

    def close(self) -> None:
        """Close everything that it opened."""
        self.updater.close()
        self.run.transport.close()


# -------------------- number of workers that a backlog needs, for roles that share work: ceil(backlog / max_concurrent)


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedWorkers(Report):
    """The number of wanted workers of a role. `scale_plan` makes it."""

    role: str
    backlog: int
    """Rollouts whose next step is this role's, those in progress included."""
    max_concurrent: int
    """Most rollouts that one worker processes at once; with `auto` those with which it begins."""
    most: int
    """Most workers: each further one would own no partition."""
    wanted: int


def scale_plan(config: RunConfig, rollouts: Balance, *, at_least: int = 0) -> tuple[WantedWorkers, ...]:
    """Return the wanted numbers of explorers and verifiers. `rollouts` gives the stages of pending rollouts. Other
    roles do not share their work: one worker of each is in force. `at_least` workers are wanted even without a
    backlog."""
    found = []
    for role, stage, at_once in (
        (EXPLORER.name, "to_be_sampled", config.explorer.first_concurrent),
        (VERIFIER.name, "sampled", config.verifier.max_concurrent),
    ):
        backlog, most = rollouts.pending_by_stage[stage], config.transport.partitions
        wanted = min(most, max(at_least, math.ceil(backlog / at_once)))
        found.append(WantedWorkers(role=role, backlog=backlog, max_concurrent=at_once, most=most, wanted=wanted))
    return tuple(found)


def plan_text(plan: tuple[WantedWorkers, ...]) -> str:
    """Return the plan as a table for people."""
    rows = [(one.role, one.backlog, one.max_concurrent, one.most, one.wanted) for one in plan]
    return "\n".join(columns([("role", "backlog", "max_concurrent", "most", "wanted"), *rows], left=1))
