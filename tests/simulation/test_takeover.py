"""A second process of a single role, which is slow between its producer's start and its claim: it wins all the same."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from rftstream.contracts.control import DesiredState
from rftstream.testing import Simulation
from tests.simulation.laws import Laws
from tests.simulation.seeds import seeds
from tests.simulation.test_simulation import make_config

SLOW_S = 12.0
"""Most seconds from the start of a newcomer's producer to its claim. The process that it replaces commits meanwhile."""


@pytest.mark.law("fencing", "twice")
@pytest.mark.parametrize("role", ["feeder", "buffer", "trainer", "evaluator"])
@seeds(1, range(40))
def test_the_newcomer_wins_however_slow_it_is(tmp_path: Path, seed: int, role: str) -> None:
    held_out = {"source": "arithmetic", "options": {"size": 4}, "every": 1}
    config = make_config(run__steps=1000, evaluations={"held-out": held_out}, policies={"fake": {"tokens_per_s": 20.0}})
    simulation = Simulation(config, folder=tmp_path, seed=seed, tick_s=0.05)
    simulation.watch = laws = Laws(simulation)
    simulation.run(until=lambda: laws.version >= 4)
    old, newcomer = simulation.find(f"{role}-0"), simulation.add(role)
    random, faults, starts = Random(f"slow {seed}"), simulation.faults, 0

    def be_slow(point: str, process: str) -> None:
        nonlocal starts
        faults.at_producer(point, process)
        if point == "after_start" and process == newcomer.name and old.exit_code is None:
            starts += 1
            faults._hold(newcomer, SLOW_S * random.random(), point)

    simulation.log.fault = be_slow
    simulation.run(until=lambda: old.exit_code is not None or newcomer.exit_code is not None)
    simulation.ask(DesiredState.draining)
    simulation.run()
    laws.check_end()
    assert (old.exit_code, newcomer.exit_code) == (5, 0), simulation.to_text()
    assert starts <= 12, simulation.to_text()
