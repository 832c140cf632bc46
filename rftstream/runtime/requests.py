"""What a user asks of a run, through `control`: the log is the only way in, so it works from any host."""

from __future__ import annotations

import getpass
import os
import socket
import time

from rftstream import codec
from rftstream.errors import ConfigError
from rftstream.messages import DesiredState, RunState
from rftstream.runtime.observer import read_control
from rftstream.runtime.runs import OpenRun


def ask_state(run: OpenRun, state: DesiredState, *, reason: str = "") -> DesiredState:
    """Sets the run's desired state; returns the one before. ConfigError if there is nothing to be asked of it."""
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
        message = RunState(state=state, by=_who(), reason=reason, since=time.time())
        producer = run.transport.producer(f"{run.run_id}.user.{socket.gethostname()}.{os.getpid()}")
        producer.start()
        producer.commit([codec.to_record(message, "control", 0, run=run.run_id)])
        producer.close()
    return before


def _who() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except OSError:  # a uid without a name, as containers have them
        return f"{os.getuid()}@{socket.gethostname()}"
