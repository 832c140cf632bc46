"""The state of a run as `control` describes it: which processes hold the roles, and what the run should do."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import dataclass, field, replace

from rftstream.contracts.control import (
    Claim,
    DatasetExported,
    DesiredState,
    Drawn,
    Request,
    RequestKind,
    RunFinished,
    RunManifest,
    RunState,
    TasksEnded,
    Trimmed,
)
from rftstream.contracts.messages import Message
from rftstream.contracts.records import TopicPartition
from rftstream.contracts.versions import VersionName
from rftstream.service.reading import read_to_ends
from rftstream.service.records.in_force import RecordsInForce
from rftstream.service.role import Log
from rftstream.transport.base import Transport


@dataclass(slots=True)
class ControlView:
    """The newest message of each kind on `control`. A field is None if no such message was written or the message was
    withdrawn. `read_control` builds a view; a reader that follows `control` calls `absorb` for each record in order."""

    manifest: RunManifest | None = None
    """The description of the run."""
    finished: RunFinished | None = None
    """Why the run has finished, and with which version."""
    ended: TasksEnded | None = None
    """Why no more tasks will be made."""
    state: RunState | None = None
    """State that the run should be in."""
    trimmed: Trimmed | None = None
    """Newest record of deletions in the run; see `deleted`."""
    drawn: Drawn | None = None
    """Newest record of how far the feeder has drawn, in a run whose feeder writes such records."""
    claims: dict[str, Claim] = field(default_factory=dict)
    """The newest claim of each role."""
    retries: dict[bytes, Request] = field(default_factory=dict)
    """Unanswered requests to retry dead groups, by record key."""
    exports: tuple[DatasetExported, ...] = ()
    """Data sets that rollouts of the run were written to, oldest first."""

    @property
    def deleted(self) -> Trimmed:
        """The newest record of deletions in the run; an empty one if nothing was deleted."""
        return self.trimmed or Trimmed(name=VersionName(trainer_epoch=0, version=0), checkpoints=())

    @property
    def desired(self) -> DesiredState:
        """The state that the run should be in."""
        return DesiredState.running if self.state is None else self.state.state

    def absorb(self, key: bytes | None, message: Message | None) -> None:
        """Apply the next record of `control`. `message` is None for a tombstone."""
        match message:
            case RunManifest():
                self.manifest = message
            case RunFinished():
                self.finished = message
            case TasksEnded():
                self.ended = message
            case RunState():
                self.state = message
            case Trimmed():
                self.trimmed = message
            case Drawn():
                self.drawn = message
            case DatasetExported():
                others = (one for one in self.exports if one.export_id != message.export_id)
                self.exports = (*others, message)
            case Claim():
                known = self.claims.get(message.role)
                if known is None or message.epoch > known.epoch:
                    self.claims[message.role] = message
            case Request(kind=RequestKind.retry_dead):
                self.retries[key or b""] = message
            case None:
                self.retries.pop(key or b"", None)
                name = {b"finished": "finished", b"end": "ended", b"state": "state"}.get(key or b"")
                if name is not None:
                    setattr(self, name, None)
            case _:
                pass


def read_control(
    transport: Transport, *, settled: bool = False, until_s: float = math.inf, log: Log | None = None
) -> ControlView:
    """Read `control` to its end, or up to the log time `until_s`. `settled` is as for `Admin.end_offsets`. A `log` that
    is given knows the claims afterwards: it need not read `control` for these."""
    view, log = ControlView(), Log(transport) if log is None else log
    # A summary says nothing of an earlier time.
    records = log.control(settled=settled) if until_s == math.inf else log.read("control", settled=settled)
    for record, message in log.rule.messages(records):
        if record.timestamp_s <= until_s:
            view.absorb(record.key, message)
    return view


class ControlReader:
    """Reads `control`, and then only new records. Who looks at a run again and again makes one."""

    def __init__(self, transport: Transport) -> None:
        self._log = Log(transport)
        self._next: dict[TopicPartition, int] = {}
        self._view = ControlView()

    def read(self) -> ControlView:
        """Return the state now. It does not change with later calls."""
        ends = self._log.ends("control")
        records = self._log.read("control", start=self._next) if self._next else self._log.control()
        for record, message in self._log.rule.messages(records):
            self._view.absorb(record.key, message)
            self._next[record.place] = record.offset + 1
        self._next = {place: max(end, self._next.get(place, 0)) for place, end in ends.items()}
        return replace(self._view, claims=dict(self._view.claims), retries=dict(self._view.retries))


FIRST_RECORDS = 16
"""Records of `control` among which the manifest is looked for at a time: it is one of the first."""


def read_manifest(transport: Transport) -> RunManifest | None:
    """Return the run's manifest, or None before the run has begun. Only the beginning of `control` is read."""
    ends, rule = transport.admin.end_offsets("control"), RecordsInForce(transport)
    with closing(transport.reader(transport.admin.begin_offsets("control"))) as reader:
        for records in read_to_ends(transport, reader, ends, max_records=FIRST_RECORDS):
            for _, message in rule.messages(records):
                if isinstance(message, RunManifest):
                    return message
    return None
