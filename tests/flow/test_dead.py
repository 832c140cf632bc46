"""Dead groups that are put back: what the feeder admits for them, what the explorer does not sample again, and that a
restart writes no dead letter twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rftstream.contracts.dead import DeadLetter
from rftstream.contracts.ids import next_attempt
from rftstream.contracts.outcomes import GroupOutcome, GroupResult
from rftstream.contracts.records import NewRecord
from rftstream.contracts.rollouts import Rollout, RolloutStatus
from rftstream.contracts.tasks import Task
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.contracts.versions import StepRecord
from rftstream.queries.records.dead import plan_retries, read_dead, stored_rollouts
from rftstream.runs.writes.requests import retry_request
from rftstream.service.role import Log
from rftstream.testing import MemoryRun, RoleDriver, Simulation
from rftstream.testing.faults import Kill
from tests.flow.disturbed import FaultAt
from tests.flow.scene import Scene, make_config

SECRET = f"{__name__}:after_the_mend"
mended: list[bool] = []
"""Not empty: the reward works."""


def after_the_mend(completion: str, answer: str) -> float:
    if not mended:
        raise RuntimeError("the checker is down")
    return float(completion.strip() == answer)


def retry(run: MemoryRun, *groups: str, stored: Sequence[str | None] = (), within_s: float = 1000.0) -> None:
    for group in groups:
        run.put("control", retry_request(group, stored, run.clock.now() + within_s))


def tasks_of(run: MemoryRun) -> list[Task]:
    tasks = [message for message in run.messages("tasks") if isinstance(message, Task)]
    return sorted(tasks, key=lambda task: (task.ids.sequence, task.ids.sibling))


def groups_of(run: MemoryRun) -> list[str]:
    return [task.ids.group_id for task in tasks_of(run) if task.ids.sibling == 0]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """The feeder has admitted the four groups that it may; `kill_group` makes one dead."""
    scene = Scene(tmp_path, manifest=False)
    RoleDriver(scene, "feeder").work()
    assert len(groups_of(scene)) == 4
    return scene


def kill_group(scene: Scene, sequence: int, result: GroupResult = GroupResult.dead) -> str:
    group = groups_of(scene)[sequence]
    scene.put("outcomes", GroupOutcome(group_id=group, taskset="sums", sequence=sequence, result=result, reason="test",
                                       rollouts=()))  # fmt: skip
    return group


# --------------------------------------------------------------------------------------------- the feeder


@pytest.mark.law("derived")
def test_a_dead_group_is_admitted_as_the_next_attempt(scene: Scene) -> None:
    feeder = RoleDriver(scene, "feeder")
    group = kill_group(scene, 1)
    retry(scene, group, stored=["rollouts[1]@7", None])
    feeder.work()
    assert groups_of(scene)[4:] == [next_attempt(group)], "in the place that the dead one left, before anything new"
    before, now = tasks_of(scene)[2], tasks_of(scene)[8]
    assert now.ids == replace(before.ids, rollout_id=f"{next_attempt(group)}/0", group_id=next_attempt(group),
                              sequence=4, min_version=now.ids.min_version)  # fmt: skip
    assert (now.problem, now.sampling, now.environment) == (before.problem, before.sampling, before.environment)
    assert now.seed != before.seed
    assert [task.stored_rollout for task in tasks_of(scene)[8:]] == ["rollouts[1]@7", None]
    assert {record.partition for record in scene.records("tasks") if record.offset and b"/1/" in (record.key or b"")}


@pytest.mark.law("twice")
def test_each_request_is_done_once_whatever_happens(scene: Scene) -> None:
    group = kill_group(scene, 0)
    retry(scene, group)
    retry(scene, group)
    feeder = RoleDriver(scene, "feeder")
    feeder.work()
    kill_group(scene, 1)
    retry(scene, group)
    feeder.work()
    feeder.restart()
    feeder.work()
    retry(scene, group)
    kill_group(scene, 2)
    feeder.work()
    assert groups_of(scene).count(next_attempt(group)) == 1
    assert len(groups_of(scene)) == 7, "what the other dead ones left went to new groups"


@pytest.mark.law("lost", "twice")
def test_a_kill_around_the_commit_neither_loses_nor_doubles_a_retry(scene: Scene) -> None:
    group = kill_group(scene, 0)
    retry(scene, group)
    for point in ("before_commit", "after_commit"):
        feeder = RoleDriver(scene, "feeder")
        scene.log.fault = FaultAt(point, Kill, every=2, most=1)  # the claim is the first
        with pytest.raises(Kill):
            feeder.work()
        scene.log.fault = None
    RoleDriver(scene, "feeder").work()
    assert groups_of(scene)[4:] == [next_attempt(group)]


@pytest.mark.law("conservation")
def test_only_what_is_dead_is_put_back_and_only_in_time(scene: Scene) -> None:
    expired, filtered = kill_group(scene, 0), kill_group(scene, 1, GroupResult.filtered)
    retry(scene, expired, within_s=-1)
    retry(scene, filtered, "sums/0/999999999/0", "others/0/1/0", "no group at all")
    feeder = RoleDriver(scene, "feeder")
    feeder.work()
    assert len(groups_of(scene)) == 6
    assert all(group.endswith("/0") for group in groups_of(scene))
    retry(scene, expired)
    kill_group(scene, 2)
    feeder.work()
    assert groups_of(scene)[6:] == [next_attempt(expired)], "asked for again"


def test_a_request_that_comes_before_the_outcome_waits_for_it(scene: Scene) -> None:
    group = groups_of(scene)[3]
    retry(scene, group)
    feeder = RoleDriver(scene, "feeder")
    feeder.work()
    assert len(groups_of(scene)) == 4
    kill_group(scene, 3)
    feeder.work()
    assert groups_of(scene)[4:] == [next_attempt(group)]


def test_what_died_again_is_put_back_again(scene: Scene) -> None:
    feeder = RoleDriver(scene, "feeder")
    group = kill_group(scene, 0)
    retry(scene, group)
    feeder.work()
    kill_group(scene, 4)
    retry(scene, next_attempt(group))
    feeder.work()
    assert groups_of(scene)[4:] == [next_attempt(group), next_attempt(next_attempt(group))]


# --------------------------------------------------------------------------------------------- the explorer


def retried_tasks(scene: Scene, min_version: int) -> list[Task]:
    """Tasks of a second attempt that name the rollouts of the first."""
    first = {one.rollout_id: one for one in scene.siblings(0)}
    places = stored_rollouts(Log(scene.transport()), [scene.siblings(0)[0].group_id])
    tasks = scene.admit(0)
    again = []
    for task, place in zip(tasks, next(iter(places.values())), strict=True):
        group = next_attempt(task.ids.group_id)
        ids = replace(first[task.ids.rollout_id], group_id=group, rollout_id=f"{group}/{task.ids.sibling}", sequence=5,
                      min_version=min_version)  # fmt: skip
        again.append(replace(task, ids=ids, stored_rollout=place))
    return again


def test_headers_of_somebody_else_name_no_stored_rollout(scene: Scene) -> None:
    for sibling in (b"\xff", b"", b"-1"):
        headers = (("group_id", b"g"), ("sibling", sibling), ("status", b"completed"))
        scene.put_raw(NewRecord("rollouts", 0, b"?", b"?", headers))
    assert stored_rollouts(Log(scene.transport()), ["g"]) == {"g": []}


def test_a_reward_that_the_environment_gave_is_not_asked_for_again(scene: Scene) -> None:
    """It is recorded: scored again, the rollout would die again."""
    feeder = RoleDriver(scene, "feeder")
    feeder.work()
    group = kill_group(scene, 0)
    ids = [task.ids for task in tasks_of(scene) if task.ids.group_id == group]
    scene.put("rollouts", *map(scene.rollout, ids))
    (records,) = stored_rollouts(Log(scene.transport()), [group]).values()
    for sibling, detail in enumerate(("environment: neither environment nor agent gave a reward", "it raised")):
        place, _, offset = str(records[sibling]).partition("@")
        scene.put("dead", DeadLetter(role="verifier", topic="rollouts", partition=int(place[9:-1]), offset=int(offset),
                                     key=None, value=None, headers=(), reason="no_reward", detail=detail,
                                     tries=1, dead_at=0.0))  # fmt: skip
    stored, _ = plan_retries(Log(scene.transport()), now=0.0)
    assert stored == {group: [None, records[1]]}


def rollouts_of(scene: Scene) -> dict[str, Rollout]:
    return {one.ids.rollout_id: one for one in scene.messages("rollouts") if isinstance(one, Rollout)}


@pytest.mark.law("lineage")
def test_a_stored_rollout_is_copied_as_it_is_without_weights(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    ids = scene.siblings(0)
    scene.put("rollouts", scene.rollout(ids[0], version=1), scene.rollout(ids[1], version=2, text="4",
                                                                         status=RolloutStatus.truncated))  # fmt: skip
    scene.put("tasks", *retried_tasks(scene, min_version=1))
    RoleDriver(scene, "explorer").work()
    found = rollouts_of(scene)
    for one in ids:
        copy = found[f"{next_attempt(one.group_id)}/{one.sibling}"]
        assert replace(copy, ids=one) == found[one.rollout_id]


def test_what_is_too_old_failed_or_gone_is_sampled_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path, feeder__group_size=5)
    ids = scene.siblings(0)
    scene.put("rollouts", *(scene.rollout(one, version=int(one.sibling > 0)) for one in ids[:4]))
    tasks = retried_tasks_of_five(scene)
    scene.announce(1)
    scene.put("tasks", *tasks)
    RoleDriver(scene, "explorer").work()
    found = rollouts_of(scene)
    versions = {sibling: found[task.ids.rollout_id].segments[0].versions[0].version
                for sibling, task in enumerate(tasks)}  # fmt: skip
    assert set(versions.values()) == {1}
    same = [
        found[task.ids.rollout_id].segments == found[ids[i].rollout_id].segments for i, task in enumerate(tasks[:4])
    ]
    assert same == [False, True, False, False], "too old; as it was; another's; at no place"


def retried_tasks_of_five(scene: Scene) -> list[Task]:
    ids = scene.siblings(0)
    places = stored_rollouts(Log(scene.transport()), [ids[0].group_id])[ids[0].group_id]
    assert len(places) == 4
    stored = [places[0], places[1], places[3], "rollouts[0]@4711", None]
    group = next_attempt(ids[0].group_id)
    base = Scene.admit(scene, 1)[0]
    return [
        replace(base, stored_rollout=stored[i], ids=replace(one, group_id=group, rollout_id=f"{group}/{i}", sequence=6,
                                                             min_version=1))
        for i, one in enumerate(ids)
    ]  # fmt: skip


# --------------------------------------------------------------------------------------------- letters


@pytest.mark.law("twice", "fencing")
@pytest.mark.parametrize(("role", "topic"), [("buffer", "verified"), ("trainer", "batches")])
def test_a_foreign_record_stops_nobody_and_gets_one_letter_over_restarts(tmp_path: Path, role: str, topic: str) -> None:
    scene = Scene(tmp_path)
    scene.put_raw(NewRecord(topic, 0, b"x", b"not ours", (("contract", b"claim"),)))
    if role == "buffer":
        scene.verify(0)
    else:
        scene.batch(0)
    worker = RoleDriver(scene, role)
    worker.work()
    worker.restart()
    worker.work()
    letters = [message for message in scene.messages("dead") if isinstance(message, DeadLetter)]
    assert [(one.role, one.topic, one.offset) for one in letters] == [(role, topic, 0)]
    if role == "buffer":
        scene.verify(1)
        worker.work()
        assert len(scene.messages("outcomes")) == 2, "what lies behind it came through"
    else:
        assert any(isinstance(one, StepRecord) and one.batch_sequence == 0 for one in scene.messages("steps"))


def test_a_poison_message_on_each_partition_stops_none(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.announce(0)
    for partition in range(3):
        scene.put_raw(NewRecord("tasks", partition, b"x", b"\xc1", (("contract", b"task"), ("contract_version", b"1"))))
        scene.put_raw(NewRecord("rollouts", partition, b"x", None, ()))
        scene.put_raw(NewRecord("rollouts", partition, b"x", b"\xc1", (("contract", b"rollout"),)))
    scene.admit(0, 1, 2)
    for role in ("explorer", "verifier", "buffer"):
        RoleDriver(scene, role).work()
    assert len(scene.messages("verified")) == 6
    assert {outcome.result for outcome in scene.messages("outcomes")} == {GroupResult.batched}  # type: ignore[union-attr]


# --------------------------------------------------------------------------------------------- all together


@pytest.mark.slow
@pytest.mark.law("lost", "unscorable")
def test_after_a_reward_was_mended_all_that_died_of_it_is_trained(tmp_path: Path) -> None:
    """Everything dies and the verifier stops by its own rule; after the mend, each dead group comes to a batch."""
    mended.clear()
    config = make_config(
        tasksets__sums={"source": "arithmetic", "reward": SECRET}, run__steps=30, verifier__max_dead_share=0.4,
        feeder__groups_per_batch=8, policies={"fake": {"answer_depends_on": "task"}},
    )  # fmt: skip
    before = Simulation(config, folder=tmp_path, seed=2)
    before.run()
    assert before.failed is not None
    assert (before.failed.role, before.failed.exit_code) == ("verifier", 6)
    dead = read_dead(Log(before.transport()), now=before.clock.now())
    assert len(dead.letters) >= 200 - 64
    assert len(dead.groups) > 60
    assert before.audit().fine

    mended.append(True)
    after = Simulation(config, folder=tmp_path / "after", seed=3)
    after.log, after.store, after.clock = before.log, before.store, before.clock
    after.log.fault = after.store.fault = None
    places = stored_rollouts(Log(after.transport()), [group.group_id for group in dead.groups])
    for group, stored in places.items():
        retry(after, group, stored=stored)
    after.run()
    report = after.audit()
    assert report.fine, report.to_text()
    outcomes = {one.group_id: one for one in after.messages("outcomes") if isinstance(one, GroupOutcome)}
    assert {outcomes[next_attempt(group)].result for group in places} == {GroupResult.batched}
    verified = [one for one in after.messages("verified") if isinstance(one, VerifiedRollout)]
    assert sum(one.verdict is not None for one in verified) >= 2 * len(places)
