"""Tools for our tests and users': a driver for one role, a simulation of all roles in one process with a seeded
scheduler and a manual clock, and the conformance suite for transports.

    from rftstream.testing import Faults, Simulation

    simulation = Simulation(config, folder=tmp_path, seed=7, faults=Faults(kills=5))
    simulation.run()
    assert simulation.audit().fine
"""

from __future__ import annotations

from rftstream.testing.driver import RoleDriver
from rftstream.testing.faults import Faults
from rftstream.testing.memory_run import ManualClock, MemoryRun
from rftstream.testing.simulation import Simulation

__all__ = ["Faults", "ManualClock", "MemoryRun", "RoleDriver", "Simulation"]
