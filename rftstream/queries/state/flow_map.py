"""The flow of a run as a map: roles with their claims, and the topics between them with waiting records.

It also lists a run's problems, the worst first, as sentences with advice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rftstream.contracts.control import Claim
from rftstream.contracts.role_names import RoleName
from rftstream.queries.audits.balance import STAGES
from rftstream.queries.audits.group_counts import filtered_rows
from rftstream.queries.catalog.counts import CatalogCounts, TopicRate
from rftstream.queries.curves.history import History
from rftstream.queries.formatting import duration, plural
from rftstream.queries.state.status import Status
from rftstream.queries.state.workers import HEALTH_TIMEOUT_S, WorkerStatus, worker_sentence
from rftstream.service.control_view import ControlView

FLOW = (
    (RoleName.feeder, "tasks"),
    (RoleName.explorer, "rollouts"),
    (RoleName.verifier, "verified"),
    (RoleName.buffer, "batches"),
    (RoleName.trainer, "weights"),
)
"""Each role, with the topic that it writes for the next role."""
MANY_RESTARTS = 3
"""Number of deaths of a process from which they are a problem: one restart is as it should be."""
STILL_S = 600.0
"""Seconds without a step after which a run that should move is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowRole:
    """A role on the map."""

    name: str
    claim: Claim | None
    """Claim in force; None for roles of many workers."""
    workers: tuple[tuple[str, str, bool], ...]
    """Workers on this machine: process, current work, and whether they answer."""
    writes: str
    """The topic that the role writes for the next one."""
    waiting: int | None
    """Records that wait on that topic for the next role; on `batches`, batches. None: nothing waits there."""
    rate: TopicRate | None
    """Rate at which the topic grows."""
    note: str = ""


def flow_of(
    counts: CatalogCounts,
    history: History,
    control: ControlView | None,
    rates: Mapping[str, TopicRate],
    workers: Sequence[WorkerStatus],
    *,
    now: float,
) -> tuple[FlowRole, ...]:
    """Return the map. What waits is counted by rollouts, as `audit` counts them: offsets that are not committed yet
    hold finished ones, too."""
    stages = counts.rollouts.pending_by_stage
    waiting = {
        "tasks": stages[STAGES[0]],
        "rollouts": stages[STAGES[1]],
        "verified": stages[STAGES[2]],
        "batches": max(0, counts.newest_batch + 1 - history.version),
    }
    claims = {} if control is None else control.claims
    return tuple(
        FlowRole(
            name=str(role),
            claim=claims.get(role),
            workers=_workers(role, workers, now),
            writes=topic,
            waiting=waiting.get(topic),
            rate=rates.get(topic),
            note=f"version {history.version:,}" if role == RoleName.trainer else "",
        )
        for role, topic in FLOW
    )


def _workers(role: str, workers: Sequence[WorkerStatus], now: float) -> tuple[tuple[str, str, bool], ...]:
    own = [worker for worker in workers if worker.process.rpartition("-")[0] == role or worker.process == role]
    return tuple((one.process, worker_sentence(one, now), one.health is not None) for one in own)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """A problem of a run. `what_is_wrong` makes it."""

    title: str
    text: str
    severe: bool
    page: str = ""
    """The page with more about it: the last part of its address."""


def what_is_wrong(status: Status | None, *, now: float) -> tuple[Trouble, ...]:
    """Return the problems of a run, the worst first; none if all is well."""
    if status is None:
        return ()
    found: list[Trouble] = []
    if status.stopped is not None and status.state == "stopped":
        text = status.stopped.sentence(300)
        text += f"; `rftstream resume {status.folder}` goes on"
        found.append(Trouble(title="stopped", text=text, severe=status.stopped.by not in ("SIGINT", "SIGTERM")))
    finished = status.control.finished
    if finished is not None and finished.exit_code:
        found.append(Trouble(title="ended early", text=finished.reason, severe=True))
    if status.standstill is not None:
        found.append(Trouble(title="stands still", text=status.standstill.to_text(), severe=True))
    for one in status.failing:
        found.append(Trouble(title=f"rollouts of {one.taskset} fail", text=one.to_text(), severe=True, page="groups"))
    silent = [worker.process for worker in status.workers if worker.asked and worker.health is None]
    if silent and status.live:
        found.append(
            Trouble(
                title="no answer",
                text=f"{', '.join(silent)}: no answer on /health within {HEALTH_TIMEOUT_S:g} s",
                severe=True,
            )
        )
    if status.no_signal is not None:
        text = f"for {plural(status.no_signal.steps, 'step')}: {status.no_signal.cause}"
        found.append(Trouble(title="no learning signal", text=text, severe=True, page="groups"))
    for sign in (*status.training_signs, *status.reward_signs):
        title = f"{sign.kind}: {sign.subject}" if sign.subject else sign.kind
        found.append(Trouble(title=title, text=sign.text, severe=False, page="charts"))
    if (row := dict(filtered_rows(status.groups, status.filtered))).get("look at"):
        text = f"{row['filtered']}; {row['look at']}"
        found.append(Trouble(title="much is filtered", text=text, severe=False, page="groups"))
    if (letters := sum(status.dead_letters.values())) and not status.all_put_back:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in status.dead_letters.items())
        error = f"; most of them: {status.dead_errors[0].error}" if status.dead_errors else ""
        found.append(Trouble(title=plural(letters, "dead letter"), text=reasons + error, severe=False, page="dead"))
    if often := [one.to_text() for one in status.restarts if one.count >= MANY_RESTARTS]:
        text = f"{'; '.join(often)}: `rftstream logs {status.folder} --troubles` has all"
        found.append(Trouble(title="restarted", text=text, severe=False))
    current = status.history.current
    if status.state == "running" and current is not None and current.recorded_at:
        since = now - current.recorded_at
        if since > STILL_S and status.standstill is None:
            found.append(Trouble(title="no step", text=f"the last one was {duration(since)} ago", severe=False))
    return tuple(sorted(found, key=lambda one: not one.severe))
