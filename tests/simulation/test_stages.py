"""Runs in stages: the same laws, whatever goes wrong, and where one stage ends and another begins."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rftstream.config import loader
from rftstream.config.sections import RunConfig
from rftstream.contracts.batches import BatchManifest, Experience, LossKind
from rftstream.contracts.tasks import Task
from rftstream.contracts.versions import StepRecord
from rftstream.runs.writes.load_demonstrations import load_demonstrations
from rftstream.testing import Faults, Simulation
from tests.simulation.laws import Laws
from tests.simulation.seeds import seeds
from tests.simulation.staged import PAIRS
from tests.simulation.test_simulation import EVERYTHING

STAGES = [{"steps": 3, "algorithm": "sft"}, {"steps": 4, "lr": 0.5}, {"steps": 3, "algorithm": PAIRS},
          {"steps": 3, "algorithm": "mix", "experts_ratio": 0.5}, {"steps": 2, "algorithm": PAIRS}]  # fmt: skip


def make_config(folder: Path, stages: Any = STAGES, **settings: Any) -> RunConfig:
    """Answers depend on the task alone."""
    folder.mkdir(exist_ok=True)
    rows: dict[str, list[dict[str, str]]] = {
        "chats": [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(9)],
        "pairs": [{"prompt": f"{n}+2=", "chosen": str(n + 2), "rejected": "0"} for n in range(7)],
    }
    for name, some in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in some), encoding="utf-8")
    config = loader.from_dict({
        "run": {"name": "staged"}, "model": {"path": "fake"}, "tasksets": {"sums": {"source": "arithmetic"}},
        "experts": {"source": ["chats.jsonl", "pairs.jsonl"], "per_batch": 4, "held_out": 0.2},
        "feeder": {"groups_per_batch": 2, "group_size": 2, "max_staleness": 2},
        "explorer": {"count": 2, "policy": "fake"}, "verifier": {"count": 1},
        "trainer": {"backend": "fake", "checkpoint_every": 3, "shares": 2}, "stages": stages,
        "transport": {"partitions": 3}, "policies": {"fake": {"answer_depends_on": "task"}}, "base": str(folder),
    })  # fmt: skip
    return loader.replace(config, **settings)


def begin(config: RunConfig, folder: Path, seed: int = 1, faults: Faults = Faults()) -> tuple[Simulation, Laws]:  # noqa: B008
    simulation = Simulation(config, folder=folder, seed=seed, faults=faults)
    simulation.watch = laws = Laws(simulation)
    if config.experts is not None:
        load_demonstrations(simulation.transport("user"), config, simulation.folder, config.experts, say=print)
    return simulation, laws


def play(config: RunConfig, folder: Path, seed: int = 1, faults: Faults = Faults(), deaths: int = 0) -> Laws:  # noqa: B008
    """`deaths`: so often the whole machine dies."""
    simulation, laws = begin(config, folder, seed, faults)
    random = Random(f"deaths {seed}")
    for _ in range(deaths):
        ticks = simulation.num_ticks + random.randint(15, 60)
        simulation.run(until=lambda ticks=ticks: simulation.num_ticks >= ticks)  # type: ignore[misc]
        for process in simulation.processes:
            if process.service is not None:
                simulation.kill(process)
    simulation.run()
    laws.check_end()
    return laws


def test_each_batch_is_made_of_what_its_stage_takes(tmp_path: Path) -> None:
    laws = play(make_config(tmp_path), tmp_path)
    assert laws.finished is not None
    assert (laws.finished.reason, laws.version, len(laws.admitted)) == ("steps", 15, 14)
    kinds: dict[int, set[LossKind]] = {batch: set() for batch in range(15)}
    for one in laws.simulation.messages("batches"):
        if isinstance(one, Experience):
            kinds[one.batch_sequence].add(one.loss_kind)
    sft, rl, pairs = {LossKind.sft}, {LossKind.rl}, {LossKind.dpo}
    assert list(kinds.values()) == [sft] * 3 + [rl] * 4 + [pairs] * 3 + [sft | rl] * 3 + [pairs] * 2
    steps = [one for one in laws.simulation.messages("steps") if isinstance(one, StepRecord) and not one.resumed]
    assert [one.metrics["stage"] for one in steps] == [1.0] * 3 + [2.0] * 4 + [3.0] * 3 + [4.0] * 3 + [5.0] * 2
    assert [one.metrics["lr"] for one in steps[2:5]] == [1e-6, 0.5, 0.5]
    looked = [one.name.version for one in steps if "held_out_loss" in one.metrics]
    assert looked == [3, 10, 13, 15], "at the end of each stage that has a measure for them"
    tasks = [one for one in laws.simulation.messages("tasks") if isinstance(one, Task) and one.ids.sibling == 0]
    assert sorted(one.ids.min_version for one in tasks) == [1, 1, 2, 2, 3, 3, 4, 4, 8, 8, 9, 9, 10, 10]
    manifests = [one for one in laws.simulation.messages("batches") if isinstance(one, BatchManifest)]
    assert {one.batch_sequence for one in manifests if "reward" in one.metrics} == {3, 4, 5, 6, 10, 11, 12}
    assert not any(one.last for one in manifests)


@pytest.mark.law("lost", "twice", "order", "conservation", "replay")
@seeds(1, range(20))
def test_whatever_goes_wrong_changes_neither_batches_nor_weights(tmp_path: Path, seed: int) -> None:
    config = make_config(tmp_path)
    calm = play(config, tmp_path / "calm", seed)
    much = play(config, tmp_path / "much", seed, replace(EVERYTHING, power_losses=1))
    died = play(config, tmp_path / "died", seed, deaths=5)
    for laws in (much, died):
        laws.compare(calm)
        assert laws.digests == calm.digests
    assert sum("kill" in line for line in died.simulation.story) > 1


def test_without_tasksets_nobody_samples(tmp_path: Path) -> None:
    config = make_config(tmp_path, [STAGES[0], STAGES[2]], tasksets={})
    laws = play(config, tmp_path)
    assert {one.role for one in laws.simulation.processes} == {"feeder", "buffer", "trainer"}
    assert laws.finished is not None
    assert (laws.finished.reason, laws.version) == ("steps", 6)
    many = play(config, tmp_path / "many", 2, replace(EVERYTHING, joins=0))
    assert many.digests == laws.digests


@pytest.mark.law("staleness")
def test_no_further_ahead_than_rollouts_would_be(tmp_path: Path) -> None:
    simulation, _ = begin(make_config(tmp_path), tmp_path)
    simulation.processes = [one for one in simulation.processes if one.role != "trainer"]
    simulation.run(max_ticks=2000, until=lambda: simulation.num_ticks > 300)
    assert {one.batch_sequence for one in simulation.messages("batches") if isinstance(one, BatchManifest)} == {0, 1, 2}
    assert not simulation.records("tasks"), "those of version 3 may not be sampled before version 1"


@pytest.mark.law("lost", "conservation")
@pytest.mark.parametrize("version", [1, 5, 8])
def test_drained_in_any_stage_nothing_is_lost(tmp_path: Path, version: int) -> None:
    """In a stage of rollouts by a last batch, else at once; the groups of a later stage stay pending."""
    from rftstream.contracts.control import DesiredState

    simulation, laws = begin(make_config(tmp_path), tmp_path, seed=version)
    simulation.run(until=lambda: laws.version >= version)
    simulation.ask(DesiredState.draining)
    simulation.run()
    laws.check_end()
    assert laws.finished is not None
    assert laws.finished.reason == "drained"
    assert version <= laws.version < 15


def test_tasks_that_end_too_early_end_the_run(tmp_path: Path) -> None:
    tasksets = {"sums": {"source": "arithmetic", "options": {"size": 5}, "passes": 1}}
    laws = play(make_config(tmp_path, tasksets=tasksets), tmp_path)
    assert laws.finished is not None
    assert (laws.finished.reason, laws.version) == ("taskset", 6)
    assert [len(one) for one in laws.batches()[:6]] == [0, 0, 0, 2, 2, 1]
