"""Whether a run goes on, and how its newest session ended."""

from __future__ import annotations

from rftstream.contracts.control import DesiredState
from rftstream.runs.ending import Ending, read_ending
from rftstream.runs.folder import RunFolder
from rftstream.service.control_view import ControlView


def state_of(control: ControlView, goes_on: bool) -> str:
    """Return running, paused, draining, finished, or stopped. `goes_on`: there is a supervisor here, or workers have
    written recently."""
    if control.finished is not None:
        return "finished"
    desired = control.desired
    return str(desired) if goes_on or desired is not DesiredState.running else "stopped"


def ending_of(control: ControlView, folder: RunFolder, goes_on: bool) -> Ending | None:
    """Return how the newest session ended; None if the run continues or is finished, or if there was no session
    here."""
    return None if goes_on or control.finished is not None else read_ending(folder)
