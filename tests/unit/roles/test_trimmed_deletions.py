"""What a trainer deletes that starts when its run is finished."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from rftstream.clock import SystemClock
from rftstream.contracts import codec
from rftstream.contracts.control import Claim, RunFinished, Trimmed
from rftstream.contracts.messages import Message
from rftstream.contracts.versions import VersionName
from rftstream.roles.trainer.retention.trimmed_deletions import TrimmedDeletions
from rftstream.service.role import Log
from rftstream.testing.memory_run import MemoryStore
from tests.flow.scene import Scene

pytestmark = pytest.mark.law("fencing", "bounded")

NAME = VersionName(trainer_epoch=1, version=2)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    scene = Scene(tmp_path)
    scene.admit(0, 1, 2)
    put(scene, Claim(role="trainer", epoch=1, host="h", pid=1, process="trainer-1", claimed_at=0.0))
    scene.step(2)
    put(scene, RunFinished(reason="steps", name=NAME, finished_at=1.0))
    return scene


def put(scene: Scene, message: Message) -> None:
    scene.put_raw(codec.to_record(message, "control", 0, run="flow", writer_epoch=1))


def after_the_end(scene: Scene) -> int:
    """Return how many tasks are left."""
    transport = scene.transport()
    deletions = TrimmedDeletions(transport, MemoryStore(), SystemClock(), compacts=False)
    assert deletions.after_the_end(Log(transport))
    return len([*Log(transport).read("tasks")])


def test_it_deletes_what_its_predecessor_has_given_up_and_nothing_that_somebody_else_says(scene: Scene) -> None:
    num_tasks = len([*Log(scene.transport()).read("tasks")])
    assert num_tasks > 0
    ends = tuple(end for _, end in sorted(scene.transport().admin.end_offsets("tasks").items()))
    said = Trimmed(name=NAME, checkpoints=(), offsets={"tasks": ends}, version=2, sequence=3)
    put(scene, dataclasses.replace(said, name=dataclasses.replace(NAME, version=10_000)))
    assert after_the_end(scene) == num_tasks, "of a checkpoint that nobody made"
    put(scene, said)
    assert after_the_end(scene) == 0
