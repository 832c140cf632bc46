"""For tests, ours and users': a manual clock, all roles in one process under a seeded scheduler, and the suite that
every transport has to pass.

    from rftstream.testing import Simulation

    simulation = Simulation(config, folder=tmp_path, seed=7)
    simulation.run()
    assert simulation.audit().balanced
"""

from __future__ import annotations

from rftstream.testing.simulation import Kill, ManualClock, Simulation

__all__ = ["Kill", "ManualClock", "Simulation"]
