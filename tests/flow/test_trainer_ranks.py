"""A trainer of several processes: the versions that one process makes, through a rank's death and a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rftstream.backends.deepspeed import rank_processes
from rftstream.config.loader import replace
from rftstream.contracts.versions import StepRecord
from rftstream.errors import BackendError
from rftstream.runs.manifest import make_manifest
from rftstream.testing import RoleDriver
from tests.flow.scene import Scene
from tests.flow.test_learned_beside import RENEWED
from tests.flow.test_trainer_restarts import CHARACTERS
from tests.flow.trained import digests_of, names, steps_of

pytestmark = [pytest.mark.slow, pytest.mark.law("replay")]

TIMEOUT_S = 250.0
NUM_BATCHES = 6


def make_scene(folder: Path, backend: str, shares: int, **settings: Any) -> Scene:
    """Rows of one micro-batch and of many, one optimizer step for a batch and two."""
    return Scene(
        folder, trainer__backend=backend, trainer__shares=shares, trainer__lr=1e-3, trainer__checkpoint_every=2,
        trainer__tokens_per_microbatch=16, trainer__minibatches=2, feeder__groups_per_batch=4,
        model__path=None, model__make={"characters": CHARACTERS, "width": 16}, **settings,
    )  # fmt: skip


def feed(scene: Scene, first: int = 0, end: int = NUM_BATCHES) -> None:
    for number in range(first, end):
        scene.batch(number, rewards=(0.0, 0.25, 1.0) if number % 2 else (0.0, 1.0))


def by_version(scene: Scene) -> dict[int, StepRecord]:
    return {step.name.version: step for step in steps_of(scene) if not step.resumed}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    scene = make_scene(tmp_path_factory.mktemp("alone"), "torch", shares=1)
    feed(scene)
    RoleDriver(scene, "trainer").work()
    return scene


@pytest.mark.parametrize("shares", [2, 4])
def test_the_number_of_shares_changes_no_bit(tmp_path: Path, alone: Scene, shares: int) -> None:
    scene = make_scene(tmp_path, "torch", shares)
    feed(scene)
    RoleDriver(scene, "trainer").work()
    assert sorted(digests_of(scene)) == list(range(NUM_BATCHES + 1))
    assert digests_of(scene) == digests_of(alone)


@pytest.mark.sampled(1, "ranks")
def test_a_rank_dies_and_the_next_trainer_goes_on_alone(
    tmp_path: Path, alone: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_processes, "ABANDON_S", 1e6)  # else this process would end
    settings = {"processes": 2, "stage": 2, "timeout_s": TIMEOUT_S}
    scene = make_scene(tmp_path, "deepspeed", 4, backends__deepspeed=settings)
    trainer = RoleDriver(scene, "trainer")
    feed(scene, end=3)
    trainer.work()
    assert sorted(by_version(scene)) == [1, 2, 3]
    step: Any = trainer.service.step
    step._backend.backend._ranks._processes[1].kill()
    feed(scene, first=3)
    with pytest.raises(BackendError, match=r"rank 1 of 2 .* ended with signal SIGKILL; the trainer has to start again"):
        trainer.work()
    assert sorted(by_version(scene)) == [1, 2, 3]
    trainer.service.close()
    scene.config = replace(scene.config, backends__deepspeed=settings | {"processes": 1, "stage": 0})
    successor = RoleDriver(scene, "trainer")
    successor.work()
    successor.service.close()  # of process groups there can be one
    assert names(steps_of(scene))[-5:] == [(2, 2), (2, 3), (2, 4), (2, 5), (2, 6)]  # a checkpoint is of version 2
    for version, expected in by_version(alone).items():
        found = by_version(scene)[version]
        for name in ("loss", "grad_norm", "entropy", "num_tokens"):
            assert found.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-4, abs=1e-6)


@pytest.mark.sampled(1, "ranks")
@pytest.mark.heavy("three trainers, of which two have ranks")
def test_adapters_and_a_renewed_reference_go_on_with_another_number_of_processes(tmp_path: Path) -> None:
    pytest.importorskip("peft")

    def adapted(folder: Path, backend: str, **settings: Any) -> Scene:
        scene = make_scene(folder, backend, 1, **RENEWED, model__lora={"rank": 2}, manifest=False, **settings)
        digests = {f"taskset.{name}": "" for name in scene.config.tasksets}
        scene.put("control", make_manifest(scene.config, scene.folder.run_id, digests, scene.clock.now()))
        return scene

    alone = adapted(tmp_path / "alone", "torch")
    feed(alone)
    RoleDriver(alone, "trainer").work()
    settings = {"processes": 2, "stage": 3, "timeout_s": TIMEOUT_S}
    scene = adapted(tmp_path / "ranks", "deepspeed", backends__deepspeed=settings)
    trainer = RoleDriver(scene, "trainer")
    feed(scene, end=5)
    trainer.work()
    trainer.service.close()
    scene.config = replace(scene.config, backends__deepspeed=settings | {"processes": 1, "stage": 1})
    feed(scene, first=5)
    successor = RoleDriver(scene, "trainer")
    successor.work()
    successor.service.close()  # of process groups there can be one
    assert (2, 6) in names(steps_of(scene))
    for version, expected in by_version(alone).items():
        found = by_version(scene)[version]
        for name in ("loss", "grad_norm", "kl", "num_tokens"):
            assert found.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-3, abs=1e-6), (version, name)
