"""An explorer on deltas: it samples with what it has while a version cannot be had, until the next anchor."""

from __future__ import annotations

import numpy as np
import pytest

from rftstream.contracts.rollouts import Rollout
from rftstream.contracts.versions import VersionName, WeightsAnnounced, WeightsKind
from rftstream.policies import fake_model
from rftstream.testing import RoleDriver
from rftstream.weights.publisher import WeightsPublisher
from tests.flow.scene import Scene

pytestmark = pytest.mark.law("lineage", "never-waits")


class Trainer:
    """Publishes weights that are large enough for deltas."""

    def __init__(self, scene: Scene, anchor_every: int) -> None:
        self.scene = scene
        self.publisher = WeightsPublisher(scene.store, "fake", "float32", anchor_every=anchor_every)

    def announce(self, version: int) -> WeightsAnnounced:
        filler = np.zeros(4096, np.float32)
        filler[: 8 * version] = 1.0
        tensors = {
            fake_model.SKILL: fake_model.serve(np.asarray([version], np.float32), "float32"),
            fake_model.FILLER: fake_model.serve(filler, "float32"),
        }
        told = self.publisher.publish(tensors, VersionName(trainer_epoch=1, version=version), resumed=version == 0)
        self.scene.put("weights", told)
        return told


def sampled_by(scene: Scene, sequence: int) -> set[int]:
    rollouts = [one for one in scene.messages("rollouts") if isinstance(one, Rollout) and one.ids.sequence == sequence]
    return {span.version for one in rollouts for segment in one.segments for span in segment.versions}


def test_generation_goes_on_while_a_delta_cannot_be_had(scene: Scene) -> None:
    trainer = Trainer(scene, anchor_every=5)
    trainer.announce(0)
    explorer = RoleDriver(scene, "explorer")
    scene.admit(0)
    explorer.work()
    assert sampled_by(scene, 0) == {0}

    assert [trainer.announce(version).kind for version in (1, 2)] == [WeightsKind.delta] * 2
    lost = trainer.announce(3)
    scene.store.delete(lost.object)
    trainer.announce(4)
    scene.admit(1)
    scene.admit(2, min_version=4)
    explorer.work()
    assert sampled_by(scene, 1) == {2}, "as new as can be"
    assert not sampled_by(scene, 2)

    assert trainer.announce(5).kind is WeightsKind.full
    scene.clock.advance(2.0)
    explorer.work()
    assert sampled_by(scene, 2) == {5}


def test_a_late_explorer_begins_with_the_newest_anchor(scene: Scene) -> None:
    trainer = Trainer(scene, anchor_every=5)
    told = [trainer.announce(version) for version in range(8)]
    for one in told[:5]:
        scene.store.delete(one.object)
    explorer = RoleDriver(scene, "explorer")
    scene.admit(0, min_version=7)
    explorer.work()
    assert sampled_by(scene, 0) == {7}
