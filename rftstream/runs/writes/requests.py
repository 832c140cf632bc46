"""Writes a user's requests to `control`. The log is the only interface, so this works from any host."""

from __future__ import annotations

import getpass
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence

from rftstream.contracts import codec
from rftstream.contracts.control import DesiredState, Request, RequestKind, RunState
from rftstream.contracts.dead import DeadDropped
from rftstream.contracts.messages import Message
from rftstream.errors import ConfigError
from rftstream.runs.folder import OpenRun
from rftstream.runs.writes.additions import commit_once
from rftstream.service.control_view import read_control

NAMES_A_RECORD = 1000


def ask_state(run: OpenRun, state: DesiredState, *, reason: str = "", by: str | None = None) -> DesiredState:
    """Set the run's desired state and return the one before. ConfigError if the run is finished, or draining.

    `by`: who makes the request, if not the user of this process.
    """
    control = read_control(run.transport)
    before = control.state.state if control.state is not None else DesiredState.running
    if control.finished is not None:
        raise ConfigError(
            f"{run.folder.path}: the run is finished ({control.finished.reason}); "
            "`rftstream resume` with more steps goes on with it"
        )
    if before is DesiredState.draining and state is not DesiredState.draining:
        raise ConfigError(
            f"{run.folder.path}: the run is draining, which is not taken back; "
            "`rftstream resume` goes on with it once it has ended"
        )
    if before is not state:
        say(run, [RunState(state=state, by=by or user_here(), reason=reason, since=time.time())])
    return before


def retry_request(group: str, stored: Sequence[str | None], expires_at: float, *, by: str = "") -> Request:
    """Return the request to put a dead group back. `stored` holds, for each sibling, the place of a rollout that can be
    used again, or None."""
    arguments = {"group": group, "stored": list(stored)}
    return Request(
        request_id=f"retry/{group}", kind=RequestKind.retry_dead, arguments=arguments, expires_at=expires_at, by=by
    )


def ask_retries(
    run: OpenRun, groups: Mapping[str, Sequence[str | None]], *, within_s: float, by: str | None = None
) -> None:
    """Request that each group is put back. The requests expire after `within_s` seconds. `by`: as in `ask_state`."""
    expires_at, who = time.time() + within_s, by or user_here()
    say(run, [retry_request(group, stored, expires_at, by=who) for group, stored in groups.items()])


def drop_dead(run: OpenRun, letters: Sequence[str], groups: Sequence[str], *, reason: str) -> None:
    """Remove dead letters and dead groups from the list. Nothing is deleted."""
    now, by = time.time(), user_here()

    def dropped(chosen: slice) -> DeadDropped:
        names = {"letters": tuple(letters[chosen]), "groups": tuple(groups[chosen])}
        return DeadDropped(**names, by=by, reason=reason, dropped_at=now)

    starts = range(0, max(len(letters), len(groups)), NAMES_A_RECORD)
    say(run, [dropped(slice(start, start + NAMES_A_RECORD)) for start in starts])


def say(run: OpenRun, messages: Iterable[Message]) -> None:
    """Write the messages to `control`, in one transaction."""
    records = (codec.to_record(message, "control", 0, run=run.run_id) for message in messages)
    commit_once(run.transport, f"{run.run_id}.user.{socket.gethostname()}.{os.getpid()}", records)


def user_here() -> str:
    """Return the user of this process, with the host."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):  # a uid without a name, as in containers
        return f"{os.getuid()}@{socket.gethostname()}"
