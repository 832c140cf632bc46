"""The trainer alone: versions, what it publishes, what ends a run, which weights are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rftstream.contracts.control import DesiredState, RunFinished, TasksEnded
from rftstream.contracts.records import NewRecord
from rftstream.contracts.versions import VersionName, WeightsAnnounced
from rftstream.errors import ContractError, ProducerLost, StopRule
from rftstream.service.records import summaries
from rftstream.testing import RoleDriver
from tests.flow.disturbed import FaultAt
from tests.flow.scene import Scene
from tests.flow.trained import (
    announced_of,
    checkpoints_of,
    ended_of,
    evaluated,
    finished_of,
    names,
    steps_of,
    trained,
    versions_kept,
)

# --------------------------------------------------------------------------------------------- versions


@pytest.mark.law("lineage")
@pytest.mark.parametrize("shares", [1, 2, 3])
def test_every_batch_makes_one_version(tmp_path: Path, shares: int) -> None:
    scene = Scene(tmp_path, trainer__shares=shares, trainer__minibatches=2, feeder__groups_per_batch=4)
    trained(scene, 3, at_once=False)
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


@pytest.mark.law("order")
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


def test_an_empty_batch_makes_a_version_too(scene: Scene) -> None:
    trainer = RoleDriver(scene, "trainer")
    scene.batch(0)
    scene.batch(1, groups=0)
    scene.batch(2)
    trainer.work()
    assert names(steps_of(scene)) == [(1, 0), (1, 1), (1, 2), (1, 3)]
    digests = [step.weights_digest for step in steps_of(scene)]
    assert digests[1] == digests[2] != digests[3]
    assert steps_of(scene)[2].metrics["tokens"] == 0


@pytest.mark.law("lineage")
def test_a_batch_that_does_not_match_its_manifest_is_never_trained(scene: Scene) -> None:
    scene.batch(0)
    record = scene.records("batches")[0]
    partition = scene.log.partitions[record.place]
    partition.records[0], partition.records[1] = partition.records[1], partition.records[0]
    with pytest.raises(ContractError, match="the log is damaged"):
        RoleDriver(scene, "trainer").work()
    assert names(steps_of(scene)) == []


def test_a_pause_stops_it_between_two_batches(scene: Scene) -> None:
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
    trained(scene, 7)
    assert [version for _, version in announced_of(scene)] == [0, 3, 6, 7]
    by_version = {step.name.version: step for step in steps_of(scene)}
    assert [version for version, step in by_version.items() if step.announced] == [0, 3, 6, 7]
    assert [version for version, step in by_version.items() if step.weights_digest is None] == [1, 2, 4, 5]


@pytest.mark.law("never-waits")
def test_it_never_waits_with_a_version_that_nobody_knows(tmp_path: Path) -> None:
    """A rejected group moves those behind it up, and these may need the version that is there but not announced."""
    scene = Scene(tmp_path, trainer__publish_every=3, feeder__max_staleness=2)
    trainer = RoleDriver(scene, "trainer")
    for number in range(5):
        scene.batch(number)
        trainer.work()
        assert announced_of(scene)[-1] == (1, number + 1)


@pytest.mark.law("lineage")
def test_the_object_is_there_before_it_is_announced(scene: Scene) -> None:
    seen = []

    def look(point: str, process: str) -> None:
        if point == "after_commit" and process == "trainer":
            for one in scene.messages("weights"):
                assert isinstance(one, WeightsAnnounced)
                assert scene.store.exists(one.object)
                seen.append(one.name)

    scene.log.fault = look
    trained(scene, 3)
    assert len(set(seen)) == 4


# --------------------------------------------------------------------------------------------- NaN


@pytest.mark.law("lineage")
def test_a_nan_batch_makes_a_version_equal_to_its_parent(tmp_path: Path) -> None:
    scene = Scene(tmp_path, backends={"fake": {"nan_at": [1]}})
    trained(scene, 3)
    digests = [step.weights_digest for step in steps_of(scene)]
    assert [step.skipped for step in steps_of(scene)] == [False, False, True, False]
    assert digests[1] == digests[2] != digests[3]
    assert steps_of(scene)[2].trained_groups == 4


@pytest.mark.parametrize("restarts", [False, True])
def test_nan_batches_in_a_row_end_the_run(tmp_path: Path, restarts: bool) -> None:
    scene = Scene(
        tmp_path,
        backends={"fake": {"nan_at": [0, 2, 3, 4, 5]}},
        trainer__max_skips_in_a_row=3,
        trainer__checkpoint_every=1,
    )
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


# --------------------------------------------------------------------------------------------- no signal

FLAT = {"zero_variance_share": 1.0, "reward_std": 0.0}


def flat_batch(scene: Scene, number: int) -> None:
    scene.batch(number, rewards=(0.0, 0.0), metrics=FLAT)


def counts_of(scene: Scene) -> list[float]:
    return [step.metrics["steps_without_signal"] for step in steps_of(scene) if not step.resumed]


@pytest.mark.parametrize("restarts", [False, True])
def test_steps_without_signal_in_a_row_end_the_run(tmp_path: Path, restarts: bool) -> None:
    scene = Scene(tmp_path, trainer__max_steps_without_signal=3, trainer__checkpoint_every=2)
    trainer = RoleDriver(scene, "trainer")

    def train(number: int) -> None:
        trainer.work()
        if restarts:
            trainer.restart()  # killed: what it knew beside the log and its checkpoints is gone
            trainer.work()

    for number in (0, 1):
        flat_batch(scene, number)
        train(number)
    scene.batch(2, metrics={"zero_variance_share": 0.5})
    train(2)
    for number in (3, 4):
        flat_batch(scene, number)
        train(number)
    flat_batch(scene, 5)
    with pytest.raises(StopRule, match="3 steps in a row without a learning signal, expected fewer than 3") as stopped:
        trainer.work()
    assert (stopped.value.reason, stopped.value.exit_code) == ("no_signal", 6)
    assert "(trainer.max_steps_without_signal): every reward is 0." in str(stopped.value)
    in_force = {step.name.version: step.metrics["steps_without_signal"] for step in steps_of(scene) if not step.resumed}
    assert in_force == {1: 1, 2: 2, 3: 0, 4: 1, 5: 2, 6: 3}
    assert checkpoints_of(scene)[-1][1] == 6


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [False, True], ids=["at once", "after restarts"])
def test_a_sign_of_a_hacked_reward_ends_a_run_that_says_so(
    tmp_path: Path, restarts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ever more rollouts without a reward, from step 15 on; the first comparison is made at step 20. With summaries,
    restarted trainers need not read the first steps for anything else."""
    monkeypatch.setitem(summaries.EVERY, "steps", 4)
    for number, stop_on in enumerate(([], ["canary"], ["canary", "unscored"])):
        scene = Scene(tmp_path / str(number), run__stop_on=stop_on, trainer__checkpoint_every=4)
        trainer, stopped = RoleDriver(scene, "trainer"), None
        for batch in range(24):
            scene.batch(batch, metrics={"reward": 0.5, "unscored_share": 0.0 if batch < 15 else 0.4})
            try:
                trainer.work()
                if restarts and batch % 6 == 5:
                    trainer.restart()
                    trainer.work()
            except StopRule as rule:
                stopped = rule
                break
        assert (stopped is None) == ("unscored" not in stop_on)
        if stopped is not None:
            assert (stopped.reason, stopped.exit_code, batch) == ("hacked_reward", 6, 19)
            assert "at version 20, unscored: 40% of the rollouts have no reward" in str(stopped)
            assert checkpoints_of(scene)[-1][1] == 20


def test_a_resumed_run_has_as_many_steps_again(tmp_path: Path) -> None:
    """What was sampled before the cause was mended comes first."""
    scene = Scene(tmp_path, trainer__max_steps_without_signal=2)
    trainer = RoleDriver(scene, "trainer")
    for number in range(5):
        flat_batch(scene, number)
    with pytest.raises(StopRule, match="2 steps in a row"):
        trainer.work()
    trainer.restart()
    with pytest.raises(StopRule, match="4 steps in a row"):
        trainer.work()
    trainer.restart()
    scene.batch(5, metrics={"zero_variance_share": 0.5})
    trainer.work()
    assert counts_of(scene) == [1, 2, 3, 4, 5, 0]


def test_the_last_step_of_a_run_finishes_it(tmp_path: Path) -> None:
    scene = Scene(tmp_path, trainer__max_steps_without_signal=2, run__steps=2)
    trainer = RoleDriver(scene, "trainer")
    for number in range(2):
        flat_batch(scene, number)
    trainer.work()
    assert finished_of(scene) is not None


@pytest.mark.parametrize("settings", [{"trainer__max_steps_without_signal": 0}, {"trainer__algorithm": "topr"}])
def test_a_run_that_is_not_to_be_ended_by_it(tmp_path: Path, settings: dict[str, Any]) -> None:
    scene = Scene(tmp_path, **{"trainer__max_steps_without_signal": 2, **settings})
    trainer = RoleDriver(scene, "trainer")
    for number in range(4):
        flat_batch(scene, number)
    trainer.work()
    assert counts_of(scene) == ([0, 0, 0, 0] if "trainer__algorithm" in settings else [1, 2, 3, 4])


# --------------------------------------------------------------------------------------------- the end


def run_until_done(scene: Scene, batches: int) -> None:
    """`final/` has to be there before anybody is told."""
    seen: list[bool] = []

    def look(point: str, process: str) -> None:
        if point == "after_commit" and finished_of(scene) is not None:
            seen.append((scene.folder.final / "model.safetensors").is_file())

    scene.log.fault = look
    trainer = RoleDriver(scene, "trainer")
    for number in range(batches):
        scene.batch(number)
        trainer.work()
    assert trainer.done == bool(seen)
    assert all(seen)


def test_it_ends_with_the_steps(tmp_path: Path) -> None:
    scene = Scene(tmp_path, run__steps=3, trainer__publish_every=2)
    run_until_done(scene, 5)
    assert ended_of(scene) == ("steps", 3)
    assert [step.last for step in steps_of(scene)] == [False, False, False, True]
    assert announced_of(scene)[-1] == (1, 3)
    assert checkpoints_of(scene)[-1] == (1, 3)


def test_it_ends_with_the_taskset(scene: Scene) -> None:
    scene.put("control", TasksEnded(admitted=3, reason="taskset"))
    trainer = RoleDriver(scene, "trainer")
    scene.batch(0)
    trainer.work()
    assert finished_of(scene) is None
    scene.batch(1, groups=1, last=True)
    trainer.work()
    assert trainer.done
    assert finished_of(scene) == RunFinished(
        reason="taskset", name=VersionName(trainer_epoch=1, version=2), finished_at=finished_of(scene).finished_at
    )  # type: ignore[union-attr]


def test_it_ends_with_an_empty_last_batch_of_a_drained_run(scene: Scene) -> None:
    trainer = RoleDriver(scene, "trainer")
    scene.batch(0, groups=0, last=True)
    trainer.work()
    assert not trainer.done
    scene.put("control", TasksEnded(admitted=0, reason="draining"))
    trainer.work()
    assert ended_of(scene) == ("drained", 1)


@pytest.mark.parametrize("num_more", [0, 1])
def test_it_ends_after_so_many_hours(tmp_path: Path, num_more: int) -> None:
    scene = Scene(tmp_path, run__hours=1.0, run__steps=None, trainer__publish_every=2)
    trainer = trained(scene, 1)
    assert not trainer.done
    scene.clock.advance(3601.0)
    for number in range(num_more):
        scene.batch(1 + number)
    trainer.work()
    assert ended_of(scene) == ("hours", 1 + num_more)
    assert announced_of(scene)[-1] == (1, 1 + num_more), "who evaluates the last version has to know it"


@pytest.mark.parametrize(("restarts", "changed"), [(False, False), (False, True), (True, False), (True, True)])
def test_it_ends_when_the_reward_is_reached(tmp_path: Path, restarts: bool, changed: bool) -> None:
    """Rewards before a change of the reward do not count."""
    scene = Scene(tmp_path, run__stop_reward=0.8, run__stop_reward_over=3, trainer__checkpoint_every=1)
    trainer = RoleDriver(scene, "trainer")
    for number, reward in enumerate((1.0, 0.0, 0.9, 0.9, 0.5, 0.9, 1.2, *([0.9] if changed else []))):
        assert not trainer.done
        scene.batch(number, reward=reward, scorer=f"exact {1 + (changed and number >= 5)}")
        trainer.work()
        if restarts and not trainer.done:
            trainer.restart()
            trainer.work()
    assert ended_of(scene) == ("reward", 8 if changed else 7)
    assert {step.scorers["sums"] for step in steps_of(scene) if step.name.version == 6 and step.scorers} == {
        f"exact {1 + changed}"
    }


@pytest.mark.parametrize("settings", [{"run__steps": 2}, {"run__stop_reward": 0.5, "run__stop_reward_over": 2}])
def test_nothing_is_trained_or_said_once_it_has_ended(tmp_path: Path, settings: dict[str, Any]) -> None:
    scene = Scene(tmp_path, **settings)
    trainer = trained(scene, 6)
    assert trainer.done
    assert steps_of(scene)[-1].name.version == 2
    assert sum(isinstance(one, RunFinished) for one in scene.messages("control")) == 1


def test_a_run_that_is_given_fewer_steps_than_it_has_ends(tmp_path: Path) -> None:
    scene = Scene(tmp_path, trainer__checkpoint_every=2)
    trainer = trained(scene, 4)
    scene.config = Scene(tmp_path / "other", run__steps=3, trainer__checkpoint_every=2).config
    trainer.restart()
    trainer.work()
    assert ended_of(scene) == ("steps", 4)


def test_nobody_starts_on_a_finished_run(tmp_path: Path) -> None:
    scene = Scene(tmp_path, run__steps=1)
    run_until_done(scene, 1)
    before = scene.digest()
    late = RoleDriver(scene, "trainer")
    late.work()
    assert late.done
    assert scene.digest() == before


@pytest.mark.law("twice")
def test_an_unknown_last_commit_that_succeeded(tmp_path: Path) -> None:
    scene = Scene(tmp_path, run__steps=1)
    scene.batch(0)

    def lose() -> None:
        if finished_of(scene) is not None:
            scene.log.fault = None
            raise ProducerLost("simulated")

    scene.log.fault = FaultAt("after_commit", lose, "trainer")
    trainer = RoleDriver(scene, "trainer")
    trainer.work(within_s=0.9)
    assert trainer.done
    assert names(steps_of(scene)) == [(1, 0), (1, 1)]
    assert sum(isinstance(one, RunFinished) for one in scene.messages("control")) == 1


# --------------------------------------------------------------------------------------------- what is kept


EVALUATIONS = {"held-out": {"source": "arithmetic", "every": 4}}


def test_the_newest_the_checkpoints_and_version_0_are_kept(tmp_path: Path) -> None:
    scene = Scene(tmp_path, trainer__checkpoint_every=3, trainer__keep_checkpoints=2, weights__keep=2)
    trained(scene, 11, at_once=False)
    assert [version for _, version in versions_kept(scene)] == [0, 6, 9, 10, 11]
    assert checkpoints_of(scene) == [(1, 6), (1, 9)]


def test_due_evaluations_and_the_best_are_kept(tmp_path: Path) -> None:
    scene = Scene(tmp_path, evaluations=EVALUATIONS, trainer__checkpoint_every=100, weights__keep=2)
    trainer = trained(scene, 11, at_once=False)
    assert [version for _, version in versions_kept(scene)] == [0, 4, 8, 10, 11]
    scene.put("evals", evaluated(0))
    scene.put("evals", evaluated(4, best=True))
    scene.put("evals", evaluated(8))
    scene.batch(11)
    trainer.work()
    assert [version for _, version in versions_kept(scene)] == [0, 4, 11, 12]


def test_due_evaluations_outlive_two_restarts(tmp_path: Path) -> None:
    scene = Scene(tmp_path, evaluations=EVALUATIONS, trainer__checkpoint_every=3, weights__keep=2)
    trainer = trained(scene, 7, at_once=False)
    for _ in range(3):
        trainer.restart()
        trainer.work()
    scene.batch(7)
    trainer.work()
    assert (1, 4) in versions_kept(scene), "nobody has evaluated it"
    scene.put("evals", evaluated(4))
    scene.batch(8)
    trainer.work()
    assert (1, 4) not in versions_kept(scene)


def test_a_result_stands_for_the_state_that_a_newer_trainer_begins_with(tmp_path: Path) -> None:
    scene = Scene(
        tmp_path, evaluations=EVALUATIONS, trainer__checkpoint_every=4, trainer__keep_checkpoints=2, weights__keep=2
    )
    trainer = trained(scene, 5)
    scene.put("evals", evaluated(0))
    scene.put("evals", evaluated(4))
    trainer.work()
    trainer.restart()
    for number in range(5, 16):
        scene.batch(number)
    trainer.work()
    assert (2, 4) in [(one.trainer_epoch, one.version) for one in (step.name for step in steps_of(scene))]
    assert (2, 4) not in versions_kept(scene), "what it holds was evaluated as 1/4"
    assert (2, 8) in versions_kept(scene)


def test_a_control_record_of_no_known_kind_is_passed_over(scene: Scene) -> None:
    scene.put_raw(NewRecord("control", 0, b"news", b"\xc1", (("contract", b"news"), ("contract_version", b"1"))))
    scene.batch(0)
    RoleDriver(scene, "trainer").work()
    assert len(steps_of(scene)) == 2
