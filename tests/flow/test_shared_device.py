"""A trainer on the device of engines (`trainer.colocate`): what it asks for, and when it asks no more."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from rftstream.contracts.control import DesiredState
from rftstream.service.role import Role, RoleContext
from rftstream.testing import RoleDriver
from rftstream.testing.devices import MemoryDevice, MemoryLock
from tests.flow.scene import Scene
from tests.flow.test_buffer_demonstrations import Scene as DemonstrationScene
from tests.flow.trained import finished_of, names, steps_of
from workers.trainer import build


class Shared:
    """A trainer of this run, and an engine beside it that the test plays."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.device = scene, MemoryDevice()
        self.engine = MemoryLock(self.device, "explorer-0")
        self.trainer = RoleDriver(scene, "trainer", build=self._build)

    def _build(self, context: RoleContext) -> Role:
        return build(dataclasses.replace(context, open_lock=lambda _: MemoryLock(self.device, "trainer-0")))

    def until_it_waits(self) -> None:
        for _ in range(20):
            self.trainer.tick()
            if steps_of(self.scene):
                break
        assert self.engine.share(), "it has recovered"
        self.trainer.tick()
        assert self.trainer.service.health()["device"] == "waits for the device"


@pytest.mark.parametrize("state", [DesiredState.draining, DesiredState.paused])
def test_it_asks_no_more_once_there_is_nothing_to_train(tmp_path: Path, state: DesiredState) -> None:
    """A batch is ready, and will not be trained: of a stage without rollouts, in a run that is drained."""
    scene = DemonstrationScene(
        tmp_path,
        run={"name": "flow"},
        stages=[{"steps": 60, "algorithm": "sft"}, {"steps": 1, "algorithm": "grpo"}],
        trainer__algorithm="grpo",
        trainer__colocate=True,
        experts={"per_batch": 2, "shuffle": False},
    )
    scene.load(5)
    RoleDriver(scene, "buffer").work()
    shared = Shared(scene)
    shared.until_it_waits()
    scene.ask(state)
    shared.trainer.work()
    assert not shared.engine.is_wanted()
    assert names(steps_of(scene)) == [(1, 0)]
    finished = finished_of(scene)
    assert (finished is not None and finished.reason) == ("drained" if state is DesiredState.draining else False)
