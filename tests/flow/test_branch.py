"""The recorded batches of a run, trained in another one: the same weights under the same settings, killed or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rftstream.config import loader
from rftstream.config.sections import RunConfig
from rftstream.contracts.batches import BatchManifest
from rftstream.contracts.control import RunFinished, RunManifest, TasksEnded
from rftstream.contracts.outcomes import GroupOutcome
from rftstream.errors import ConfigError
from rftstream.models.folders.folder import prepare_model
from rftstream.replay.again import save_state
from rftstream.replay.branch import BatchImport, measure
from rftstream.replay.recorded import read_recorded
from rftstream.runs.making import imported
from rftstream.runs.manifest import data_digests, make_manifest
from rftstream.service.role import Log
from rftstream.testing import MemoryRun, RoleDriver, Simulation
from rftstream.testing.faults import Kill
from rftstream.weights.checkpoints import CheckpointStore
from tests.flow.disturbed import FaultAt, copy_on
from tests.flow.scene import Scene
from tests.flow.test_replay import InMemory

pytestmark = pytest.mark.law("replay")

STEPS = 6


def make_config(**settings: Any) -> RunConfig:
    config = loader.from_dict({
        "run": {"name": "first", "steps": STEPS},
        "model": {"path": "fake"},
        "tasksets": {"sums": {"source": "arithmetic"}},
        "feeder": {"groups_per_batch": 4, "group_size": 2, "max_staleness": 1},
        "explorer": {"count": 1, "policy": "fake"},
        "trainer": {"backend": "fake", "checkpoint_every": 2, "lr_schedule": "cosine", "shares": 2},
        "transport": {"partitions": 3},
        "policies": {"fake": {"tokens_per_s": 300.0, "mean_tokens": 6.0, "sigma": 1.0}},
    })  # fmt: skip
    return loader.replace(config, **settings)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Simulation:
    """A whole run; its end leaves groups that were on their way."""
    simulation = Simulation(make_config(), folder=tmp_path_factory.mktemp("first"))
    simulation.run()
    return simulation


def second(folder: Path, source: MemoryRun, **settings: Any) -> MemoryRun:
    own = {"run__name": "second", "run__imported_from": str(source.folder.path), "explorer__count": 0}
    return MemoryRun(loader.replace(source.config, **own, **settings), folder=folder)


def manifest(run: MemoryRun) -> RunManifest:
    model = prepare_model(run.config.model, run.folder.model, run.config.run.seed)
    return make_manifest(run.config, "second", data_digests(run.config, model), 1.0)


def copy(source: MemoryRun, target: MemoryRun, begin: int = 0, end: int = STEPS) -> None:
    recorded = read_recorded(Log(source.transport()))

    def fill(folder: Path) -> None:
        assert save_state(InMemory(source), recorded, begin, folder, lambda *of: None).equal  # type: ignore[arg-type]

    BatchImport(
        source.transport(), target.transport("import"), "second", lambda text: None,
        extent=measure(source.transport(), begin, end), recorded=recorded, checkpoints=CheckpointStore(target.store),
        fill=fill, rewards_kept=10,
    ).run(lambda: manifest(target))  # fmt: skip


def digests(run: MemoryRun) -> dict[int, str | None]:
    return {version: step.weights_digest for version, step in read_recorded(Log(run.transport())).steps.items()}


def train(run: MemoryRun) -> RunFinished:
    """Every role that the new run has, in turns, until the trainer has ended it."""
    drivers = [RoleDriver(run, role) for role in ("feeder", "buffer", "trainer")]
    for driver in drivers:
        driver.work()
    return next(one for one in run.messages("control") if isinstance(one, RunFinished))


# --------------------------------------------------------------------------------------------- the same


@pytest.mark.parametrize("begin", [0, 1, 4])
def test_under_the_same_settings_the_same_weights_come_out(first: Simulation, tmp_path: Path, begin: int) -> None:
    """From the model, from a version whose checkpoint is gone, and from one that has a checkpoint."""
    before = first.digest()
    target = second(tmp_path, first)
    copy(first, target, begin)
    report = target.audit()
    assert report.fine, report.to_text()
    assert (report.groups.trained, report.groups.pending) == (4 * begin, 4 * (STEPS - begin))
    finished = train(target)
    assert (finished.reason, finished.name.version) == ("steps", STEPS)
    assert digests(target) == digests(first)
    report = target.audit()
    assert report.fine, report.to_text()
    assert (report.groups.admitted, report.groups.trained, report.groups.pending) == (4 * STEPS, 4 * STEPS, 0)
    trained = [step for step in read_recorded(Log(target.transport())).steps.values() if step.name.version > begin]
    assert {step.name.trainer_epoch for step in trained} == {2}, "above those of the run that it is made of"
    assert first.digest() == before


def test_the_records_are_as_they_were(first: Simulation, tmp_path: Path) -> None:
    target = second(tmp_path, first)
    copy(first, target, end=4)
    batched = {group for one in first.messages("batches") if isinstance(one, BatchManifest) and one.batch_sequence < 4
               for group in one.groups}  # fmt: skip
    assert len(batched) == 16
    for topic in ("tasks", "rollouts", "verified", "outcomes", "batches"):
        ours = [record for record in target.records(topic) if record.header("contract") != b"batch_manifest"]
        assert {record.header("run") for record in ours} == {b"second"}
        theirs = [record for record in first.records(topic) if (record.header("group_id") or b"").decode() in batched]
        by_partition = [sorted(records, key=lambda one: one.partition) for records in (ours, theirs)]
        assert [(one.partition, one.key, one.value) for one in by_partition[0]] == [
            (one.partition, one.key, one.value) for one in by_partition[1]
        ]
    closing = [one for one in target.messages("batches") if isinstance(one, BatchManifest)]
    assert [(one.batch_sequence, one.last, one.admitted) for one in closing] == [
        (number, number == 3, 16 if number == 3 else None) for _ in range(2) for number in range(4)
    ]
    assert [one for one in target.messages("control") if isinstance(one, TasksEnded)] == [
        TasksEnded(admitted=16, reason="imported")
    ]
    finished = train(target)
    assert (finished.reason, finished.name.version) == ("imported", 4), "before the steps that the first one had"


def test_under_other_settings_others_come_out(first: Simulation, tmp_path: Path) -> None:
    target = second(tmp_path, first, trainer__lr=0.5, backends={"fake": {"skill_rate": 0.5}})
    copy(first, target, 2)
    train(target)
    ours, theirs = digests(target), digests(first)
    assert [ours[version] == theirs[version] for version in sorted(theirs)] == [True, True, False, False, False, False]
    lrs = [step.metrics["lr"] for _, step in sorted(read_recorded(Log(target.transport())).steps.items())]
    assert lrs[2] > 0.3
    assert lrs[1] < 1e-5
    assert target.audit().fine


def test_a_trainer_that_is_killed_goes_on_where_it_was(first: Simulation, tmp_path: Path) -> None:
    target = second(tmp_path, first)
    copy(first, target)
    target.log.fault = FaultAt("after_commit", Kill, every=6, most=1)  # claim, anchor, and steps 1 to 4
    trainer = RoleDriver(target, "trainer")
    with pytest.raises(Kill):
        trainer.work()
    trainer.restart()
    trainer.work()
    recorded = read_recorded(Log(target.transport()))
    assert recorded.anchors[3].name.version == 2, "its checkpoint"
    assert {version: step.name.trainer_epoch for version, step in recorded.steps.items()} == {
        1: 2, 2: 2, 3: 3, 4: 3, 5: 3, 6: 3
    }  # fmt: skip
    assert digests(target) == digests(first)
    assert target.audit().fine


# --------------------------------------------------------------------------------------------- the import


@pytest.mark.law("lost", "twice")
@pytest.mark.parametrize("point", ["before_commit", "after_commit", "before_checkpoints", "after_checkpoints"])
def test_killed_anywhere_it_goes_on_where_it_was(
    first: Simulation, tmp_path: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imported, "MAX_RECORDS", 7)
    whole, target = second(tmp_path / "whole", first), second(tmp_path / "killed", first)
    copy(first, whole, 3)
    assert copy_on(target, point, lambda: copy(first, target, 3)) > (0 if "checkpoints" in point else 3)
    for topic in ("tasks", "rollouts", "verified", "outcomes", "batches", "steps"):
        assert [(one.key, one.value) for one in target.records(topic)] == [
            (one.key, one.value) for one in whole.records(topic)
        ], topic
    assert train(target).reason == "steps"
    assert digests(target) == digests(first)
    assert target.audit().fine


def test_siblings_that_were_on_their_way_come_too_late(tmp_path: Path) -> None:
    """Of groups that were closed early: one was not sampled, one not scored, one came after the outcome."""
    source = Scene(tmp_path / "source", feeder__group_size=3, buffer__group_deadline_s=5.0)
    source.admit(0, 1, 2, 3)
    for sequence in range(4):
        siblings = source.siblings(sequence)
        source.put("rollouts", *(source.rollout(one) for one in siblings[: 2 if sequence == 0 else 3]))
        source.verify(sequence, (0.0, 1.0), only=(0, 1))
    source.verify(3, (0.5,), only=(2,))
    buffer = RoleDriver(source, "buffer")
    buffer.work()
    source.clock.advance(6.0)
    buffer.work()
    source.verify(2, (0.5,), only=(2,))
    RoleDriver(source, "trainer").work()
    assert read_recorded(Log(source.transport())).version == 2

    target = second(tmp_path / "target", source)
    copy(source, target, end=2)
    late = [one for one in target.messages("outcomes") if isinstance(one, GroupOutcome) and one.late]
    assert {(one.rollouts[0].rollout_id, str(one.rollouts[0].status), one.rollouts[0].reward) for one in late} == {
        ("sums/0/0/0/2", "skipped", None), ("sums/0/1/0/2", "completed", None), ("sums/0/2/0/2", "completed", 0.5),
    }  # fmt: skip
    assert train(target).reason == "imported"
    report = target.audit()
    assert report.fine, report.to_text()
    assert (report.rollouts.trained, report.rollouts.expired, report.rollouts.pending) == (9, 3, 0)
    assert digests(target) == digests(source)


def test_what_cannot_be_trained_is_said_before_anything_is_copied(first: Simulation, tmp_path: Path) -> None:
    target = second(tmp_path, first)
    with pytest.raises(ConfigError, match=r"batch \d cannot be trained: the end of the log; give a --to"):
        measure(first.transport(), 0, 20)
    assert target.records("control") == []
