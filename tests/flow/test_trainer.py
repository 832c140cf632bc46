"""The trainer alone: versions, checkpoints and where it goes on from, what ends a run, which weights are kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rftstream.errors import ContractError, ProducerLost, StopRule, TransactionAborted
from rftstream.messages import (
    DesiredState,
    EvalResult,
    RunFinished,
    StepRecord,
    TasksEnded,
    VersionName,
    WeightsAnnounced,
)
from rftstream.testing import RoleDriver
from rftstream.testing.faults import Kill
from rftstream.transport.base import NewRecord
from rftstream.weights.checkpoints import CheckpointStore
from tests.flow.scene import Scene


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


def checkpoints_of(scene: Scene) -> list[tuple[int, int]]:
    return [(one.trainer_epoch, one.version) for one in CheckpointStore(scene.store).names()]


def versions_kept(scene: Scene) -> list[tuple[int, int]]:
    """Weight objects in the store."""
    found = [name.removeprefix("versions/").partition(".")[0].split("-") for name in scene.store.list("versions/")]
    return [(int(epoch), int(version)) for epoch, version in found]


# --------------------------------------------------------------------------------------------- versions


@pytest.mark.parametrize("shares", [1, 2, 3])
def test_every_batch_makes_one_version(tmp_path: Path, shares: int) -> None:
    scene = Scene(tmp_path, trainer__shares=shares, trainer__minibatches=2, feeder__groups_per_batch=4)
    trainer = RoleDriver(scene, "trainer")
    for number in range(3):
        scene.batch(number)
        trainer.work()
    anchor, *steps = steps_of(scene)
    assert (anchor.name.version, anchor.resumed, anchor.batch_sequence) == (0, True, None)
    assert names(steps) == [(1, 1), (1, 2), (1, 3)] == announced_of(scene)[1:]
    assert [step.batch_sequence for step in steps] == [0, 1, 2]
    assert [step.trained_groups for step in steps] == [4, 8, 12]
    assert [step.trained_rollouts for step in steps] == [8, 16, 24]
    ends = scene.transport().admin.end_offsets("batches")
    assert steps[-1].positions == tuple(ends[place] for place in sorted(ends))
    assert all(step.metrics["reward"] == 0.5 and step.metrics["trained_rollouts"] == 8 for step in steps)
    assert len({step.weights_digest for step in steps_of(scene)}) == 4


def test_a_batch_waits_for_all_of_its_shares(tmp_path: Path) -> None:
    scene = Scene(tmp_path, trainer__shares=2)
    trainer = RoleDriver(scene, "trainer")
    scene.batch(0)
    records = scene.records("batches")
    partition = scene.log.partitions[records[-1].place]
    held, partition.records[-1:], partition.offsets[-1:] = partition.records[-1], [], []
    partition.end -= 1
    trainer.work()
    assert len(steps_of(scene)) == 1
    partition.records.append(held)
    partition.offsets.append(held.offset)
    partition.end += 1
    trainer.work()
    assert len(steps_of(scene)) == 2


def test_an_empty_batch_makes_a_version_too(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    trainer = RoleDriver(scene, "trainer")
    scene.batch(0)
    scene.batch(1, groups=0)
    scene.batch(2)
    trainer.work()
    assert names(steps_of(scene)) == [(1, 0), (1, 1), (1, 2), (1, 3)]
    digests = [step.weights_digest for step in steps_of(scene)]
    assert digests[1] == digests[2] != digests[3]
    assert steps_of(scene)[2].metrics["tokens"] == 0


def test_a_batch_that_does_not_match_its_manifest_is_never_trained(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.batch(0)
    record = scene.records("batches")[0]
    partition = scene.log.partitions[record.place]
    partition.records[0], partition.records[1] = partition.records[1], partition.records[0]
    with pytest.raises(ContractError, match="the log is damaged"):
        RoleDriver(scene, "trainer").work()
    assert names(steps_of(scene)) == []


def test_a_pause_stops_it_between_two_batches(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    trainer = RoleDriver(scene, "trainer")
    trainer.work()
    scene.ask(DesiredState.paused)
    scene.batch(0)
    trainer.work()
    assert len(steps_of(scene)) == 1
    scene.ask(DesiredState.running)
    trainer.work()
    assert len(steps_of(scene)) == 2


# --------------------------------------------------------------------------------------------- publishing


def test_publish_every_announces_the_nth_versions_while_there_are_batches(tmp_path: Path) -> None:
    scene = Scene(tmp_path, trainer__publish_every=3, feeder__max_staleness=2)
    for number in range(7):
        scene.batch(number)
    RoleDriver(scene, "trainer").work()
    assert [version for _, version in announced_of(scene)] == [0, 3, 6, 7]
    by_version = {step.name.version: step for step in steps_of(scene)}
    assert [version for version, step in by_version.items() if step.announced] == [0, 3, 6, 7]
    assert [version for version, step in by_version.items() if step.weights_digest is None] == [1, 2, 4, 5]


def test_it_never_waits_with_a_version_that_nobody_knows(tmp_path: Path) -> None:
    """A rejected group moves those behind it up, and these may need the version that is there but not announced."""
    scene = Scene(tmp_path, trainer__publish_every=3, feeder__max_staleness=2)
    trainer = RoleDriver(scene, "trainer")
    for number in range(5):
        scene.batch(number)
        trainer.work()
        assert announced_of(scene)[-1] == (1, number + 1)


def test_the_object_is_there_before_it_is_announced(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    seen = []

    def look(point: str, process: str) -> None:
        if point == "after_commit" and process == "trainer":
            for one in scene.messages("weights"):
                assert isinstance(one, WeightsAnnounced)
                assert scene.store.exists(one.object)
                seen.append(one.name)

    scene.log.fault = look
    for number in range(3):
        scene.batch(number)
    RoleDriver(scene, "trainer").work()
    assert len(set(seen)) == 4


# --------------------------------------------------------------------------------------------- restarts


def test_a_successor_goes_on_from_the_checkpoint_and_ends_with_the_same_weights(tmp_path: Path) -> None:
    scene = Scene(tmp_path, trainer__checkpoint_every=3)
    trainer = RoleDriver(scene, "trainer")
    for number in range(5):
        scene.batch(number)
    trainer.work()
    assert checkpoints_of(scene) == [(1, 3)]
    before = {version: next(iter(digests)) for version, digests in digests_of(scene).items()}
    trainer.restart()
    scene.batch(5)
    trainer.work()
    assert names(steps_of(scene))[6:] == [(2, 3), (2, 4), (2, 5), (2, 6)]
    anchor = steps_of(scene)[6]
    assert anchor.resumed
    assert anchor.positions == steps_of(scene)[3].positions
    assert (anchor.trained_groups, anchor.trained_rollouts) == (6, 12)
    announcement = [one for one in scene.messages("weights") if isinstance(one, WeightsAnnounced)][6]
    assert (announcement.name.version, announcement.resumed) == (3, True)
    for version, digest in before.items():
        assert digests_of(scene)[version] == {digest}
    assert checkpoints_of(scene) == [(1, 3), (2, 6)]


def test_without_a_checkpoint_everything_is_trained_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path, trainer__checkpoint_every=50)
    trainer = RoleDriver(scene, "trainer")
    for number in range(4):
        scene.batch(number)
    trainer.work()
    trainer.restart()
    trainer.work()
    assert names(steps_of(scene))[5:] == [(2, version) for version in range(5)]
    assert all(len(digests) == 1 for digests in digests_of(scene).values())


def damage(scene: Scene, folder: str, file: str) -> None:
    name = next(name for name in scene.store.list(f"checkpoints/{folder}/") if name.endswith(file))
    data = scene.store.objects[name]
    scene.store.objects[name] = data[:-2] + bytes([data[-2] ^ 1]) + data[-1:]


@pytest.mark.parametrize("file", ["fake.json", "manifest.json"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, file: str) -> None:
    scene = Scene(tmp_path, trainer__checkpoint_every=2)
    trainer = RoleDriver(scene, "trainer")
    for number in range(5):
        scene.batch(number)
    trainer.work()
    assert checkpoints_of(scene) == [(1, 2), (1, 4)]
    if file == "manifest.json":
        scene.store.objects["checkpoints/000001-00000004/manifest.json"] = b"{"
    else:
        damage(scene, "000001-00000004", file)
    trainer.restart()
    trainer.work()
    assert names(steps_of(scene))[6:] == [(2, 2), (2, 3), (2, 4), (2, 5)]
    assert all(len(digests) == 1 for digests in digests_of(scene).values())


def test_a_checkpoint_without_its_manifest_is_none(tmp_path: Path) -> None:
    scene = Scene(tmp_path, trainer__checkpoint_every=2)
    trainer = RoleDriver(scene, "trainer")
    for number in range(4):
        scene.batch(number)
    trainer.work()
    scene.store.delete("checkpoints/000001-00000004/manifest.json")
    trainer.restart()
    trainer.work()
    assert names(steps_of(scene))[5] == (2, 2)


def test_a_checkpoint_beyond_the_end_of_the_log_is_passed_over(tmp_path: Path) -> None:
    """The machine lost power: the store has what the log has not."""
    scene = Scene(tmp_path, trainer__checkpoint_every=1)
    trainer = RoleDriver(scene, "trainer")
    for number in range(2):
        scene.batch(number)
        trainer.work()
    manifest = "checkpoints/000001-00000002/manifest.json"
    state = json.loads(scene.store.get(manifest))
    state["state"]["positions"] = [1000]
    scene.store.objects[manifest] = json.dumps(state).encode()
    trainer.restart()
    trainer.work()
    assert names(steps_of(scene))[3:] == [(2, 1), (2, 2)]


def test_a_checkpoint_that_is_not_in_force_is_passed_over(tmp_path: Path) -> None:
    """A zombie's: its version is beyond the one that its successor began with."""
    scene = Scene(tmp_path, trainer__checkpoint_every=2)
    trainer = RoleDriver(scene, "trainer")
    for number in range(3):
        scene.batch(number)
    trainer.work()
    zombie = CheckpointStore(scene.store)
    saved = zombie.verify(VersionName(trainer_epoch=1, version=2))
    for version in (3, 7):  # one known by `steps`, but left behind; one never recorded
        def fill(folder: Path) -> None:
            (folder / "fake.json").write_text("{}")

        zombie.write(VersionName(trainer_epoch=1, version=version), fill, {**saved, "version": version})
    scene.step(2, epoch=2, resumed=True)
    trainer.restart()
    trainer.work()
    assert names(steps_of(scene))[5:] == [(2, 2), (2, 3)]


def test_a_replaced_trainers_records_are_not_in_force(tmp_path: Path) -> None:
    scene = Scene(tmp_path, trainer__checkpoint_every=2)
    trainer = RoleDriver(scene, "trainer")
    for number in range(3):
        scene.batch(number)
    trainer.work()
    trainer.restart()
    trainer.work()
    assert checkpoints_of(scene) == [(1, 2)]
    scene.step(9, epoch=1)
    trainer.restart()
    scene.batch(3)
    trainer.work()
    assert names(steps_of(scene))[-3:] == [(3, 2), (3, 3), (3, 4)]


def test_after_a_lost_producer_nothing_is_kept_of_what_was_not_committed(tmp_path: Path) -> None:
    """Also where no checkpoint is left to load: the backend begins anew."""
    scene = Scene(tmp_path, trainer__checkpoint_every=2)
    trainer = RoleDriver(scene, "trainer")
    for number in range(2):
        scene.batch(number)
    trainer.work()
    calm = digests_of(scene)
    commits = 0

    def lose_the_anchor(point: str, process: str) -> None:
        nonlocal commits
        commits += process == "trainer" and point == "before_commit"
        if commits == 2:  # the claim was the first
            scene.log.fault = None
            damage(scene, "000001-00000002", "fake.json")
            raise ProducerLost("simulated")

    scene.log.fault = lose_the_anchor
    scene.batch(2)
    trainer.restart()
    trainer.work(within_s=0.9)
    assert commits == 2
    assert names(steps_of(scene))[-4:] == [(3, 0), (3, 1), (3, 2), (3, 3)]
    assert {version: digests_of(scene)[version] for version in calm} == calm


@pytest.mark.parametrize(("point", "fault"), [
    ("before_commit", Kill), ("after_commit", Kill), ("before_commit", ProducerLost), ("after_commit", ProducerLost),
    ("before_commit", TransactionAborted), ("before_versions", Kill), ("after_versions", Kill),
    ("before_checkpoints", Kill), ("after_checkpoints", Kill),
])  # fmt: skip
@pytest.mark.parametrize("every", [2, 3])
def test_no_fault_changes_the_weights(tmp_path: Path, point: str, fault: type[BaseException], every: int) -> None:
    settings = {"trainer__checkpoint_every": 2, "run__steps": 9, "trainer__publish_every": 2}
    calm, scene, count = Scene(tmp_path / "calm", **settings), Scene(tmp_path, **settings), 0

    def at(where: str, process: str = "trainer") -> None:
        nonlocal count
        if where == point and process == "trainer":
            count += 1
            if count % every == 0 and count < 30:
                raise fault("simulated")

    scene.log.fault, scene.store.fault = at, at
    for one in (calm, scene):
        for number in range(9):
            one.batch(number)
    RoleDriver(calm, "trainer").work()
    trainer = RoleDriver(scene, "trainer")
    for _ in range(40):
        try:
            trainer.work(within_s=0.9)
        except Kill:
            trainer.restart()
        if trainer.done:
            break
    assert trainer.done
    assert count > every
    finished = finished_of(scene)
    assert finished is not None
    assert finished.name.version == 9
    for version, digests in digests_of(calm).items():
        assert digests_of(scene).get(version, digests) == digests
    assert digests_of(scene)[9] == digests_of(calm)[9]
    twins = [record.key for topic in ("steps", "weights") for record in scene.records(topic)]
    assert len(set(twins)) == len(twins)
    epochs = [name[0] for name in names(steps_of(scene))]
    assert epochs == sorted(epochs)


# --------------------------------------------------------------------------------------------- NaN


def test_a_nan_batch_makes_a_version_equal_to_its_parent(tmp_path: Path) -> None:
    scene = Scene(tmp_path, backends={"fake": {"nan_at": [1]}})
    for number in range(3):
        scene.batch(number)
    RoleDriver(scene, "trainer").work()
    digests = [step.weights_digest for step in steps_of(scene)]
    assert [step.skipped for step in steps_of(scene)] == [False, False, True, False]
    assert digests[1] == digests[2] != digests[3]
    assert steps_of(scene)[2].trained_groups == 4


@pytest.mark.parametrize("restarts", [False, True])
def test_nan_batches_in_a_row_end_the_run(tmp_path: Path, restarts: bool) -> None:
    scene = Scene(tmp_path, backends={"fake": {"nan_at": [0, 2, 3, 4, 5]}}, trainer__max_skips_in_a_row=3,
                  trainer__checkpoint_every=1)
    trainer = RoleDriver(scene, "trainer")
    for number in range(4):
        scene.batch(number)
        trainer.work()
        if restarts:
            trainer.restart()
            trainer.work()
    scene.batch(4)
    with pytest.raises(StopRule) as stopped:
        trainer.work()
    assert (stopped.value.reason, stopped.value.exit_code) == ("nan", 6)
    assert "batch 4 with the groups sums/0/4000/0, sums/0/4001/0" in str(stopped.value)
    assert steps_of(scene)[-1].name.version == 5
    assert checkpoints_of(scene)[-1][1] == 5
    trainer.restart()
    scene.batch(5)
    with pytest.raises(StopRule, match="4 batches in a row"):
        trainer.work()


# --------------------------------------------------------------------------------------------- the end


def run_until_done(scene: Scene, batches: int, **more: Any) -> RunFinished | None:
    """`final/` has to be there before anybody is told."""
    seen: list[bool] = []

    def look(point: str, process: str) -> None:
        if point == "after_commit" and finished_of(scene) is not None:
            seen.append((scene.folder.final / "model.safetensors").is_file())

    scene.log.fault = look
    trainer = RoleDriver(scene, "trainer")
    for number in range(batches):
        scene.batch(number, **more)
        trainer.work()
    assert trainer.done == bool(seen)
    assert all(seen)
    return finished_of(scene)


def test_it_ends_with_the_steps(tmp_path: Path) -> None:
    scene = Scene(tmp_path, run__steps=3, trainer__publish_every=2)
    finished = run_until_done(scene, 5)
    assert finished is not None
    assert (finished.reason, finished.name) == ("steps", VersionName(trainer_epoch=1, version=3))
    assert [step.last for step in steps_of(scene)] == [False, False, False, True]
    assert announced_of(scene)[-1] == (1, 3)
    assert checkpoints_of(scene)[-1] == (1, 3)


def test_it_ends_with_the_taskset(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.put("control", TasksEnded(admitted=3, reason="taskset"))
    trainer = RoleDriver(scene, "trainer")
    scene.batch(0)
    trainer.work()
    assert finished_of(scene) is None
    scene.batch(1, groups=1, last=True)
    trainer.work()
    assert trainer.done
    assert finished_of(scene) == RunFinished(reason="taskset", name=VersionName(trainer_epoch=1, version=2),
                                             finished_at=finished_of(scene).finished_at)  # type: ignore[union-attr]


def test_it_ends_with_an_empty_last_batch_of_a_drained_run(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    trainer = RoleDriver(scene, "trainer")
    scene.batch(0, groups=0, last=True)
    trainer.work()
    assert not trainer.done
    scene.put("control", TasksEnded(admitted=0, reason="draining"))
    trainer.work()
    finished = finished_of(scene)
    assert finished is not None
    assert (finished.reason, finished.name.version) == ("drained", 1)


def test_it_ends_after_so_many_hours(tmp_path: Path) -> None:
    scene = Scene(tmp_path, run__hours=1.0, run__steps=None, trainer__publish_every=2)
    trainer = RoleDriver(scene, "trainer")
    scene.batch(0)
    trainer.work()
    assert not trainer.done
    scene.clock.advance(3601.0)
    scene.batch(1)
    trainer.work()
    finished = finished_of(scene)
    assert finished is not None
    assert (finished.reason, finished.name.version) == ("hours", 2)


def test_it_ends_after_so_many_hours_without_a_batch(tmp_path: Path) -> None:
    scene = Scene(tmp_path, run__hours=1.0, run__steps=None, trainer__publish_every=2)
    trainer = RoleDriver(scene, "trainer")
    scene.batch(0)
    trainer.work()
    scene.clock.advance(3601.0)
    trainer.work()
    finished = finished_of(scene)
    assert finished is not None
    assert (finished.reason, finished.name.version) == ("hours", 1)
    assert announced_of(scene)[-1] == (1, 1), "who evaluates the last version has to know it"


@pytest.mark.parametrize("restarts", [False, True])
def test_it_ends_when_the_reward_is_reached(tmp_path: Path, restarts: bool) -> None:
    scene = Scene(tmp_path, run__stop_reward=0.8, run__stop_reward_over=3, trainer__checkpoint_every=1)
    trainer = RoleDriver(scene, "trainer")
    for number, reward in enumerate((1.0, 0.0, 0.9, 0.9, 0.5, 0.9, 1.2)):
        assert not trainer.done
        scene.batch(number, reward=reward)
        trainer.work()
        if restarts and not trainer.done:
            trainer.restart()
            trainer.work()
    finished = finished_of(scene)
    assert finished is not None
    assert (finished.reason, finished.name.version) == ("reward", 7)


def test_a_run_that_is_given_fewer_steps_than_it_has_ends(tmp_path: Path) -> None:
    scene = Scene(tmp_path, trainer__checkpoint_every=2)
    trainer = RoleDriver(scene, "trainer")
    for number in range(4):
        scene.batch(number)
    trainer.work()
    scene.config = Scene(tmp_path / "other", run__steps=3, trainer__checkpoint_every=2).config
    trainer.restart()
    trainer.work()
    finished = finished_of(scene)
    assert finished is not None
    assert (finished.reason, finished.name.version) == ("steps", 4)


def test_nobody_starts_on_a_finished_run(tmp_path: Path) -> None:
    scene = Scene(tmp_path, run__steps=1)
    run_until_done(scene, 1)
    before = scene.digest()
    late = RoleDriver(scene, "trainer")
    late.work()
    assert late.done
    assert scene.digest() == before


def test_an_unknown_last_commit_that_succeeded(tmp_path: Path) -> None:
    scene = Scene(tmp_path, run__steps=1)
    scene.batch(0)

    def lose(point: str, process: str) -> None:
        if point == "after_commit" and process == "trainer" and finished_of(scene) is not None:
            scene.log.fault = None
            raise ProducerLost("simulated")

    scene.log.fault = lose
    trainer = RoleDriver(scene, "trainer")
    trainer.work(within_s=0.9)
    assert trainer.done
    assert names(steps_of(scene)) == [(1, 0), (1, 1)]
    assert sum(isinstance(one, RunFinished) for one in scene.messages("control")) == 1


# --------------------------------------------------------------------------------------------- what is kept


def evaluated(scene: Scene, version: int, *, epoch: int = 1, best: bool = False) -> None:
    scene.put("evals", EvalResult(
        evaluation="held-out", name=VersionName(trainer_epoch=epoch, version=version), num_tasks=1, num_samples=1,
        num_unscored=0, metrics={}, generations=None, best=best))


EVALUATIONS = {"held-out": {"source": "arithmetic", "every": 4}}


def kept_after(scene: Scene, happens: Callable[[], None] = lambda: None, *, batches: int = 12) -> list[int]:
    trainer = RoleDriver(scene, "trainer")
    for number in range(batches):
        scene.batch(number)
        trainer.work()
        happens()
    trainer.work()
    return [version for _, version in versions_kept(scene)]


def test_the_newest_the_checkpoints_and_version_0_are_kept(tmp_path: Path) -> None:
    scene = Scene(tmp_path, trainer__checkpoint_every=3, trainer__keep_checkpoints=2, weights__keep=2)
    assert kept_after(scene, batches=11) == [0, 6, 9, 10, 11]
    assert checkpoints_of(scene) == [(1, 6), (1, 9)]


def test_due_evaluations_and_the_best_are_kept(tmp_path: Path) -> None:
    scene = Scene(tmp_path, evaluations=EVALUATIONS, trainer__checkpoint_every=100, weights__keep=2)
    trainer = RoleDriver(scene, "trainer")
    for number in range(11):
        scene.batch(number)
        trainer.work()
    assert [version for _, version in versions_kept(scene)] == [0, 4, 8, 10, 11]
    evaluated(scene, 0)
    evaluated(scene, 4, best=True)
    evaluated(scene, 8)
    scene.batch(11)
    trainer.work()
    assert [version for _, version in versions_kept(scene)] == [0, 4, 11, 12]


def test_due_evaluations_outlive_two_restarts(tmp_path: Path) -> None:
    scene = Scene(tmp_path, evaluations=EVALUATIONS, trainer__checkpoint_every=3, weights__keep=2)
    trainer = RoleDriver(scene, "trainer")
    for number in range(7):
        scene.batch(number)
        trainer.work()
    for _ in range(3):
        trainer.restart()
        trainer.work()
    scene.batch(7)
    trainer.work()
    assert (1, 4) in versions_kept(scene), "nobody has evaluated it"
    evaluated(scene, 4)
    scene.batch(8)
    trainer.work()
    assert (1, 4) not in versions_kept(scene)


def test_a_result_stands_for_the_state_that_a_newer_trainer_begins_with(tmp_path: Path) -> None:
    scene = Scene(tmp_path, evaluations=EVALUATIONS, trainer__checkpoint_every=4, trainer__keep_checkpoints=2,
                  weights__keep=2)
    trainer = RoleDriver(scene, "trainer")
    for number in range(5):
        scene.batch(number)
    trainer.work()
    evaluated(scene, 0)
    evaluated(scene, 4)
    trainer.work()
    trainer.restart()
    for number in range(5, 16):
        scene.batch(number)
    trainer.work()
    assert (2, 4) in [(one.trainer_epoch, one.version) for one in (step.name for step in steps_of(scene))]
    assert (2, 4) not in versions_kept(scene), "what it holds was evaluated as 1/4"
    assert (2, 8) in versions_kept(scene)


def test_a_control_record_of_no_known_kind_is_passed_over(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.put_raw(NewRecord("control", 0, b"news", b"\xc1", (("contract", b"news"), ("contract_version", b"1"))))
    scene.batch(0)
    RoleDriver(scene, "trainer").work()
    assert len(steps_of(scene)) == 2
