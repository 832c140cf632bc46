"""Copying a run into another, killed between any two commits; and what a buffer does with another run's versions."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from rftstream.contracts import codec
from rftstream.contracts.control import RunManifest, TasksEnded
from rftstream.contracts.outcomes import GroupOutcome, GroupResult
from rftstream.contracts.rollouts import Rollout, RolloutStatus
from rftstream.errors import ConfigError
from rftstream.runs.folder import RunFolder
from rftstream.runs.making import imported
from rftstream.runs.making.fork import copy_model
from rftstream.runs.making.imported import RolloutImport
from rftstream.testing import RoleDriver
from rftstream.testing.faults import Kill
from tests.flow.disturbed import copy_on
from tests.flow.scene import Scene


def manifest(scene: Scene) -> RunManifest:
    return RunManifest(run=scene.folder.run_id, created_at=1.0, config="", digests={"taskset.sums": ""}, partitions=3,
                       shares=1, seed=0, rftstream_version="0")  # fmt: skip


def target_of(folder: Path) -> Scene:
    return Scene(folder / "target", manifest=False, run__imported_from="source", explorer__count=0)


def copy(source: Scene, target: Scene) -> None:
    RolloutImport(source.transport(), target.transport("import"), target.folder.run_id, lambda text: None).run(
        lambda: manifest(target)
    )


@pytest.fixture
def source(tmp_path: Path) -> Scene:
    """Groups 0 to 5; of 3 one rollout is missing; 1 was put back as 6."""
    scene = Scene(tmp_path / "source")
    scene.admit(0, 1, 2, 3, 4, 5)
    ids = [one for sequence in range(6) for one in scene.siblings(sequence)]
    scene.put(
        "rollouts", *(scene.rollout(one, version=one.sequence) for one in ids if one.rollout_id != "sums/0/3/0/1")
    )
    again = [replace(one, group_id="sums/0/1/1", rollout_id=f"sums/0/1/1/{one.sibling}", sequence=6)
             for one in scene.siblings(1)]  # fmt: skip
    task = scene.messages("tasks")[0]
    scene.put("tasks", *(replace(task, ids=one) for one in again))  # type: ignore[type-var]
    scene.put("rollouts", *(scene.rollout(one, version=1) for one in again))
    return scene


def rollouts_of(scene: Scene) -> dict[str, Rollout]:
    rollouts = [one for one in scene.messages("rollouts") if isinstance(one, Rollout)]
    assert len({one.ids.rollout_id for one in rollouts}) == len(rollouts)
    return {one.ids.rollout_id: one for one in rollouts}


def check(source: Scene, target: Scene) -> None:
    assert Counter(record.value for record in target.records("tasks")) == Counter(
        record.value for record in source.records("tasks")
    )
    theirs, ours = rollouts_of(source), rollouts_of(target)
    skipped = {name for name, one in ours.items() if one.status is RolloutStatus.skipped}
    assert skipped == {"sums/0/3/0/1", "sums/0/1/0/0", "sums/0/1/0/1"}, "missing, or put back as another attempt"
    assert {name: one for name, one in ours.items() if name not in skipped} == {
        name: one for name, one in theirs.items() if name not in skipped
    }
    for record in target.records("rollouts"):
        assert record.header("run") == target.folder.run_id.encode()
        assert codec.from_record(record).ids.sequence % 3 == record.partition  # type: ignore[union-attr]
    ends = [one for one in target.messages("control") if isinstance(one, TasksEnded)]
    assert ends == [TasksEnded(admitted=7, reason="imported")]
    lag = {group: sum(target.log.connect("look").admin.lag(group, topic).values())
           for group, topic in (("explorer", "tasks"), ("verifier", "rollouts"))}  # fmt: skip
    assert lag == {"explorer": 0, "verifier": len(ours)}, "what is sampled already waits to be scored alone"
    report = target.audit()
    assert report.fine, report.to_text()


@pytest.mark.law("twice")
def test_each_task_has_one_rollout_and_the_rest_is_as_it_was(source: Scene, tmp_path: Path) -> None:
    target = target_of(tmp_path)
    copy(source, target)
    check(source, target)
    before = target.digest()
    copy(source, target)
    assert target.digest() == before


@pytest.mark.law("lost", "twice")
@pytest.mark.parametrize("point", ["before_commit", "after_commit"])
def test_killed_at_any_commit_it_goes_on_where_it_was(
    source: Scene, tmp_path: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imported, "MAX_RECORDS", 2)
    target = target_of(tmp_path)

    def goes_on(kills: int) -> None:
        """The source does meanwhile: how much there is to copy was fixed at the beginning."""
        if kills == 3:
            source.admit(7)
            source.put("rollouts", source.rollout(source.siblings(3)[1]))

    assert copy_on(target, point, lambda: copy(source, target), goes_on) > 3
    skipped = {name for name, one in rollouts_of(target).items() if one.status is RolloutStatus.skipped}
    assert skipped == {"sums/0/3/0/1", "sums/0/1/0/0", "sums/0/1/0/1"}
    assert len(target.records("tasks")) == 14
    assert target.audit().fine


def test_a_trimmed_source_is_refused(source: Scene, tmp_path: Path) -> None:
    place = source.records("tasks")[0].place
    source.transport().admin.delete_before({place: 1})
    with pytest.raises(ConfigError, match="deleted by retention"):
        copy(source, target_of(tmp_path))


def test_old_versions_do_not_expire_in_an_imported_run(source: Scene, tmp_path: Path) -> None:
    target = Scene(tmp_path / "target", manifest=False, run__imported_from="source", feeder__on_stale="drop",
                   feeder__max_staleness=0, buffer__min_siblings=1)  # fmt: skip
    copy(source, target)
    for role in ("verifier", "buffer"):
        RoleDriver(target, role).work()
    outcomes = {one.group_id: one.result for one in target.messages("outcomes") if isinstance(one, GroupOutcome)}
    dead = outcomes.pop("sums/0/1/0")
    assert dead is GroupResult.dead
    assert set(outcomes.values()) == {GroupResult.batched}
    assert len(outcomes) == 6
    report = target.audit()
    assert report.fine, report.to_text()
    assert report.groups.admitted == 7


def test_the_model_folder_comes_along_once(tmp_path: Path) -> None:
    """What it was made from, or fetched from, may be gone."""
    source, target = RunFolder(tmp_path / "source"), RunFolder(tmp_path / "target")
    target.path.mkdir()
    copy_model(source, target)
    assert not target.model.exists(), "a model that lies elsewhere"
    source.model.mkdir(parents=True)
    (source.model / "initial.json").write_text("{}")
    copy_model(source, target)
    (source.model / "initial.json").write_text("changed")
    copy_model(source, target)
    assert [path.name for path in target.path.iterdir()] == ["model"]
    assert (target.model / "initial.json").read_text() == "{}"


@pytest.mark.law("lost")
def test_a_copy_that_was_killed_leaves_nothing_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = RunFolder(tmp_path / "source"), RunFolder(tmp_path / "target")
    target.path.mkdir()
    source.model.mkdir(parents=True)
    (source.model / "model.safetensors").write_text("weights")

    def half(source: Path, target: Path) -> None:
        target.mkdir()
        (target / "half").write_text("wei")
        raise Kill

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copytree", half)
        with pytest.raises(Kill):
            copy_model(source, target)
    assert not target.model.exists()
    monkeypatch.setattr(os, "getpid", lambda: 1)  # another process does it again
    copy_model(source, target)
    assert [path.name for path in target.path.iterdir()] == ["model"]
    assert [path.name for path in target.model.iterdir()] == ["model.safetensors"]
