"""Reads the status of a run from its log, its folder and its workers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rftstream.algorithms.learning_signal import find_no_signal
from rftstream.algorithms.reward_signs import find_reward_signs
from rftstream.config.stages import stage_line
from rftstream.contracts.outcomes import GroupResult
from rftstream.queries.audits.group_counts import count_outcomes, feeder_cursor, why_filtered
from rftstream.queries.audits.operator_totals import OperatorReader, OperatorTotals
from rftstream.queries.catalog.counts import ErrorKind
from rftstream.queries.curves.history import History, read_glance
from rftstream.queries.curves.training_watch import find_training_signs
from rftstream.queries.records.dead import error_kinds, read_dead
from rftstream.queries.records.growth_report import read_growth
from rftstream.queries.state.best_version import BestVersion, find_best
from rftstream.queries.state.disk import disk_bytes, disk_room
from rftstream.queries.state.elsewhere import hear_members, look_elsewhere, newest_signs
from rftstream.queries.state.run_state import ending_of, state_of
from rftstream.queries.state.standstill import (
    FailingTaskset,
    find_failing,
    find_standstill,
    look_at_movement,
    waiting_records,
)
from rftstream.queries.state.status import Status
from rftstream.queries.state.workers import ask_workers_of
from rftstream.queries.traces.lineage import origin_of
from rftstream.runs.folder import OpenRun
from rftstream.runs.making.elsewhere import steps_of
from rftstream.service.control_view import ControlView, read_control
from rftstream.service.records.losses import WHOLE, deleted_unsaid
from rftstream.service.role import Log

NUM_DEAD_ERRORS = 5
FLOW = ("tasks", "rollouts", "verified", "batches")
"""Topics from which retention deletes finished records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFacts:
    """Facts about a run that its follower already has, so that `read_status` does not read them from the log."""

    live: bool
    """Whether the run had a supervisor before `control` was read: one that ends meanwhile does not count as stopped."""
    control: ControlView
    """State of `control`, older than the facts below, so that for a finished run all its records are counted."""
    history: History
    groups: Mapping[str, int]
    """Result -> decided groups."""
    filtered: Mapping[str, int]
    """Why groups were filtered -> groups, among the newest."""
    newest_batch: int
    """Number of the newest batch. -1: there is none yet."""
    dead_letters: Mapping[str, int]
    dead_errors: tuple[ErrorKind, ...]
    operators: OperatorTotals | None
    failing: tuple[FailingTaskset, ...] | None = None
    """Tasksets whose newest rollouts fail. None: nobody has looked."""
    all_put_back: bool = False
    best: tuple[BestVersion, ...] = ()


def read_status(
    run: OpenRun,
    now: float | None = None,
    known: KnownFacts | None = None,
    *,
    doing: Callable[[str], object] = lambda what: None,
) -> Status:
    """Read the status of a run. `now` is the time by the clock of the log's writers, by default this machine's. `known`
    avoids reading topics that grow with the run. `doing` is called with the name of each request to the log."""
    log = Log(run.transport)
    known = _facts_of(run, log, doing) if known is None else known
    compared = known.history.comparable()
    live, control, history, newest_batch = known.live, known.control, known.history, known.newest_batch
    doing("what waits on each topic")
    lag = waiting_records(run.config, run.transport) | {"batches": max(0, newest_batch + 1 - history.version)}
    cursor, ended = feeder_cursor(log), control.ended
    at = time.time() if now is None else now
    doing("who is at work, and what moves")
    elsewhere = None if live or control.finished is not None else look_elsewhere(control, run.transport, at)
    goes_on = live or (elsewhere is not None and elsewhere.goes_on)
    planned = steps_of(run, control, history.resumes, history.current)
    state, workers = state_of(control, goes_on), ask_workers_of(run, control, live=live)
    used, movement = disk_bytes(run.folder), None
    if state in ("running", "draining") or (state == "stopped" and any(worker.health for worker in workers)):
        movement = look_at_movement(
            run.config, run.transport, steps=history.steps, lag=lag, workers=workers, now=at, elsewhere=elsewhere
        )
    doing("what was deleted, and whose rollouts fail")
    return Status(
        run=run.run_id,
        folder=str(run.folder.path),
        state=state,
        live=live,
        elsewhere=elsewhere,
        stopped=ending_of(control, run.folder, goes_on),
        origin=origin_of(run.config, control.manifest),
        control=control,
        history=history,
        num_steps=min(filter(None, (planned, ended.batches if ended is not None else None)), default=None),
        stage=stage_line(run.config, history.version),
        best=known.best,
        groups={
            "admitted": cursor.get("admitted", 0),
            "trained": 0 if history.current is None else history.current.trained_groups,
            **known.groups,
        },
        filtered=known.filtered,
        left_out=sum(cursor.get("left_out", {}).values()),
        operators=known.operators,
        growing=read_growth(log, run.config, cursor),
        lag=lag,
        lost=deleted_unsaid(run.transport, control.deleted, (*FLOW, *WHOLE)),
        dead_letters=known.dead_letters,
        dead_errors=known.dead_errors,
        all_put_back=known.all_put_back,
        disk_bytes=used,
        disk_room=disk_room(run.folder, used, history),
        workers=workers,
        heard=hear_members(run.transport) if live else {} if elsewhere is None else elsewhere.members,
        no_signal=find_no_signal(history.steps[-1].metrics, run.config) if history.steps else None,
        training_signs=find_training_signs(compared.steps, compared.evaluations, run.config),
        reward_signs=find_reward_signs(compared.metrics, compared.evaluations, run.config),
        failing=find_failing(run.transport) if known.failing is None else known.failing,
        standstill=None if movement is None else find_standstill(movement),
        read_at=at,
        signs={} if control.finished is not None else newest_signs(control, run.transport),
    )


def _facts_of(run: OpenRun, log: Log, doing: Callable[[str], object]) -> KnownFacts:
    """Read from the log the facts that no follower has."""
    doing("control")
    live = run.folder.is_live()  # in this order: see `KnownFacts`
    control = read_control(run.transport, log=log)
    doing("steps and evaluations")
    history = read_glance(log)
    doing("outcomes and batches")
    outcomes = count_outcomes(log)  # after the steps, whose groups it then has
    doing("dead letters")
    dead = read_dead(log, now=time.time())
    return KnownFacts(
        live=live,
        control=control,
        history=history,
        groups=outcomes.num_groups,
        filtered=why_filtered(log) if outcomes.num_groups.get(GroupResult.filtered) else {},
        newest_batch=outcomes.newest_batch,
        dead_letters=dict(Counter(letter.reason for letter in dead.letters).most_common()),
        dead_errors=tuple(error_kinds(reversed(dead.letters))[:NUM_DEAD_ERRORS]),
        operators=OperatorReader(log).read(control),
        all_put_back=bool(outcomes.num_groups.get(GroupResult.dead))
        and all(one.state == "put_back" for one in dead.groups),
        best=find_best(run, history),
    )
