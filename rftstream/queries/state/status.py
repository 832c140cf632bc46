"""The status of a run: its state, its progress, waiting records, and its workers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rftstream.algorithms.learning_signal import NoSignal, find_no_signal
from rftstream.algorithms.reward_changes import changes_to_text
from rftstream.algorithms.reward_signs import Sign, find_reward_signs
from rftstream.config.stages import stage_line
from rftstream.contracts.control import DesiredState
from rftstream.contracts.outcomes import GroupResult
from rftstream.errors import RUN_LOST
from rftstream.queries.audits.group_counts import count_outcomes, feeder_cursor, filtered_rows, undecided, why_filtered
from rftstream.queries.audits.operator_totals import OperatorReader, OperatorTotals
from rftstream.queries.catalog.counts import ErrorKind
from rftstream.queries.curves.evaluations import mean_text, newest_and_best, result_numbers, trust_text, without_best
from rftstream.queries.curves.history import NUM_SMOOTHED, History, read_glance
from rftstream.queries.curves.training_watch import find_training_signs
from rftstream.queries.formatting import columns, duration, listed, moment, number, plural, size, staleness_text
from rftstream.queries.plain import Report, pick
from rftstream.queries.records.dead import error_kinds, read_dead
from rftstream.queries.records.growth_report import GrowthReport, read_growth
from rftstream.queries.state.best_version import BestVersion, find_best
from rftstream.queries.state.disk import DiskRoom, disk_bytes, disk_room, lasts_to_the_end
from rftstream.queries.state.elsewhere import Elsewhere, hear_members, look_elsewhere, newest_signs
from rftstream.queries.state.run_state import ending_of, state_of
from rftstream.queries.state.standstill import (
    FailingTaskset,
    Standstill,
    find_failing,
    find_standstill,
    look_at_movement,
    waiting_records,
)
from rftstream.queries.state.workers import WorkerStatus, ask_workers_of, claims_table, workers_table
from rftstream.queries.traces.lineage import Origin, origin_of
from rftstream.runs.ending import Ending, Restarts, read_changes, read_restarts
from rftstream.runs.folder import OpenRun, RunFolder
from rftstream.runs.making.elsewhere import steps_of, way_on
from rftstream.runs.modules import edited_modules
from rftstream.service.control_view import ControlView, read_control
from rftstream.service.records.losses import WHOLE, deleted_unsaid
from rftstream.service.role import Log

NUM_DEAD_ERRORS = 3
NUM_CHANGES = 5
NUM_EXPORTS = 3
"""Most data sets that are shown, the newest ones."""
ERROR_WIDTH = 700
"""Most characters of an error."""
FLOW = ("tasks", "rollouts", "verified", "batches")
"""Topics from which retention deletes finished records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status(Report):
    """The status of a run. `read_status` makes it; `rftstream status` prints it."""

    JSON = (
        "run run_dir=folder state live elsewhere stopped restarts desired finished=finished_to_json origin "
        "exports=exports_to_json created_at=control.manifest.created_at version=history.version trainer_epoch "
        "step=history.num_steps steps=num_steps seconds_left stage reward no_signal training_signs reward_signs "
        "spent=history.spent reward_changes staleness failing standstill evaluations=evaluations_to_json best groups "
        "filtered left_out operators growing deleted lag lost dead_letters dead_errors "
        "disk_bytes=disk_bytes_with_total disk_room claims=claims_to_json workers=workers_to_json"
    )

    run: str
    folder: str
    state: str
    """running, paused, draining, finished, or stopped (no supervisor here, and no worker continues anywhere)."""
    live: bool
    """Whether a `run` or `resume` supervises it here."""
    elsewhere: Elsewhere | None
    """Workers that may be alive without a supervisor here; None if there are none, or if there is a supervisor."""
    stopped: Ending | None
    """How the newest session ended, if the run is neither live nor finished."""
    origin: Origin | None
    """Source of its rollouts, if it did not sample them itself."""
    control: ControlView
    history: History
    num_steps: int | None
    """Number of steps after which the run ends, by its settings."""
    stage: str | None
    """Current stage; None in a run without stages."""
    best: tuple[BestVersion, ...]
    """The best version by each evaluation that knows one."""
    groups: Mapping[str, int]
    filtered: Mapping[str, int]
    """Operator or rule -> groups that it filtered, among the newest."""
    left_out: int
    """Problems that the feeder left out because their prompts are too long."""
    operators: OperatorTotals | None
    """Counts of the operators' actions on problems and groups; None if the run has no operators."""
    growing: GrowthReport | None
    """Growth of the growing tasksets; None if there are none."""
    lag: Mapping[str, int]
    """Topic -> records that wait to be read; on `batches`, batches that wait to be trained."""
    lost: Mapping[str, int]
    """Topic -> offsets that were deleted by others than the run."""
    dead_letters: Mapping[str, int]
    """Reason -> dead letters; those that were dropped are left out."""
    dead_errors: tuple[ErrorKind, ...]
    """The errors with the most dead letters."""
    all_put_back: bool
    """Whether there are dead groups, and each of them was put back or dropped."""
    disk_bytes: Mapping[str, int]
    disk_room: DiskRoom
    workers: tuple[WorkerStatus, ...]
    heard: Mapping[str, Sequence[str]]
    """Role that shares its work -> its members whose heartbeats the log gets, on any host."""
    no_signal: NoSignal | None
    """Text if the newest steps had no learning signal."""
    training_signs: tuple[Sign, ...]
    """Signs of training problems."""
    reward_signs: tuple[Sign, ...]
    """Signs of reward hacking."""
    failing: tuple[FailingTaskset, ...]
    """Tasksets whose newest rollouts fail."""
    standstill: Standstill | None
    """The parts of the run that stand still, and why; None if none does."""
    read_at: float
    """Time of this status."""
    signs: Mapping[str, float]
    """Role held by another host -> time of the newest record that it wrote."""

    @property
    def failed(self) -> bool:
        """Whether the run was ended by an error, or by one of its own rules."""
        finished = self.control.finished
        if finished is not None:
            return finished.exit_code != 0
        return self.stopped is not None and self.stopped.error is not None

    @property
    def seconds_left(self) -> float | None:
        """An estimate of the seconds until the steps are done; None if the run stands still or nothing tells."""
        moves = self.state == "running" and self.standstill is None
        return self.history.seconds_left(self.num_steps, self.read_at) if moves else None

    @property
    def restarts(self) -> tuple[Restarts, ...]:
        """Processes that died here and were started again."""
        return read_restarts(RunFolder(Path(self.folder)))

    @property
    def trainer_epoch(self) -> int:
        """The trainer epoch in force; 0 before the first."""
        return 0 if self.history.current is None else self.history.current.name.trainer_epoch

    @property
    def reward(self) -> dict[str, float | None]:
        """The newest step's reward, and the mean over the newest steps."""
        rewards = self.history.rewards()
        recent = rewards[-NUM_SMOOTHED:]
        return {
            "last": rewards[-1] if rewards else None,
            f"mean_{NUM_SMOOTHED}": sum(recent) / len(recent) if recent else None,
        }

    @property
    def reward_changes(self) -> tuple[str, ...]:
        """The newest changes of the rewards, since which versions."""
        return changes_to_text(self.history.reward_changes, NUM_CHANGES)

    @property
    def staleness(self) -> dict[str, list[int]]:
        """Counts of trained tokens and groups, by staleness."""
        return dict(zip(("tokens", "groups"), self.history.staleness(), strict=True))

    @property
    def desired(self) -> dict[str, str]:
        """The requested state, with who requested it and why."""
        state = self.control.state
        return {"state": "running", "by": "", "reason": ""} if state is None else pick(state, "state by reason")

    @property
    def deleted(self) -> dict[str, int]:
        """Groups and rollouts that retention deleted."""
        said = self.control.deleted
        return {"groups": said.sequence, "rollouts": sum(said.rollouts.values()), "earliest_version": said.version}

    def finished_to_json(self) -> dict[str, Any] | None:
        """Return how the run finished; None if it has not."""
        finished = self.control.finished
        return None if finished is None else pick(finished, "reason version=name.version at=finished_at exit_code")

    def exports_to_json(self) -> list[dict[str, Any]]:
        """Return the data sets that left the run, oldest first."""
        return [pick(one, "digest form filters num_rows folder by at=exported_at") for one in self.control.exports]

    def evaluations_to_json(self) -> dict[str, Any]:
        """Return the newest and the best result of each evaluation."""
        return {
            name: {"newest": result_numbers(newest), "best": result_numbers(best)}
            for name, (newest, best) in newest_and_best(self.history.evaluations).items()
        }

    def disk_bytes_with_total(self) -> dict[str, int]:
        """Return the bytes on disk by folder, with their sum."""
        return {**self.disk_bytes, "total": sum(self.disk_bytes.values())}

    def claims_to_json(self) -> list[dict[str, Any]]:
        """Return the claims in force."""
        return [pick(claim, "role epoch process host pid claimed_at") for claim in self.control.claims.values()]

    def workers_to_json(self) -> list[dict[str, Any]]:
        """Return the answer of each worker."""
        return [{**pick(one, "process role port host reachable"), **(one.health or {})} for one in self.workers]

    def to_text(self, now: float | None = None) -> str:
        """Return the status as text for people. `now` is a time in seconds, by default this machine's."""
        return "\n".join(_text(self, time.time() if now is None else now))


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
    planned = steps_of(run, control.manifest, history.resumes, history.current)
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


# --------------------------------------------------------------------------------------------- output


def _text(status: Status, now: float) -> list[str]:
    rows = [("state", _state_sentence(status)), *_troubles(status), *_training(status, now), *_flow(status, now)]
    return [
        *(f"{status.run}  {status.folder}", ""),
        *columns(rows, left=2, indent="  "),
        *claims_table(status.control, status.signs, now),
        *workers_table(status.workers, status.heard if status.live or status.elsewhere else None, now),
    ]


def _troubles(status: Status) -> Iterator[tuple[str, str]]:
    yield from () if status.stopped is None else (("stopped by", _ending_sentence(status.stopped)),)
    yield from (("restarted", one.to_text()) for one in status.restarts)
    yield from () if status.standstill is None else (("stands still", status.standstill.to_text()),)
    yield from (("fails", one.to_text()) for one in status.failing)
    if (origin := status.origin) is not None:
        yield "made of", f"{origin.run}: {origin.how}"
        yield from (("changed", line) for line in origin.changed)
    folder = RunFolder(Path(status.folder))
    yield from (("changed", line) for line in read_changes(folder))
    yield from (("edited", line) for line in (edited_modules(folder) if status.live else ()))


def _training(status: Status, now: float) -> Iterator[tuple[str, str]]:
    history, reward = status.history, status.reward
    of = f" of {status.num_steps:,}" if status.num_steps else ""
    version = f"{history.version:,}{of}, trainer epoch {status.trainer_epoch}"
    if history.current is not None and history.current.recorded_at:
        version += f", recorded {duration(now - history.current.recorded_at)} ago"
    left = "" if (left_s := status.seconds_left) is None else f"some {duration(left_s)} left"
    yield "version", "; ".join(filter(None, (version, history.again, left)))
    yield from () if status.stage is None else (("stage", status.stage),)
    if reward["last"] is not None:
        num_steps = min(NUM_SMOOTHED, len(history.rewards()))
        mean = f", mean of the last {num_steps} steps {number(reward[f'mean_{NUM_SMOOTHED}'])}"
        yield "reward", number(reward["last"]) + (mean if num_steps > 1 else "")
    yield from (("scorer", line) for line in status.reward_changes)
    if status.no_signal is not None:
        yield "no signal", f"for {status.no_signal.steps:,} steps: {status.no_signal.cause}"
    yield from ((sign.heading, sign.to_text()) for sign in (*status.training_signs, *status.reward_signs))
    if staleness := staleness_text(status.staleness["tokens"]):
        yield "staleness", f"of trained tokens: {staleness}"
    if spent := history.spent():
        amounts = ", ".join(f"{number(value)} {kind.replace('_', ' ')}" for kind, value in sorted(spent.items()))
        yield "judges", f"{amounts} for the rollouts of batches"
    equal = without_best(history.evaluations)
    for name, pair in newest_and_best(history.evaluations).items():
        newest, best = (f"{mean_text(result)} at version {result.name.version}" for result in pair)
        best = f"best {best}" if name not in equal else f"the same for all {equal[name]:,} versions, so none is best"
        yield f"eval {name}", f"{newest}, {best}; {trust_text(pair[0])}"
    yield from (("best", one.to_text()) for one in status.best)


def _flow(status: Status, now: float) -> Iterator[tuple[str, str]]:
    yield "groups", listed(status.groups)
    yield from filtered_rows(status.groups, status.filtered)
    if status.left_out:
        yield "left out", f"{plural(status.left_out, 'problem')} with too long prompts"
    yield from () if status.operators is None else status.operators.status_rows()
    yield from () if status.growing is None else status.growing.status_rows()
    bound = ("up to ", f"; {undecided(status.groups)}") if any(status.lag.values()) else ("", "")
    yield "waiting", listed(status.lag, "on").join(bound)
    waits = status.state == "running" and not status.lag.get("batches")
    yield from (("speed", text) for text in status.history.speed_texts(now if waits else None))
    if status.lost:
        found = f"offsets {listed(status.lost, 'of')} were deleted, and not by the run"
        yield "lost", f"{found}: `rftstream topics list` shows settings"
    yield "dead letters", (listed(status.dead_letters) or "none") + ("; all put back" if status.all_put_back else "")
    yield from (("died of", f"{end.error} ({end.count:,} {end.reason})") for end in status.dead_errors)
    if (deleted := status.control.deleted).version:
        yield "deleted", f"{plural(deleted.sequence, 'group')}, batches below version {deleted.version:,}"
    for one in status.control.exports[-NUM_EXPORTS:]:
        yield "exported", f"{one.num_rows:,} rows ({one.form}) to {one.folder} by {one.by}, {one.digest}"
    if disk := ", ".join(f"{name} {size(count)}" for name, count in status.disk_bytes.items()):
        yield "disk", f"{size(sum(status.disk_bytes.values()))} ({disk})"
    if status.disk_room.is_little and not lasts_to_the_end(
        status.disk_room, status.disk_bytes, status.history, status.num_steps
    ):
        yield "free", status.disk_room.to_text()


def _state_sentence(status: Status) -> str:
    finished, desired = status.control.finished, status.control.state
    if finished is not None:
        return f"finished {moment(finished.finished_at)}: {finished.reason}"
    who, elsewhere = "supervised here" if status.live else "no `run` or `resume` supervises it here", status.elsewhere
    if desired is not None and desired.state is not DesiredState.running:
        why = f" ({desired.reason})" if desired.reason else ""
        return f"{desired.state} since {moment(desired.since)} by {desired.by}{why}; {who}"
    if status.live:
        return f"running, {who}"
    if elsewhere is None:
        is_lost = status.stopped is not None and status.stopped.exit_code == RUN_LOST
        return f"stopped: {who}; " + ("begin a new run" if is_lost else f"{way_on(status.folder)} goes on")
    if elsewhere.goes_on:
        return f"running by {elsewhere.to_text()}; {who}"
    return (
        f"stopped: {who}, and nothing is written by {elsewhere.to_text()}; if they have ended, start them again, or "
        f"{way_on(status.folder)} goes on here"
    )


def _ending_sentence(ending: Ending) -> str:
    if ending.by == "kill":
        return "a kill: no word of its end in logs/run.log (SIGKILL, out of memory, machine down, disk full)"
    return ending.sentence(ERROR_WIDTH, "" if ending.at is None else f", {moment(ending.at)}")
