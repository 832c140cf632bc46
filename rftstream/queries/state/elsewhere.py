"""Whether a run that no `run` or `resume` supervises here goes on all the same: by workers that a scheduler, containers
or somebody's shell started. The log tells it, since all of them write there."""

from __future__ import annotations

from dataclasses import dataclass

from rftstream.queries.formatting import duration
from rftstream.queries.state.standstill import STILL_AFTER_S, newest_records
from rftstream.runs.delete import is_claimant_alive
from rftstream.service.control_view import ControlView
from rftstream.transport.base import Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """Workers that hold roles of the run and may be alive. `look_elsewhere` makes it."""

    hosts: tuple[str, ...]
    """Where they said that they run."""
    silent_s: float
    """Seconds since the newest record of the run was written."""

    @property
    def goes_on(self) -> bool:
        """Return whether somebody has written lately."""
        return self.silent_s < STILL_AFTER_S

    def to_text(self) -> str:
        """Return who they are, and when something was written last."""
        return f"workers on {', '.join(self.hosts)} (newest record {duration(self.silent_s)} ago)"


def look_elsewhere(control: ControlView, transport: Transport, now: float) -> Elsewhere | None:
    """Return where workers may be alive; None if all that hold a role were on this host and are gone. TransportError if
    the log does not answer."""
    hosts = {claim.host for claim in control.claims.values() if claim.host and is_claimant_alive(claim) is not False}
    if not hosts:
        return None
    newest = max((record.timestamp_s for record in newest_records(transport).values()), default=0.0)
    return Elsewhere(hosts=tuple(sorted(hosts)), silent_s=max(0.0, now - newest))
