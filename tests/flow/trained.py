"""What a trainer left on the log and in the store, as the tests look at it."""

from __future__ import annotations

from rftstream.contracts.control import RunFinished
from rftstream.contracts.versions import EvalResult, StepRecord, VersionName, WeightsAnnounced
from rftstream.testing import RoleDriver
from rftstream.weights.checkpoints import CheckpointStore
from tests.flow.scene import Scene


def trained(scene: Scene, num_batches: int, *, at_once: bool = True) -> RoleDriver:
    """Return a trainer that has trained the first batches. `at_once`: all of them are there when it begins."""
    trainer = RoleDriver(scene, "trainer")
    for number in range(num_batches):
        scene.batch(number)
        if not at_once:
            trainer.work()
    trainer.work()
    return trainer


def steps_of(scene: Scene) -> list[StepRecord]:
    return [message for message in scene.messages("steps") if isinstance(message, StepRecord)]


def announced_of(scene: Scene) -> list[tuple[int, int]]:
    return [(one.name.trainer_epoch, one.name.version) for one in scene.messages("weights")
            if isinstance(one, WeightsAnnounced)]  # fmt: skip


def names(steps: list[StepRecord]) -> list[tuple[int, int]]:
    return [(step.name.trainer_epoch, step.name.version) for step in steps]


def digests_of(scene: Scene) -> dict[int, set[str]]:
    """Of the weights, by version."""
    digests: dict[int, set[str]] = {}
    for step in steps_of(scene):
        if step.weights_digest is not None:
            digests.setdefault(step.name.version, set()).add(step.weights_digest)
    return digests


def finished_of(scene: Scene) -> RunFinished | None:
    return next((one for one in scene.messages("control") if isinstance(one, RunFinished)), None)


def ended_of(scene: Scene) -> tuple[str, int]:
    """Return why the run ended, and with which version."""
    finished = finished_of(scene)
    assert finished is not None
    return finished.reason, finished.name.version


def evaluated(version: int, mean: float = 0.5, epoch: int = 1, *, best: bool = False) -> EvalResult:
    return EvalResult(
        evaluation="held-out", name=VersionName(trainer_epoch=epoch, version=version), num_tasks=4, num_samples=1,
        num_unscored=0, metrics={"mean": mean}, generations=None, best=best,
    )  # fmt: skip


def checkpoints_of(scene: Scene) -> list[tuple[int, int]]:
    return [(one.trainer_epoch, one.version) for one in CheckpointStore(scene.store).names()]


def versions_kept(scene: Scene) -> list[tuple[int, int]]:
    """Weight objects in the store."""
    found = [name.removeprefix("versions/").partition(".")[0].split("-") for name in scene.store.list("versions/")]
    return [(int(epoch), int(version)) for epoch, version in found]
