"""Roles in a run with stages, each alone: what the feeder admits when, what the buffer waits for, what the trainer
refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rftstream.contracts.batches import BatchManifest, Experience, LossKind
from rftstream.contracts.control import DesiredState, RunFinished
from rftstream.contracts.outcomes import GroupResult
from rftstream.contracts.versions import WeightsAnnounced
from rftstream.errors import ConfigError
from rftstream.testing import RoleDriver
from tests.flow.test_buffer_demonstrations import Scene
from tests.flow.test_feeder import groups_of, scene_of

STAGES = [{"steps": 2, "algorithm": "sft"}, {"steps": 2, "algorithm": "grpo"}, {"steps": 1, "algorithm": "sft"}]
SETTINGS: dict[str, Any] = {
    "run": {"name": "flow"}, "stages": STAGES, "trainer__algorithm": "grpo", "feeder__max_staleness": 1,
    "experts": {"per_batch": 2, "shuffle": False},
}  # fmt: skip


@pytest.mark.law("staleness")
def test_the_feeder_admits_for_batches_that_take_rollouts(tmp_path: Path) -> None:
    """Two groups a batch; versions 2 and 3 take them, sampled by the version before at the oldest."""
    scene = scene_of(tmp_path, **SETTINGS)
    feeder = RoleDriver(scene, "feeder")
    admitted = []
    for version, trained in enumerate([0, 0, 0, 2, 4, 4]):
        if version:
            scene.step(version, trained=trained)
        feeder.work()
        feeder.restart()
        feeder.work()
        admitted.append([one.ids.min_version for one in groups_of(scene)])
    assert admitted == [[], [1, 1], [1, 1, 2, 2], [1, 1, 2, 2], [1, 1, 2, 2], [1, 1, 2, 2]]


def test_what_was_rejected_is_made_up_for_while_its_stage_lasts(tmp_path: Path) -> None:
    scene = scene_of(tmp_path, **SETTINGS)
    feeder = RoleDriver(scene, "feeder")
    feeder.work()
    scene.step(1, trained=0)
    feeder.work()
    scene.decide(0, GroupResult.dead)
    feeder.work()
    assert len(groups_of(scene)) == 3
    scene.step(2, trained=0)
    feeder.work()
    assert [one.ids.min_version for one in groups_of(scene)] == [1, 1, 1, 2, 2]
    scene.step(4, trained=4)
    feeder.work()
    assert len(groups_of(scene)) == 5, "nobody takes another"


@pytest.mark.parametrize("restarts", [False, True])
def test_the_buffer_makes_each_batch_of_what_its_stage_takes(tmp_path: Path, restarts: bool) -> None:
    scene = Scene(tmp_path, **SETTINGS)
    scene.load(3)
    buffer = RoleDriver(scene, "buffer")

    def batches() -> list[set[LossKind]]:
        if restarts:
            buffer.restart()
        buffer.work()
        count = len([one for one in scene.messages("batches") if isinstance(one, BatchManifest)])
        found: list[set[LossKind]] = [set() for _ in range(count)]
        for one in scene.messages("batches"):
            if isinstance(one, Experience):
                found[one.batch_sequence].add(one.loss_kind)
        return found

    sft, rl = {LossKind.sft}, {LossKind.rl}
    assert batches() == [sft, sft], "no further ahead than max_staleness, and the next needs rollouts"
    for sequence in (0, 1, 2):
        scene.verify(sequence, version=1 + sequence // 2)
    assert batches() == [sft, sft, rl]
    scene.verify(3, version=2)
    assert batches() == [sft, sft, rl, rl]
    scene.step(2)
    assert batches() == [sft, sft, rl, rl], "the trainer is two versions behind"
    scene.step(3)
    assert batches() == [sft, sft, rl, rl, sft]
    scene.step(4)
    scene.step(5)
    assert batches() == [sft, sft, rl, rl, sft], "it was the last"
    assert scene.taken() == [[(0, 0), (0, 1)], [(0, 2), (1, 0)], [], [], [(1, 1), (1, 2)]]


def test_a_late_outcome_waits_for_no_batch(tmp_path: Path) -> None:
    """A group that is decided while demonstrations are trained on is told of at once."""
    scene = Scene(tmp_path, **{**SETTINGS, "stages": [STAGES[1], STAGES[0], STAGES[1]]})
    scene.load(3)
    buffer = RoleDriver(scene, "buffer")
    for sequence in range(4):
        scene.verify(sequence, version=1)
    buffer.work()
    scene.verify(4, [None, None], version=3)
    buffer.work()
    manifests = [one for one in scene.messages("batches") if isinstance(one, BatchManifest)]
    assert [one.num_groups for one in manifests] == [2, 2]
    assert len(scene.messages("outcomes")) == 5


def test_the_buffer_waits_for_demonstrations_of_a_stage(tmp_path: Path) -> None:
    scene = Scene(tmp_path, **SETTINGS)
    buffer = RoleDriver(scene, "buffer")
    buffer.work()
    assert not scene.messages("batches")
    scene.load(2)
    buffer.work()
    assert len(scene.taken()) == 2


def test_demonstrations_of_another_kind_alone_are_an_error(tmp_path: Path) -> None:
    stages = [{"steps": 2, "algorithm": "dpo"}, *STAGES]
    scene = Scene(tmp_path, **{**SETTINGS, "stages": stages})
    scene.load(3)
    with pytest.raises(ConfigError, match="none of 3 demonstrations is a pair that can be used"):
        RoleDriver(scene, "buffer").work()


def test_a_batch_that_was_made_for_another_stage_is_not_trained(tmp_path: Path) -> None:
    scene = Scene(tmp_path, **SETTINGS)
    scene.batch(0)
    with pytest.raises(ConfigError, match=r"stages.0 \(sft, versions 0 to 2\): batch 0 was made for another stage"):
        RoleDriver(scene, "trainer").work()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("ticks", range(1, 8))
@pytest.mark.parametrize("pauses", [False, True])
def test_a_drained_run_ends_with_a_version_that_is_published(tmp_path: Path, ticks: int, pauses: bool) -> None:
    """Whenever it is drained: what is evaluated last, and what others go on from, is what it ended with."""
    stages = [{"steps": 60, "algorithm": "sft"}, {"steps": 1, "algorithm": "grpo"}]
    settings: dict[str, Any] = {
        "feeder__max_staleness": 60,
        "trainer__publish_every": 4,
        "trainer__checkpoint_every": 1,
    }
    scene = Scene(tmp_path, **SETTINGS | settings | {"stages": stages})
    scene.load(5)
    RoleDriver(scene, "buffer").work()
    trainer = RoleDriver(scene, "trainer")
    for _ in range(ticks):
        trainer.tick()
    if pauses:
        scene.ask(DesiredState.paused)
        trainer.work()
    scene.ask(DesiredState.draining)
    trainer.work()
    (finished,) = [one for one in scene.messages("control") if isinstance(one, RunFinished)]
    announced = [one.name for one in scene.messages("weights") if isinstance(one, WeightsAnnounced)]
    assert finished.reason == "drained"
    assert announced[-1] == finished.name
    assert trainer.done
