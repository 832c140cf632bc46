"""Runs of demonstrations alone: the same laws, with everything going wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rftstream.config import loader
from rftstream.config.sections import RunConfig
from rftstream.contracts.batches import Experience
from rftstream.contracts.versions import StepRecord
from rftstream.runs.writes.load_demonstrations import load_demonstrations
from rftstream.testing import Faults, Simulation
from tests.simulation.laws import Laws
from tests.simulation.seeds import seeds
from tests.simulation.test_simulation import EVERYTHING

pytestmark = pytest.mark.law("lost", "twice", "order", "conservation", "replay")


def write(folder: Path, count: int) -> Path:
    path = folder / "rows.jsonl"
    rows = [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(count)]
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return path


def alone(path: Path, **settings: Any) -> RunConfig:
    return loader.from_dict({
        "run": {"name": "alone"}, "model": {"path": "fake"},
        "experts": {"source": str(path), "per_batch": 4, "passes": 2, "held_out": 0.2, "held_out_every": 3, **settings},
        "trainer": {"algorithm": "sft", "backend": "fake", "checkpoint_every": 3, "shares": 2},
        "transport": {"partitions": 3},
    })  # fmt: skip


def play(folder: Path, config: RunConfig, seed: int, faults: Faults = Faults()) -> Laws:  # noqa: B008
    assert config.experts is not None
    simulation = Simulation(config, folder=folder, seed=seed, faults=faults)
    simulation.watch = laws = Laws(simulation)
    load_demonstrations(simulation.transport("user"), config, simulation.folder, config.experts, say=print)
    simulation.run()
    laws.check_end()
    return laws


@seeds(1, range(20))
def test_demonstrations_alone(tmp_path: Path, seed: int) -> None:
    """Two passes over 20 of 25, in fives of batches: ten steps, and the run ends by itself; what goes wrong changes
    neither batches nor weights."""
    config = alone(write(tmp_path, 25))
    calm = play(tmp_path / "calm", config, seed)
    laws = play(tmp_path / "much", config, seed, replace(EVERYTHING, joins=0))
    assert laws.finished is not None
    assert calm.finished is not None
    assert (laws.finished.reason, laws.version) == (calm.finished.reason, calm.version) == ("experts", 10)
    laws.compare(calm)
    ours, theirs = (one.simulation.messages("batches") for one in (laws, calm))
    assert [one for one in ours if isinstance(one, Experience)] == [
        one for one in theirs if isinstance(one, Experience)
    ]
    steps = [one for one in laws.simulation.messages("steps") if isinstance(one, StepRecord) and not one.resumed]
    looked = {one.name.version for one in steps if "held_out_loss" in one.metrics}
    assert looked == {3, 6, 9, 10}
    assert laws.simulation.audit().demonstrations is not None


def test_no_further_ahead_than_rollouts_would_be(tmp_path: Path) -> None:
    config = loader.replace(alone(write(tmp_path, 40), held_out=0.0), feeder__max_staleness=1)
    simulation = Simulation(config, folder=tmp_path, seed=1)
    assert config.experts is not None
    load_demonstrations(simulation.transport("user"), config, simulation.folder, config.experts, say=print)
    simulation.processes = [one for one in simulation.processes if one.role != "trainer"]
    simulation.run(max_ticks=2000, until=lambda: simulation.num_ticks > 400)
    assert {one.batch_sequence for one in simulation.messages("batches") if isinstance(one, Experience)} == {0, 1}
