"""The state of a run as `control` describes it: which processes hold the roles, and what the run should do."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rftstream.contracts.control import (
    Claim,
    DesiredState,
    Request,
    RequestKind,
    RunFinished,
    RunManifest,
    RunState,
    TasksEnded,
    Trimmed,
)
from rftstream.contracts.messages import Message
from rftstream.contracts.versions import VersionName
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
    claims: dict[str, Claim] = field(default_factory=dict)
    """The newest claim of each role."""
    retries: dict[bytes, Request] = field(default_factory=dict)
    """Unanswered requests to retry dead groups, by record key."""

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
    """Read `control` from its beginning to its end, or up to the log time `until_s`. `settled` is as for
    `Admin.end_offsets`. A `log` that is given knows the claims afterwards: it need not read `control` for these."""
    view, log = ControlView(), Log(transport) if log is None else log
    for record, message in log.rule.messages(log.read("control", settled=settled)):
        if record.timestamp_s <= until_s:
            view.absorb(record.key, message)
    return view
