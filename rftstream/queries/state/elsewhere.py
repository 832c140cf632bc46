"""Finds out, from a run's log, who may be at work on other hosts: who holds roles, who is heard, who wrote last."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rftstream.config.sections import RunConfig
from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.role_names import RoleName
from rftstream.contracts.topics import TOPICS
from rftstream.errors import TransportError
from rftstream.queries.formatting import duration, plural
from rftstream.queries.state.workers import expected_workers
from rftstream.runs.delete import is_claimant_alive, read_members
from rftstream.runs.folder import RunFolder, lies_in_folder, store_place
from rftstream.service.control_view import ControlView, read_control
from rftstream.service.reading import read_to_ends
from rftstream.transport.base import Transport

STILL_AFTER_S = 180.0
"""Seconds without a new record anywhere, or with a version that no explorer takes over, after which a standstill is
reported. Explorers save unfinished rollouts more often than this, which shows that they work."""

MOVING = ("control", "tasks", "partials", "rollouts", "verified", "batches", "outcomes", "weights", "steps", "evals")
"""Topics on which a moving run writes records."""
TAIL = 4
"""Offsets at the end of a partition that are searched for its newest record, since some may be gaps."""
AHEAD_S = 60.0
"""Seconds that a record may be ahead of this machine's clock."""
PATIENCE_S = 1.0
"""Seconds to wait for the tails of all partitions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """Workers that hold roles of the run and may be alive, without a supervisor here. `look_elsewhere` makes it."""

    hosts: tuple[str, ...]
    """Hosts that the workers named."""
    silent_s: float
    """Seconds since the run's newest record. Below 0, its writer's clock is ahead of this machine's."""
    holders: Mapping[str, str]
    """Single role -> the host that has it, where it is not known to be gone."""
    members: Mapping[str, Sequence[str]]
    """Role -> workers that share its work and whose heartbeats the log gets."""
    writes: bool = False
    """Whether records came while the log was looked at, though by their writers' clocks they are old."""

    @property
    def goes_on(self) -> bool:
        """Return whether there is a recent record, or a heartbeat."""
        return self.silent_s < STILL_AFTER_S or self.writes or bool(self.members)

    def to_text(self) -> str:
        """Return the hosts, the time of the newest record, and whose heartbeats come."""
        at_work = " and ".join(plural(len(names), role) for role, names in self.members.items())
        heard = f", the log hears {at_work}" if at_work else ""
        silent = f"newest record {duration(max(0.0, self.silent_s))} ago"
        if self.writes or self.silent_s < -AHEAD_S:
            where = "behind" if self.writes else "ahead of"
            silent = (
                f"records come {duration(abs(self.silent_s))} {where} this machine's clock: theirs or this is wrong"
            )
        return f"workers on {', '.join(self.hosts)} ({silent}{heard})"


def look_elsewhere(control: ControlView, transport: Transport, now: float) -> Elsewhere | None:
    """Return where workers may be alive; None if all holders of roles were on this host and are gone. TransportError if
    the log does not answer."""
    alive = {role: (claim.host, is_claimant_alive(claim)) for role, claim in control.claims.items() if claim.host}
    hosts = {host for host, is_alive in alive.values() if is_alive is not False}
    if not hosts:
        return None
    newest = max((record.timestamp_s for record in newest_records(transport).values()), default=0.0)
    silent_s, members = now - newest, hear_members(transport)
    return Elsewhere(
        hosts=tuple(sorted(hosts)),
        silent_s=silent_s,
        holders={role: host for role, (host, is_alive) in alive.items() if is_alive is not False},
        members=members,
        writes=silent_s >= STILL_AFTER_S and bool(members) and _gets_records(transport),
    )


def newest_signs(control: ControlView, transport: Transport) -> dict[str, float]:
    """Return single role -> time of the newest record that it wrote, for roles that workers on other hosts hold: there
    nobody can ask whether their process lives."""
    away = {role for role, claim in control.claims.items() if claim.host and is_claimant_alive(claim) is None}
    signs = {role: control.claims[role].claimed_at for role in away}
    for topic, record in newest_records(transport).items() if away else ():
        if (writer := TOPICS[topic].writer) in away:
            signs[writer] = max(signs[writer], record.timestamp_s)
    return signs


def at_work_elsewhere(transport: Transport, left_there: Collection[str] = ()) -> str:
    """Return which workers that hold single roles of a run, but for those `left_there`, are or were just now at work
    without a supervisor in this run folder; "" if there are none."""
    control = read_control(transport)
    me = socket.gethostname(), os.getpid()  # who made the run by importing records claimed its roles
    control.claims = {
        role: claim
        for role, claim in control.claims.items()
        if (claim.host, claim.pid) != me and role not in left_there
    }
    found = None if control.finished is not None else look_elsewhere(control, transport, time.time())
    return found.to_text() if found is not None and (found.silent_s < STILL_AFTER_S or found.writes) else ""


def held_elsewhere(config: RunConfig, transport: Transport) -> list[str]:
    """Return a line, for who resumes a run, if workers of roles that this machine starts are `at_work_elsewhere`; no
    line if there are none."""
    left_there = [role for role, count in expected_workers(config).items() if not count]
    if not (workers := at_work_elsewhere(transport, left_there)):
        return []
    return [
        f"roles of this run may be at work elsewhere: {workers}; they are taken over now. Stop the "
        "`run`, `resume` or `workers` there: it would take them back when this one ends, with its own settings"
    ]


def nobody_at_work(config: RunConfig, transport: Transport) -> list[str]:
    """Return a line, for who resumes a run, for each role whose workers this machine does not start and the log does
    not hear: those of other hosts left if the run had ended."""
    expected, heard = expected_workers(config), hear_members(transport)
    roles = () if config.without_tasks or config.run.imported_from else (RoleName.explorer, RoleName.verifier)
    return [
        f"no {role} is at work: this machine starts none ({role}.count = 0), and the log hears of none elsewhere; "
        f"they leave when a run ends, and `rftstream worker --role {role}` starts one"
        for role in roles
        if not expected[role] and not heard.get(role)
    ]


def reached_here_alone(config: RunConfig, folder: RunFolder) -> list[str]:
    """Return a line, for who makes a run without explorers of its own, if those of other hosts could not reach its
    weights."""
    awaited = not (config.without_tasks or config.run.imported_from or expected_workers(config)[RoleName.explorer])
    if lies_in_folder(config) or not awaited or folder.path not in Path(store_place(config, folder)).parents:
        return []
    return [
        f"weights.store: {config.weights.store!r} lies in the run folder, so only explorers that see this folder can "
        "join, and explorer.count = 0 starts none; for those of other hosts begin a run whose store all hosts reach"
    ]


def hear_members(transport: Transport) -> dict[str, list[str]]:
    """Return role -> workers that share its work and whose heartbeats the log gets, on every host; none if it may not
    be asked."""
    with suppress(TransportError):  # a reader may lack the right to ask
        return read_members(transport)
    return {}


def _gets_records(transport: Transport) -> bool:
    """Wait a moment for a new record, and return whether one came."""
    ends = [transport.admin.end_offsets(topic) for topic in MOVING]
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if [transport.admin.end_offsets(topic) for topic in MOVING] != ends:
            return True
        time.sleep(PATIENCE_S / 10)
    return False


def newest_records(transport: Transport) -> dict[str, Record]:
    """Return topic of MOVING -> its newest record without the body, if one is near the end of a partition."""
    newest: dict[str, Record] = {}
    for record in read_tails(transport, MOVING, TAIL):
        if record.topic not in newest or record.timestamp_s >= newest[record.topic].timestamp_s:
            newest[record.topic] = record
    return newest


def read_tails(transport: Transport, topics: Iterable[str], num: int) -> list[Record]:
    """Return the records at the last `num` offsets of each partition of some topics, without bodies. Only those that
    arrive within PATIENCE_S are returned."""
    positions: dict[TopicPartition, int] = {}
    ends: dict[TopicPartition, int] = {}
    for topic in topics:
        begins = transport.admin.begin_offsets(topic)
        for place, end in transport.admin.end_offsets(topic).items():
            if end > begins[place]:
                ends[place], positions[place] = end, max(begins[place], end - num)
    found: list[Record] = []
    reader = transport.reader(positions, bodies=False)
    deadline = time.monotonic() + PATIENCE_S
    try:
        for records in read_to_ends(transport, reader, ends):
            found += records
            if time.monotonic() >= deadline:
                break
    finally:
        reader.close()
    return found
