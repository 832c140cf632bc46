"""The trainer writes versions and checkpoints while it computes the next version, in threads that the test holds up."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rftstream.backends.fake import FakeBackend
from rftstream.contracts.control import DesiredState
from rftstream.contracts.versions import VersionName, WeightsAnnounced
from rftstream.errors import ProducerLost, WeightsError
from rftstream.service.loops.single import FINISH_S
from rftstream.service.role import Role, RoleContext
from rftstream.testing import RoleDriver
from rftstream.weights.checkpoints import CheckpointStore, StagedCheckpoint
from rftstream.weights.publisher import WeightsPublisher
from tests.flow.disturbed import gave_way
from tests.flow.scene import Scene
from tests.flow.trained import announced_of, checkpoints_of, digests_of, names, steps_of, trained
from workers.trainer import build

WAIT_S = 60.0
TICKS = 600


class Words:
    """What a thread waits for: one word for each thing that it may do."""

    def __init__(self, count: int = 0) -> None:
        self._allowed = threading.Semaphore(count)

    def wait(self) -> None:
        assert self._allowed.acquire(timeout=WAIT_S)

    def let(self, count: int) -> None:
        self._allowed.release(count)


class Held(Words):
    """Calls of a method, each of which waits for a word."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: type, name: str, count: int = 0) -> None:
        super().__init__(count)
        self.calls: list[tuple[Any, ...]] = []
        """The arguments of each, when it began."""
        self.threads: set[str] = set()
        method = getattr(owner, name)

        def held(*args: Any) -> Any:
            self.calls.append(args)
            self.threads.add(threading.current_thread().name)
            self.wait()
            return method(*args)

        patch.setattr(owner, name, held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    made = Held(monkeypatch, FakeBackend, "update")
    yield made
    made.let(100)  # a thread that still waits ends


def in_a_thread(context: RoleContext) -> Role:
    return build(dataclasses.replace(context, simulated=False))


def until(trainer: RoleDriver, what: Callable[[], bool]) -> None:
    for _ in range(TICKS):
        if what():
            return
        trainer.tick()
        gave_way(trainer)
    raise AssertionError(f"it did not come to that: {trainer.service.health()}")


def scene_of(tmp_path: Path, batches: int, **settings: Any) -> tuple[Scene, RoleDriver]:
    scene = Scene(tmp_path, **settings)
    for number in range(batches):
        scene.batch(number)
    return scene, RoleDriver(scene, "trainer", build=in_a_thread)


@pytest.mark.slow
@pytest.mark.law("never-waits")
def test_a_version_is_announced_while_the_next_one_is_computed(tmp_path: Path, gate: Held) -> None:
    scene, trainer = scene_of(tmp_path, 3, feeder__max_staleness=2)
    gate.let(1)
    until(trainer, lambda: (1, 1) in announced_of(scene) and len(gate.calls) == 2)
    trainer.tick()
    assert names(steps_of(scene)) == announced_of(scene) == [(1, 0), (1, 1)]
    assert len(gate.calls) == 2, "one at a time"
    gate.let(2)
    until(trainer, lambda: (1, 3) in announced_of(scene))
    assert len(gate.threads) == 1 and threading.current_thread().name not in gate.threads
    alone = Scene(tmp_path / "alone", feeder__max_staleness=2)
    gate.let(100)
    trained(alone, 3)
    digests = [[step.weights_digest for step in steps_of(one) if not step.resumed] for one in (scene, alone)]
    assert digests[0] == digests[1]
    trainer.stop()


@pytest.mark.slow
def test_it_looks_at_the_log_while_it_computes(tmp_path: Path, gate: Held) -> None:
    scene, trainer = scene_of(tmp_path, 3)
    until(trainer, lambda: len(gate.calls) == 1)
    scene.ask(DesiredState.paused)
    trainer.tick()
    gate.let(3)
    until(trainer, lambda: (1, 1) in announced_of(scene))
    for _ in range(3):
        assert trainer.tick() > 0, "what is underway ends, and nothing is begun while the run is paused"
    assert names(steps_of(scene)) == [(1, 0), (1, 1)]
    scene.ask(DesiredState.running)
    until(trainer, lambda: (1, 3) in announced_of(scene))
    trainer.stop()


@pytest.mark.law("replay")
def test_a_checkpoint_is_of_its_version(tmp_path: Path, gate: Held) -> None:
    scene, trainer = scene_of(tmp_path, 4, feeder__max_staleness=3, trainer__checkpoint_every=2)
    gate.let(4)
    until(trainer, lambda: (1, 4) in announced_of(scene))
    digests = {step.name.version: step.weights_digest for step in steps_of(scene)}
    assert checkpoints_of(scene) == [(1, 2), (1, 4)]
    trainer.restart()
    until(trainer, lambda: len(announced_of(scene)) == 6)
    assert steps_of(scene)[-1].weights_digest == digests[4]


def test_told_to_leave_it_ends_what_it_has_begun_and_saves_it(tmp_path: Path, gate: Held) -> None:
    scene, trainer = scene_of(tmp_path, 4, feeder__max_staleness=3, trainer__checkpoint_every=100)
    gate.let(1)
    until(trainer, lambda: (1, 1) in announced_of(scene) and len(gate.calls) == 2)
    trainer.service.drain()
    assert not trainer.done
    gate.let(3)
    until(trainer, lambda: trainer.done)
    assert names(steps_of(scene)) == [(1, 0), (1, 1), (1, 2)]
    assert checkpoints_of(scene) == [(1, 2)]
    assert len(gate.calls) == 2
    trainer.service.close()


@pytest.mark.law("replay")
def test_told_to_leave_in_a_long_step_it_saves_the_one_before(tmp_path: Path, gate: Held) -> None:
    """It leaves the batch half trained, and its successor trains it again to the same bits."""
    scene, trainer = scene_of(tmp_path, 3, feeder__max_staleness=2, trainer__checkpoint_every=100)
    gate.let(1)
    until(trainer, lambda: (1, 1) in announced_of(scene) and len(gate.calls) == 2)
    trainer.service.drain()
    for _ in range(3):
        trainer.tick()
    assert not trainer.done, "it has some time"
    scene.clock.advance(FINISH_S)
    trainer.tick()
    gate.let(100)
    until(trainer, lambda: trainer.done)
    trainer.service.close()
    assert names(steps_of(scene)) == [(1, 0), (1, 1)]
    assert checkpoints_of(scene) == [(1, 1)]
    trainer.restart()
    until(trainer, lambda: (2, 3) in announced_of(scene))
    trainer.stop()
    alone = Scene(tmp_path / "alone", feeder__max_staleness=2)
    trained(alone, 3)
    assert digests_of(scene) == digests_of(alone)


@pytest.mark.law("replay")
def test_a_commit_that_failed_takes_back_what_was_begun(tmp_path: Path, gate: Held) -> None:
    scene, trainer = scene_of(tmp_path, 3, feeder__max_staleness=2)
    lost = []

    def lose(point: str, process: str) -> None:
        if point == "before_commit" and gate.calls and not lost:
            lost.append(point)
            raise ProducerLost("the transaction coordinator does not know it")

    scene.log.fault = lose
    gate.let(100)
    until(trainer, lambda: len(steps_of(scene)) == 5)
    assert lost
    steps = steps_of(scene)
    assert [step.name.version for step in steps] == [0, 0, 1, 2, 3]
    assert [step.name.trainer_epoch for step in steps] == [1, 2, 2, 2, 2]
    trainer.stop()


@pytest.fixture
def held(gate: Held, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """Versions after the first, the anchor, are written when the test says so."""
    gate.let(100)
    made = Held(monkeypatch, WeightsPublisher, "write", 1)
    yield made
    made.let(100)


@pytest.mark.slow
@pytest.mark.law("never-waits")
def test_a_batch_that_comes_while_a_version_is_written_is_trained_at_once(
    tmp_path: Path, gate: Held, held: Held
) -> None:
    scene, trainer = scene_of(tmp_path, 1, feeder__max_staleness=2)
    until(trainer, lambda: len(held.calls) == 2)
    for _ in range(3):
        trainer.tick()
    scene.clock.advance(5.0)
    scene.batch(1)
    until(trainer, lambda: len(gate.calls) == 2)
    scene.clock.advance(2.0)
    assert announced_of(scene) == [(1, 0)]
    held.let(2)
    until(trainer, lambda: (1, 2) in announced_of(scene))
    assert announced_of(scene) == names(steps_of(scene)) == [(1, 0), (1, 1), (1, 2)]
    first, second = (step.metrics for step in steps_of(scene)[1:])
    assert (first["publish_s"], second["wait_s"]) == (0.0, 5.0), "it waited for the batch, and for nothing else"
    announced = [one for one in scene.messages("weights") if isinstance(one, WeightsAnnounced)]
    assert announced[1].announced_at - announced[0].announced_at >= 7.0, "that is when it was durable"
    trainer.stop()


@pytest.mark.parametrize("ends", [RoleDriver.stop, RoleDriver.restart])
def test_it_ends_while_a_version_is_written(tmp_path: Path, held: Held, ends: Callable[[RoleDriver], None]) -> None:
    """In order, with the version on the log and saved; or at once, and the version is trained again."""
    scene, trainer = scene_of(tmp_path, 1, trainer__checkpoint_every=100)
    until(trainer, lambda: len(held.calls) == 2)
    if ends is RoleDriver.stop:
        trainer.service.drain()
        trainer.tick()
        assert not trainer.done
    else:
        trainer.restart()
    held.let(100)
    until(trainer, lambda: any(name[1] == 1 for name in announced_of(scene)))
    trainer.stop()
    stopped = ends is RoleDriver.stop
    assert names(steps_of(scene)) == ([(1, 0), (1, 1)] if stopped else [(1, 0), (2, 0), (2, 1)])
    assert checkpoints_of(scene) == [(1 if stopped else 2, 1)]


def begun(checkpoints: Held) -> list[int]:
    return [name.version for _, name, *_ in checkpoints.calls]


@pytest.fixture
def checkpoints(gate: Held, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """They are written when the test says so."""
    gate.let(100)
    made = Held(monkeypatch, CheckpointStore, "write_staged")
    yield made
    made.let(100)


@pytest.mark.slow
@pytest.mark.law("never-waits")
def test_versions_are_trained_and_announced_while_a_checkpoint_is_written(tmp_path: Path, checkpoints: Held) -> None:
    scene, trainer = scene_of(tmp_path, 6, feeder__max_staleness=9, trainer__checkpoint_every=3)
    until(trainer, lambda: (1, 5) in announced_of(scene))
    assert (begun(checkpoints), checkpoints_of(scene)) == ([3], [])
    for _ in range(5):
        trainer.tick()
    assert len(announced_of(scene)) == 6, "the next one is due, and waits for the end of this one"
    checkpoints.let(1)
    until(trainer, lambda: (1, 6) in announced_of(scene))
    assert checkpoints_of(scene) == [(1, 3)]
    digests = {step.name.version: step.weights_digest for step in steps_of(scene)}
    trainer.restart()
    until(trainer, lambda: (2, 6) in announced_of(scene))
    assert names(steps_of(scene))[-4:] == [(2, 3), (2, 4), (2, 5), (2, 6)], "it began with what was whole"
    assert {step.name.version: step.weights_digest for step in steps_of(scene)} == digests
    checkpoints.let(100)
    trainer.stop()
    assert (2, 6) in checkpoints_of(scene)


def test_the_checkpoint_that_is_written_is_there_when_it_leaves(tmp_path: Path, checkpoints: Held) -> None:
    scene, trainer = scene_of(tmp_path, 2, feeder__max_staleness=9, trainer__checkpoint_every=2)
    until(trainer, lambda: (1, 2) in announced_of(scene) and begun(checkpoints) == [2])
    assert not checkpoints_of(scene)
    checkpoints.let(1)
    trainer.stop()
    assert (begun(checkpoints), checkpoints_of(scene)) == ([2], [(1, 2)]), "once, and whole"
    assert not any(staged.folder.exists() for _, _, staged, _ in checkpoints.calls)


def test_what_is_trained_beside_a_checkpoint_is_saved_when_it_leaves(tmp_path: Path, checkpoints: Held) -> None:
    scene, trainer = scene_of(tmp_path, 3, feeder__max_staleness=9, trainer__checkpoint_every=2)
    until(trainer, lambda: (1, 3) in announced_of(scene) and begun(checkpoints) == [2])
    checkpoints.let(2)
    trainer.stop()
    assert checkpoints_of(scene) == [(1, 2), (1, 3)]


def test_who_is_replaced_waits_for_the_end_of_what_it_writes(tmp_path: Path, checkpoints: Held) -> None:
    scene, trainer = scene_of(tmp_path, 2, feeder__max_staleness=9, trainer__checkpoint_every=2)
    until(trainer, lambda: (1, 2) in announced_of(scene) and begun(checkpoints) == [2])
    lost = []

    def lose(point: str, process: str) -> None:
        if point == "before_commit" and not lost:
            lost.append(point)
            checkpoints.let(100)
            raise ProducerLost("the transaction coordinator does not know it")

    scene.batch(2)
    scene.log.fault = lose
    until(trainer, lambda: (2, 3) in announced_of(scene))
    assert lost
    assert checkpoints_of(scene)[0] == (1, 2), "it was begun before, and is in force"
    trainer.stop()
    assert not any(staged.folder.exists() for _, _, staged, _ in checkpoints.calls)


def test_a_checkpoint_that_cannot_be_written_ends_the_trainer(
    tmp_path: Path, gate: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.let(100)
    folders: list[Path] = []
    scene, trainer = scene_of(tmp_path, 2, feeder__max_staleness=9, trainer__checkpoint_every=2)

    def fails(_: CheckpointStore, name: VersionName, staged: StagedCheckpoint, state: dict[str, Any]) -> None:
        folders.append(staged.folder)
        raise WeightsError("the disk is full")

    monkeypatch.setattr(CheckpointStore, "write_staged", fails)
    with pytest.raises(WeightsError, match="the disk is full"):
        until(trainer, lambda: False)
    assert (1, 2) in announced_of(scene)
    trainer.service.close()
    assert len(folders) == 1
    assert not folders[0].exists()
