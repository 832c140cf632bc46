"""Detects whether a run stands still, and what it waits for, from its log and its workers on this machine.

`look_at_movement` collects the facts, and `find_standstill` judges them. The progress line and `status` show the same
judgement.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rftstream.config.sections import RunConfig
from rftstream.contracts.records import Record
from rftstream.contracts.role_names import RoleName
from rftstream.contracts.rollouts import Rollout, RolloutStatus
from rftstream.contracts.versions import StepRecord
from rftstream.queries.decoding import message_at
from rftstream.queries.plain import Report
from rftstream.queries.state.elsewhere import STILL_AFTER_S, Elsewhere, hear_members, newest_records, read_tails
from rftstream.queries.state.workers import WorkerStatus, expected_workers
from rftstream.queries.traces.lineage import header
from rftstream.roles import role_spec
from rftstream.roles.synthesiser import SYNTHESISER
from rftstream.runs.folder import consumer_groups
from rftstream.service.role_spec import RoleKind
from rftstream.transport.base import Transport

READERS = {
    "batches": RoleName.trainer,
    "tasks": RoleName.explorer,
    "rollouts": RoleName.verifier,
    "verified": RoleName.buffer,
}
"""Topic -> the role that reads it. The order is that in which waiting is reported."""
WAITING = {
    "batches": ("batch", "batches"),
    "tasks": ("task", "tasks"),
    "rollouts": ("rollout", "rollouts"),
    "verified": ("verified rollout", "verified rollouts"),
}
"""Topic -> words for one and for several waiting records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Movement:
    """All facts that the judgement depends on. `look_at_movement` makes it, and `find_standstill` judges it."""

    now: float
    moved_at: float | None
    """Time of the newest record. None: not looked up, or there is none."""
    waiting: Mapping[str, int]
    """Topic of READERS -> number of waiting records."""
    alive: Mapping[str, int]
    """Role -> its workers that answer, or whose heartbeats the log gets."""
    stuck: tuple[str, ...] = ()
    """Workers whose answer says that their loop is stuck."""
    failing: Mapping[str, str] = field(default_factory=dict)
    """Worker -> the temporary failure after which it tries again."""
    silent: tuple[str, ...] = ()
    """Workers here that have a port and do not answer."""
    expected: Mapping[str, int]
    """Role -> number of workers that `run` starts."""
    published: Sequence[tuple[int, float]] = ()
    """The trainer's published versions with their times, oldest first."""
    taken: int | None = None
    """The newest version of an explorer on this machine; None if no explorer reports one."""
    hosts: Mapping[str, str] = field(default_factory=dict)
    """Single role -> the host that has it, whose worker may be alive and does not answer here."""
    sampled: int | None = None
    """The newest version that sampled a token of the newest rollout. None: not looked up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standstill(Report):
    """A part of the run that stands still, and why."""

    JSON = "* text=to_text"

    still_s: float | None
    """Seconds without any new record; None if there was one."""
    waits_for: tuple[str, ...]
    """Things that the run waits for, as half sentences; empty if there are new records."""
    published: int | None = None
    """The trainer's newest version, if no explorer takes over its versions."""
    taken: int | None = None
    """The version that explorers have instead."""
    behind_s: float | None = None
    """Seconds since a newer version was published."""

    def to_text(self) -> str:
        """Return the standstill as text for people."""
        parts = []
        if self.still_s is not None:
            parts.append(f"nothing has moved for {_minutes(self.still_s)}: {'; '.join(self.waits_for)}")
        if self.behind_s is not None:
            parts.append(
                f"the trainer has published version {self.published:,}, explorers are at {self.taken:,} for "
                f"{_minutes(self.behind_s)} since there is a newer one"
            )
        return "; ".join(parts)


def find_standstill(movement: Movement) -> Standstill | None:
    """Return the standstill of a run that is neither paused nor ended; None if everything moves. Pure."""
    still_s = None if movement.moved_at is None else movement.now - movement.moved_at
    if still_s is not None and still_s < STILL_AFTER_S:
        still_s = None
    taken = movement.taken
    if taken is None and still_s is not None and movement.waiting.get("tasks"):
        taken = movement.sampled
    behind_s = _behind_s(movement, taken)
    if still_s is None and behind_s is None:
        return None
    return Standstill(
        still_s=still_s,
        waits_for=() if still_s is None else tuple(_waits_for(movement)),
        published=movement.published[-1][0] if behind_s is not None else None,
        taken=taken if behind_s is not None else None,
        behind_s=behind_s,
    )


def _behind_s(movement: Movement, taken: int | None) -> float | None:
    """Return the seconds since a newer version than the explorers' exists, if that is too long."""
    if taken is None:
        return None
    since = next((at for version, at in movement.published if version > taken), None)
    behind_s = None if since is None else movement.now - since
    return behind_s if behind_s is not None and behind_s >= STILL_AFTER_S else None


def _waits_for(movement: Movement) -> Iterable[str]:
    if movement.failing:  # what else waits then waits for that
        text = next(iter(movement.failing.values()))
        yield f"{', '.join(movement.failing)} {'tries' if len(movement.failing) == 1 else 'try'} again: {text}"
        return
    named: set[str] = set()
    role: str
    for topic, role in READERS.items():
        count = movement.waiting.get(topic, 0)
        if not count or (topic == "verified" and named):  # siblings that wait for others in an earlier stage
            continue
        named.add(role)
        one, several = WAITING[topic]
        waits = f"1 {one} waits" if count == 1 else f"{count:,} {several} wait"
        article = "the" if role_spec(role).kind is RoleKind.single else _article(role)
        yield f"{waits} for {article} {role}{_who(movement, role)}"
    if not named:
        named.add(RoleName.feeder)
        yield f"nothing waits on any topic, the feeder admits no task{_who(movement, RoleName.feeder)}"
    for role, count in movement.expected.items():
        if count and role not in named and not movement.alive.get(role) and role not in movement.hosts:
            yield f"no {role} is alive"
    if movement.stuck:
        yield (
            f"{', '.join(movement.stuck)} is stuck"
            if len(movement.stuck) == 1
            else (f"{', '.join(movement.stuck)} are stuck")
        )


def _who(movement: Movement, role: str) -> str:
    """Return how many workers of the role could do the work, or how to start one."""
    if alive := movement.alive.get(role, 0):
        return f" ({alive:,} alive)"
    if role in movement.hosts:
        return (
            f" on {movement.hosts[role]}, which is not asked from here (if it is lost, "
            f"`rftstream worker --role {role}` takes the role over)"
        )
    if movement.expected.get(role, 0):
        if there := [name for name in movement.silent if name.startswith(f"{role}-")]:
            return f", and {there[0]} does not answer: it hangs or is stopped; `run` starts another after `kill -9`"
        return f", and no {role} is alive"
    return f", and `run` starts none: `rftstream worker --role {role}` does"


def _article(role: str) -> str:
    return "an" if role[0] in "aeiou" else "a"


def _minutes(seconds: float) -> str:
    minutes = int(seconds // 60)
    if minutes >= 60:
        return f"{minutes // 60:,} h {minutes % 60:02d} min"
    return f"{minutes} min"


# ------------------------------------------------------------------------------------------------ looking


def waiting_records(config: RunConfig, transport: Transport) -> dict[str, int]:
    """Return topic -> records that its readers have not read yet."""
    return {
        topic: sum(transport.admin.lag(group, topic).values())
        for group, topics in consumer_groups(config).items()
        if group != SYNTHESISER.name  # it reads beside the flow, and nothing waits for it
        for topic in topics
        if topic not in ("steps", "outcomes")
    }


def look_at_movement(
    config: RunConfig,
    transport: Transport,
    *,
    steps: Sequence[StepRecord],
    lag: Mapping[str, int],
    workers: Sequence[WorkerStatus],
    now: float,
    began_at: float | None = None,
    elsewhere: Elsewhere | None = None,
) -> Movement:
    """Collect the facts for `find_standstill`. `steps`: the newest in force, by version; `lag`: topic -> records that
    wait to be read; `began_at`: the start of the time that is judged. TransportError if the log does not answer.

    The newest records are read only if the newest step is old.
    """
    answering = [(worker, worker.health) for worker in workers if worker.health is not None]
    alive = Counter(str(health.get("role")) for _, health in answering if health.get("ok", True))
    if elsewhere is not None:
        alive |= Counter({role: len(names) for role, names in elsewhere.members.items()})
    versions = [
        health["version"]
        for _, health in answering
        if health.get("role") == RoleName.explorer and isinstance(health.get("version"), int)
    ]
    moved = [step.recorded_at for step in steps[-1:]] + ([began_at] if began_at is not None else [])
    moved += [now] if elsewhere is not None and elsewhere.writes else []
    waiting = {topic: lag.get(topic, 0) for topic in READERS}
    sampled = None
    if now - max(moved, default=-math.inf) >= STILL_AFTER_S:
        newest = newest_records(transport)
        moved += [record.timestamp_s for record in newest.values()]
        for role, names in ({} if elsewhere is not None else hear_members(transport)).items():
            asked = {worker.process for worker in workers}
            alive[role] += sum(name.partition(" at ")[0] not in asked for name in names)
        batch = newest["batches"].number("batch_sequence") if "batches" in newest else None
        if batch is not None:
            waiting["batches"] = max(0, batch + 1 - (steps[-1].name.version if steps else 0))
        if not versions and (rollout := newest.get("rollouts")) is not None:
            sampled = _sampled_by(transport, rollout)
    return Movement(
        now=now,
        moved_at=max(moved, default=None),
        waiting=waiting,
        alive=alive,
        stuck=tuple(worker.process for worker, health in answering if not health.get("ok", True)),
        failing={worker.process: str(health["failure"]) for worker, health in answering if health.get("failure")},
        silent=tuple(
            worker.process
            for worker in workers
            if worker.port and worker.asked and not (worker.reachable or worker.gone)
        ),
        expected=expected_workers(config),
        published=[(step.name.version, max(step.recorded_at, began_at or 0.0)) for step in steps if step.announced],
        taken=max(versions, default=None),
        hosts={worker.role: worker.held_at for worker in workers if worker.held_at}
        if elsewhere is None
        else elsewhere.holders,
        sampled=sampled,
    )


def _sampled_by(transport: Transport, newest: Record) -> int | None:
    """Return the newest version that sampled a token of this rollout."""
    rollout = message_at(transport, newest.place, newest.offset, Rollout)
    segments = () if rollout is None else rollout.segments
    return max((span.version for segment in segments for span in segment.versions if span.count), default=None)


# --------------------- tasksets whose newest rollouts fail: an environment, agent or policy that fails each time


NEWEST = 64
"""Most rollouts that are checked, over all tasksets."""
LEAST = 4
"""Fewest rollouts of a taskset for a report."""
SHARE = 0.5
"""Share of failed rollouts from which on they are reported."""
ERROR_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class FailingTaskset(Report):
    """A taskset with many failing rollouts. `find_failing` makes it."""

    taskset: str
    num_failed: int
    num_seen: int
    """Number of newest rollouts over which the share is measured."""
    error: str
    """Error of the newest failed rollout."""

    def to_text(self) -> str:
        """Return the failure as text for people."""
        return f"{self.num_failed} of the newest {self.num_seen} rollouts of {self.taskset} failed: {self.error}"


def find_failing(transport: Transport) -> tuple[FailingTaskset, ...]:
    """Return the tasksets whose newest rollouts fail. TransportError if the log does not answer."""
    num_partitions = len(transport.admin.end_offsets("rollouts"))
    newest = sorted(
        read_tails(transport, ("rollouts",), -(-2 * NEWEST // max(1, num_partitions))),
        key=lambda record: -record.timestamp_s,
    )
    seen: dict[str, list[Record]] = defaultdict(list)
    for record in [one for one in newest if header(one, "status") != RolloutStatus.skipped][:NEWEST]:
        seen[header(record, "taskset") or ""].append(record)
    found = []
    for taskset, records in sorted(seen.items()):
        failed = [record for record in records if header(record, "status") == RolloutStatus.failed]
        if len(records) >= LEAST and len(failed) >= SHARE * len(records):
            error = _error(transport, failed[0])
            found.append(FailingTaskset(taskset=taskset, num_failed=len(failed), num_seen=len(records), error=error))
    return tuple(found)


def _error(transport: Transport, failed: Record) -> str:
    rollout = message_at(transport, failed.place, failed.offset, Rollout)
    error = None if rollout is None else rollout.error
    return (error or "without an error")[:ERROR_CHARACTERS]
