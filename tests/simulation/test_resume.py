"""The whole machine dies, again and again, and is started again: the run ends with the weights of one left alone."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from rftstream.config import loader
from rftstream.config.sections import RunConfig
from rftstream.testing import Simulation
from tests.simulation.laws import Laws
from tests.simulation.seeds import seeds

pytestmark = pytest.mark.law("lost", "twice", "order", "replay")


def make_config(seed: int) -> RunConfig:
    """One process of each role, strictly in turns, answers that depend on the task alone."""
    random = Random(f"resume {seed}")
    return loader.from_dict({
        "run": {"name": "simulated", "steps": 6, "seed": seed},
        "model": {"path": "fake"},
        "tasksets": {"sums": {"source": "arithmetic"}},
        "feeder": {"groups_per_batch": 3, "group_size": 3, "max_staleness": 0, "on_stale": "wait"},
        "explorer": {"count": 1, "policy": "fake"},
        "trainer": {"backend": "fake", "checkpoint_every": random.choice([1, 2, 4, 20]), "lr_schedule": "cosine"},
        "transport": {"partitions": random.randint(1, 4)},
        "policies": {"fake": {"answer_depends_on": "task", "tokens_per_s": 300.0, "mean_tokens": 6.0, "sigma": 1.0}},
    })  # fmt: skip


def run(folder: Path, seed: int, deaths: int) -> tuple[Simulation, Laws]:
    simulation = Simulation(make_config(seed), folder=folder, seed=seed)
    simulation.watch = laws = Laws(simulation)
    random = Random(f"deaths {seed}")
    for _ in range(deaths):
        ticks = simulation.num_ticks + random.randint(15, 90)
        simulation.run(until=lambda ticks=ticks: simulation.num_ticks >= ticks)  # type: ignore[misc]
        for process in simulation.processes:
            if process.service is not None:
                simulation.kill(process)
    simulation.run()
    laws.check_end()
    return simulation, laws


@seeds(1, range(20))
def test_killed_and_resumed_it_ends_with_the_same_final_digest(tmp_path: Path, seed: int) -> None:
    (_, calm), (killed, laws) = run(tmp_path / "calm", seed, 0), run(tmp_path / "killed", seed, 5)
    assert any("killed" in line for line in killed.story)
    assert calm.version == laws.version == 6
    assert laws.digests[6] == calm.digests[6]
    assert laws.digests == calm.digests
    assert laws.batches()[:6] == calm.batches()[:6]
