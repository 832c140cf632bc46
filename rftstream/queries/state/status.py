"""The status of a run, in numbers and in words: its state, its progress, waiting records, and its workers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rftstream.algorithms.learning_signal import NoSignal
from rftstream.algorithms.reward_changes import changes_to_text
from rftstream.algorithms.reward_signs import Sign
from rftstream.contracts.control import DesiredState
from rftstream.errors import RUN_LOST
from rftstream.queries.audits.group_counts import filtered_rows, undecided
from rftstream.queries.audits.operator_totals import OperatorTotals
from rftstream.queries.catalog.counts import ErrorKind
from rftstream.queries.curves.evaluations import mean_text, newest_and_best, result_numbers, trust_text, without_best
from rftstream.queries.curves.history import NUM_SMOOTHED, History
from rftstream.queries.formatting import columns, duration, listed, moment, number, plural, size, staleness_text
from rftstream.queries.plain import Report, pick
from rftstream.queries.records.growth_report import GrowthReport
from rftstream.queries.state.best_version import BestVersion
from rftstream.queries.state.disk import DiskRoom, lasts_to_the_end
from rftstream.queries.state.elsewhere import Elsewhere
from rftstream.queries.state.standstill import (
    FailingTaskset,
    Standstill,
)
from rftstream.queries.state.workers import WorkerStatus, claims_table, workers_table
from rftstream.queries.traces.lineage import Origin
from rftstream.runs.ending import Ending, Restarts, read_changes, read_restarts
from rftstream.runs.folder import RunFolder
from rftstream.runs.making.elsewhere import way_on
from rftstream.runs.modules import edited_modules
from rftstream.service.control_view import ControlView

NUM_CHANGES = 5
NUM_EXPORTS = 3
"""Most data sets that are shown, the newest ones."""
NUM_RESTARTS = 6
"""Most processes whose restarts are shown, those that died last."""
ERROR_WIDTH = 700
"""Most characters of an error."""


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


# --------------------------------------------------------------------------------------------- output


def _text(status: Status, now: float) -> list[str]:
    rows = [("state", _state_sentence(status)), *_troubles(status), *_training(status, now), *_flow(status, now)]
    heard = status.heard if status.live or status.elsewhere else None
    return [
        f"{status.run}  {status.folder}",
        "",
        *columns(rows, left=2, indent="  "),
        *claims_table(status.control, status.signs, now),
        *workers_table(status.workers, heard, now),
    ]


def _troubles(status: Status) -> Iterator[tuple[str, str]]:
    if status.stopped is not None:
        yield "stopped by", _ending_sentence(status.stopped)
    restarts = status.restarts
    if earlier := restarts[:-NUM_RESTARTS]:
        times = sum(one.count for one in earlier)
        yield (
            "restarted",
            f"{len(earlier):,} others, {times:,} times in all: `rftstream logs {status.folder} --troubles`",
        )
    yield from (("restarted", one.to_text()) for one in restarts[-NUM_RESTARTS:])
    if status.standstill is not None:
        yield "stands still", status.standstill.to_text()
    yield from (("fails", one.to_text()) for one in status.failing)
    if (origin := status.origin) is not None:
        yield "made of", f"{origin.run}: {origin.how}"
        yield from (("changed", line) for line in origin.changed)
    folder = RunFolder(Path(status.folder))
    yield from (("changed", line) for line in read_changes(folder))
    if status.live:
        yield from (("edited", line) for line in edited_modules(folder))


def _training(status: Status, now: float) -> Iterator[tuple[str, str]]:
    history, reward = status.history, status.reward
    of = f" of {status.num_steps:,}" if status.num_steps else ""
    version = f"{history.version:,}{of}, trainer epoch {status.trainer_epoch}"
    if history.current is not None and history.current.recorded_at:
        version += f", recorded {duration(now - history.current.recorded_at)} ago"
    left = "" if (left_s := status.seconds_left) is None else f"some {duration(left_s)} left"
    yield "version", "; ".join(filter(None, (version, history.again, left)))
    if status.stage is not None:
        yield "stage", status.stage
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
    if status.operators is not None:
        yield from status.operators.status_rows()
    if status.growing is not None:
        yield from status.growing.status_rows()
    bound = ("up to ", f"; {undecided(status.groups)}") if any(status.lag.values()) else ("", "")
    yield "waiting", listed(status.lag, "on").join(bound)
    waits = status.state == "running" and not status.lag.get("batches")
    yield from (("speed", text) for text in status.history.speed_texts(now if waits else None))
    if status.lost:
        found = f"offsets {listed(status.lost, 'of')} were deleted, and not by the run"
        yield "lost", f"{found}: `rftstream topics list` shows settings"
    yield (
        "dead letters",
        (listed(status.dead_letters) or "none") + ("; all dead groups were put back" if status.all_put_back else ""),
    )
    yield from (("died of", f"{end.error} ({end.count:,} {end.reason})") for end in status.dead_errors)
    rest = sum(status.dead_letters.values()) - sum(end.count for end in status.dead_errors)
    if rest and status.dead_errors:
        yield "died of", f"something else ({rest:,}): `rftstream dead list RUN`"
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
