"""The processes of a simulated run."""

from __future__ import annotations

from dataclasses import dataclass

from rftstream.service.service import Service


@dataclass(slots=True)
class SimulatedProcess:
    """One process of a simulation. `Simulation.add` makes it, and `Simulation` alone changes it."""

    name: str
    role: str
    service: Service | None = None
    wake_at: float = 0.0
    """Earliest time of the next tick, or of the start if the process is not running."""
    paused_until: float = 0.0
    held: bool = False
    """Whether the process is halted in the middle of a step."""
    leave_by: float | None = None
    """Time at which the process is killed, if it was told to leave."""
    starts: int = 0
    exit_code: int | None = None
    """Exit code, once the process has ended for good."""
