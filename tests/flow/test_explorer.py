"""The explorer alone: who waits for which weights, what is stamped, what becomes of tasks that fail."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rftstream.contracts import codec
from rftstream.contracts.dead import DeadLetter
from rftstream.contracts.outcomes import GroupResult
from rftstream.contracts.records import NewRecord, TopicPartition
from rftstream.contracts.rollouts import Rollout, RolloutStatus
from rftstream.contracts.tasks import ChatMessage, Problem, Sampling, Task
from rftstream.contracts.versions import VersionName
from rftstream.metrics import REGISTRY
from rftstream.service.loops.tracker import decode_finished
from rftstream.testing import RoleDriver
from tests.flow.disturbed import FaultAt
from tests.flow.scene import Scene

SLOW = {"policies__fake": {"tokens_per_s": 10.0, "mean_tokens": 40.0, "sigma": 0.0}}
"""Four seconds for each rollout."""


def rollouts_of(scene: Scene) -> dict[str, Rollout]:
    rollouts = [message for message in scene.messages("rollouts") if isinstance(message, Rollout)]
    assert len({one.ids.rollout_id for one in rollouts}) == len(rollouts)
    return {one.ids.rollout_id: one for one in rollouts}


def sequences_of(scene: Scene) -> list[int]:
    return sorted(one.ids.sequence for one in rollouts_of(scene).values())


def versions_of(rollout: Rollout) -> list[tuple[int, int]]:
    return [(span.version, span.count) for segment in rollout.segments for span in segment.versions]


def work_for(scene: Scene, *explorers: RoleDriver, seconds: float) -> None:
    until = scene.clock.now() + seconds
    while scene.clock.now() < until:
        for explorer in explorers:
            explorer.tick()
        scene.clock.advance(0.05)


# --------------------------------------------------------------------------------------------- the ordinary


@pytest.mark.law("conservation")
def test_one_rollout_for_each_task_on_its_partition(scene: Scene) -> None:
    scene.announce(0)
    tasks = {task.ids.rollout_id: task for task in scene.admit(*range(7))}
    RoleDriver(scene, "explorer").work()
    rollouts = rollouts_of(scene)
    assert rollouts.keys() == tasks.keys()
    for record in scene.records("rollouts"):
        rollout = codec.from_record(record)
        assert isinstance(rollout, Rollout)
        task = tasks[rollout.ids.rollout_id]
        assert record.partition == rollout.ids.sequence % 3
        assert (rollout.ids, rollout.problem, rollout.sampling) == (task.ids, task.problem, task.sampling)
        assert rollout.status is RolloutStatus.completed
        assert versions_of(rollout) == [(0, rollout.num_tokens)]
    assert scene.transport().admin.lag("explorer", "tasks") == {TopicPartition("tasks", p): 0 for p in range(3)}


def test_the_time_of_each_rollout_is_measured(tmp_path: Path) -> None:
    def seen(what: str) -> float:
        return REGISTRY.get_sample_value(f"rftstream_rollout_seconds_{what}") or 0.0

    count, total = seen("count"), seen("sum")
    scene = Scene(tmp_path, policies__fake={"tokens_per_s": 2.0}, groups=range(3))
    RoleDriver(scene, "explorer").work()
    rollouts = rollouts_of(scene).values()
    assert seen("count") - count == len(rollouts) > 0
    took = sum(rollout.finished_at - rollout.started_at for rollout in rollouts)
    assert took > 0 and abs(seen("sum") - total - took) < 1e-6


def test_nothing_is_sampled_before_the_first_weights(scene: Scene) -> None:
    scene.admit(0)
    explorer = RoleDriver(scene, "explorer")
    explorer.work()
    assert rollouts_of(scene) == {}
    scene.announce(0)
    explorer.work()
    assert len(rollouts_of(scene)) == 2


def test_nothing_is_done_before_the_manifest(tmp_path: Path) -> None:
    scene = Scene(tmp_path, manifest=False, groups=[0])
    explorer = RoleDriver(scene, "explorer")
    explorer.work()
    assert rollouts_of(scene) == {}
    scene.put_manifest()
    explorer.work()
    assert len(rollouts_of(scene)) == 2


# --------------------------------------------------------------------------------------------- versions


@pytest.mark.law("staleness")
def test_a_task_waits_for_its_min_version_and_holds_up_nobody(tmp_path: Path) -> None:
    scene = Scene(tmp_path, transport__partitions=1, groups=[0])
    scene.admit(1, min_version=2)
    scene.admit(2, min_version=1)
    scene.admit(3)
    explorer = RoleDriver(scene, "explorer")
    explorer.work()
    assert sequences_of(scene) == [0, 0, 3, 3]
    scene.announce(1)
    explorer.work()
    assert sequences_of(scene) == [0, 0, 2, 2, 3, 3]
    scene.announce(2)
    explorer.work()
    found = {one.ids.sequence: versions_of(one)[0][0] for one in rollouts_of(scene).values()}
    assert found == {0: 0, 1: 2, 2: 1, 3: 0}


@pytest.mark.law("lineage")
def test_the_newest_weights_are_taken_over_in_the_middle(tmp_path: Path) -> None:
    scene = Scene(tmp_path, **SLOW, groups=[0])
    explorer = RoleDriver(scene, "explorer")
    work_for(scene, explorer, seconds=1.0)
    scene.announce(1)
    scene.announce(2)  # 1 is never looked at
    work_for(scene, explorer, seconds=1.0)
    scene.announce(3)
    explorer.work()
    for rollout in rollouts_of(scene).values():
        assert rollout.num_tokens == 40
        versions = versions_of(rollout)
        assert [version for version, _ in versions] == [0, 2, 3]
        assert sum(count for _, count in versions) == 40
        assert all(8 <= count <= 12 for _, count in versions[:2])
        (segment,) = rollout.segments
        assert [span.start for span in segment.versions] == [4, 4 + versions[0][1], 44 - versions[2][1]]


@pytest.mark.law("staleness")
def test_after_a_rollback_who_needs_newer_weights_waits_in_the_middle(tmp_path: Path) -> None:
    scene = Scene(tmp_path, **SLOW)
    for version in range(4):
        scene.announce(version)
    scene.admit(0, min_version=3)
    explorer = RoleDriver(scene, "explorer")
    work_for(scene, explorer, seconds=1.0)
    scene.announce(1, epoch=2, resumed=True)
    scene.admit(1)
    scene.admit(2, min_version=3)
    work_for(scene, explorer, seconds=0.5)
    health = explorer.service.health()
    assert (health["version"], health["sampling"], health["waiting"], health["paused"]) == (1, 2, 4, 2)
    work_for(scene, explorer, seconds=8.0)
    rollouts = rollouts_of(scene)
    assert {one.ids.sequence: versions_of(one) for one in rollouts.values()} == {1: [(1, 40)]}
    assert {span.trainer_epoch for one in rollouts.values() for span in one.segments[0].versions} == {2}
    scene.announce(2, epoch=2)
    work_for(scene, explorer, seconds=1.0)
    assert sequences_of(scene) == [1, 1]
    scene.announce(3, epoch=2)
    explorer.work()
    for one in rollouts_of(scene).values():
        stamps = [(span.trainer_epoch, span.version, span.count) for span in one.segments[0].versions]
        if one.ids.sequence == 0:
            assert [stamp[:2] for stamp in stamps] == [(1, 3), (2, 3)]
            assert 8 <= stamps[0][2] <= 12
        elif one.ids.sequence == 2:
            assert stamps == [(2, 3, 40)]


def test_after_a_rollback_others_go_on_with_older_weights_at_once(tmp_path: Path) -> None:
    scene = Scene(tmp_path, **SLOW)
    for version in range(4):
        scene.announce(version)
    scene.admit(0, min_version=1)
    explorer = RoleDriver(scene, "explorer")
    work_for(scene, explorer, seconds=1.0)
    scene.announce(1, epoch=2, resumed=True)
    explorer.work()
    for rollout in rollouts_of(scene).values():
        assert [version for version, _ in versions_of(rollout)] == [3, 1]


@pytest.mark.law("fencing")
def test_a_replaced_trainers_weights_are_refused(scene: Scene) -> None:
    scene.announce(0)
    scene.announce(0, epoch=2, resumed=True)
    scene.announce(1, epoch=1)
    scene.admit(0, min_version=1)
    scene.admit(1)
    explorer = RoleDriver(scene, "explorer")
    explorer.work()
    assert sequences_of(scene) == [1, 1]
    assert explorer.service.health()["weights_refused"] == 1


def test_weights_that_are_gone_are_passed_over(scene: Scene) -> None:
    scene.announce(0)
    explorer = RoleDriver(scene, "explorer")
    scene.admit(0)
    explorer.work()
    scene.announce(1, skill=1)
    scene.store.delete("versions/000001-00000001.safetensors")
    scene.admit(1)
    scene.admit(2, min_version=1)
    explorer.work()
    assert sequences_of(scene) == [0, 0, 1, 1]
    scene.announce(2)
    scene.clock.advance(2.0)
    explorer.work()
    assert {versions_of(one)[0][0] for one in rollouts_of(scene).values() if one.ids.sequence == 2} == {2}


@pytest.mark.law("lineage")
def test_damaged_weights_are_never_sampled_with(scene: Scene) -> None:
    scene.announce(0)
    name = "versions/000001-00000000.safetensors"
    scene.store.objects[name] = scene.store.objects[name][:-1] + b"?"
    scene.admit(0)
    explorer = RoleDriver(scene, "explorer")
    explorer.work()
    assert rollouts_of(scene) == {}
    scene.announce(1)
    scene.clock.advance(2.0)
    explorer.work()
    assert {versions_of(one)[0][0] for one in rollouts_of(scene).values()} == {1}


# --------------------------------------------------------------------------------------------- what goes wrong


@pytest.mark.law("conservation")
def test_tasks_of_a_decided_group_are_skipped(scene: Scene) -> None:
    scene.announce(0)
    scene.decide(1, GroupResult.expired)
    scene.decide(2, GroupResult.expired, late=True)  # says nothing about the group
    scene.admit(0, 1, 2)
    scene.admit(3, min_version=9)
    explorer = RoleDriver(scene, "explorer")
    explorer.work()
    assert Counter((one.ids.sequence, one.status) for one in rollouts_of(scene).values()) == {
        (0, "completed"): 2,
        (1, "skipped"): 2,
        (2, "completed"): 2,
    }
    scene.decide(3, GroupResult.dead)
    explorer.work()
    skipped = [one for one in rollouts_of(scene).values() if one.status is RolloutStatus.skipped]
    assert sorted(one.ids.sequence for one in skipped) == [1, 1, 3, 3]
    assert all(one.segments == () and one.num_tokens == 0 and one.problem is not None for one in skipped)


def damaged(scene: Scene, sequence: int, *, headers: bool = True) -> NewRecord:
    """A task whose body is not msgpack."""
    task = Task(ids=scene.siblings(sequence)[0], problem=Problem(messages=()), sampling=Sampling(), seed=1)
    record = codec.to_record(task, "tasks", sequence % 3, run="flow")
    kept = record.headers if headers else tuple(pair for pair in record.headers if pair[0].startswith("contract"))
    return NewRecord("tasks", record.partition, record.key, b"\xc1", kept)


@pytest.mark.law("conservation")
def test_an_undecodable_task_yields_its_record_and_a_dead_letter(tmp_path: Path) -> None:
    scene = Scene(tmp_path, transport__partitions=3, groups=[0])
    scene.put_raw(damaged(scene, 3))
    scene.put_raw(damaged(scene, 6, headers=False))
    scene.admit(9)
    RoleDriver(scene, "explorer").work()
    rollouts = rollouts_of(scene)
    assert Counter(one.status for one in rollouts.values()) == {"completed": 4, "undecodable": 1}
    broken = next(one for one in rollouts.values() if one.status is RolloutStatus.undecodable)
    assert broken.ids == scene.siblings(3)[0]
    assert broken.problem is None
    letters = [one for one in scene.messages("dead") if isinstance(one, DeadLetter)]
    assert [(one.topic, one.partition, one.value, one.reason) for one in letters] == [
        ("tasks", 0, b"\xc1", "undecodable")
    ] * 2
    assert [one.offset for one in letters] == [2, 3]
    assert all("tasks[0]@" in one.detail for one in letters)


def test_a_policy_that_fails(tmp_path: Path) -> None:
    scene = Scene(tmp_path, policies__fake={"fail_share": 1.0}, groups=[0])
    RoleDriver(scene, "explorer").work()
    assert {(one.status, one.error) for one in rollouts_of(scene).values()} == {
        (RolloutStatus.failed, "the fake policy was told to fail")
    }


@pytest.mark.parametrize("where", ["start", "reply", "close"])
def test_an_environment_that_raises(tmp_path: Path, where: str) -> None:
    name = "tests.flow.environments:Conversation"
    scene = Scene(tmp_path, environments={name: {"fails_in": where}})
    scene.announce(0)
    scene.admit(0, environment=name)
    scene.admit(1)
    RoleDriver(scene, "explorer").work()
    rollouts = rollouts_of(scene)
    assert len(rollouts) == 4
    for rollout in rollouts.values():
        if rollout.ids.sequence == 1 or where == "close":
            assert rollout.status is RolloutStatus.completed
        else:
            assert rollout.status is RolloutStatus.failed
            assert "RuntimeError: the environment does not" in (rollout.error or "")
            assert bool(rollout.segments) == (where == "reply")


@pytest.mark.parametrize("answer", ["nothing", "metrics", "text", "number", "name"])
def test_an_environment_that_answers_nonsense(tmp_path: Path, answer: str) -> None:
    name = "tests.flow.environments:Careless"
    scene = Scene(tmp_path, environments={name: {"fails_in": answer}})
    scene.announce(0)
    scene.admit(0, environment=name)
    scene.admit(1)
    RoleDriver(scene, "explorer").work()
    rollouts = rollouts_of(scene)
    by_status = Counter((one.ids.sequence, one.status) for one in rollouts.values())
    assert by_status == {(0, "failed"): 2, (1, "completed"): 2}
    assert all(one.error for one in rollouts.values() if one.ids.sequence == 0)


def test_a_rollout_that_outgrows_the_record_keeps_its_length_alone(scene: Scene) -> None:
    scene.announce(0)
    scene.admit(0, prompt="x" * 950_000 + "1+2=")
    scene.admit(1)
    RoleDriver(scene, "explorer").work()
    by_status = Counter(one.status for one in rollouts_of(scene).values())
    assert by_status == {"oversized": 2, "completed": 2}
    for one in rollouts_of(scene).values():
        if one.status is RolloutStatus.oversized:
            assert (one.num_tokens, one.segments, one.turns) == (2, (), ())
            assert "bytes, expected at most" in (one.error or "")


def test_a_task_as_large_as_a_record_can_be(scene: Scene) -> None:
    scene.announce(0)
    ids = scene.siblings(0)
    large = Problem(messages=(ChatMessage(role="user", content="1+2="),), info={"image": "x" * ((8 << 20) - 2000)})
    scene.put("tasks", *(Task(ids=one, problem=large, sampling=Sampling(), seed=1) for one in ids))
    scene.admit(1)
    RoleDriver(scene, "explorer").work()
    assert Counter(one.status for one in rollouts_of(scene).values()) == {"oversized": 2, "completed": 2}


def test_a_large_record_that_cannot_be_decoded_is_named_by_its_dead_letter(scene: Scene) -> None:
    scene.announce(0)
    record = damaged(scene, 0)
    scene.put_raw(NewRecord("tasks", 0, record.key, b"\xc1" * ((8 << 20) - 600), record.headers))
    scene.admit(3)
    RoleDriver(scene, "explorer").work()
    assert Counter(one.status for one in rollouts_of(scene).values()) == {"undecodable": 1, "completed": 2}
    (letter,) = scene.messages("dead")
    assert isinstance(letter, DeadLetter)
    assert letter.value is None
    assert (letter.topic, letter.partition, letter.offset) == ("tasks", 0, 0)
    assert "too large" in letter.detail


def test_a_prompt_longer_than_the_context_fails(tmp_path: Path) -> None:
    scene = Scene(tmp_path, model__context=10)
    scene.announce(0)
    scene.admit(0, prompt="what is     1+2=")
    scene.admit(1)
    RoleDriver(scene, "explorer").work()
    for one in rollouts_of(scene).values():
        if one.ids.sequence == 0:
            assert one.status is RolloutStatus.failed
            assert one.error == "a prompt of 16 tokens leaves no room in the context of 10"
        else:
            assert one.status is RolloutStatus.completed


def test_a_prompt_longer_than_the_context_is_cut_where_the_taskset_says_so(tmp_path: Path) -> None:
    scene = Scene(
        tmp_path,
        model__context=10,
        sampling__max_tokens=4,
        tasksets={"sums": {"source": "arithmetic", "too_long": "truncate"}},
    )
    scene.announce(0)
    scene.admit(0, prompt="what is     1+2=")
    RoleDriver(scene, "explorer").work()
    for one in rollouts_of(scene).values():
        assert one.status is RolloutStatus.completed
        (segment,) = one.segments
        assert bytes(segment.token_ids.numpy()[:6].tolist()) == b"  1+2="
        assert segment.loss_mask.numpy().tolist() == [0] * 6 + [1] * one.num_tokens


# --------------------------------------------------------------------------------------------- out of order


MIXED = {"policies__fake": {"tokens_per_s": 10.0, "mean_tokens": 30.0, "sigma": 1.5}, "transport__partitions": 1}


@pytest.mark.law("lost", "twice")
def test_a_successor_does_what_is_not_finished_and_nothing_else(tmp_path: Path) -> None:
    scene = Scene(tmp_path, **MIXED, groups=range(10))
    first = RoleDriver(scene, "explorer", process="first")
    work_for(scene, first, seconds=2.0)
    done_by_first = rollouts_of(scene)
    assert 4 < len(done_by_first) < 16
    position = scene.transport().admin.committed("explorer")[TopicPartition("tasks", 0)]
    finished = decode_finished(position)
    assert position.offset + len(finished) == len(done_by_first)
    assert finished, "the seeds of this test finish in order, so it shows nothing"
    del first  # killed
    scene.announce(1)
    scene.clock.advance(11.0)
    second = RoleDriver(scene, "explorer", process="second")
    second.work(within_s=0.9)
    rollouts = rollouts_of(scene)
    assert len(rollouts) == 20
    assert {name for name, one in rollouts.items() if versions_of(one)[0][0] == 1} == rollouts.keys() - done_by_first
    assert scene.transport().admin.committed("explorer")[TopicPartition("tasks", 0)] == (20, "0")


@pytest.mark.law("twice", "fencing")
def test_a_worker_that_was_away_publishes_nothing_of_what_others_took_over(tmp_path: Path) -> None:
    scene = Scene(tmp_path, **MIXED, groups=range(10))
    first = RoleDriver(scene, "explorer", process="first")
    work_for(scene, first, seconds=2.0)
    before = rollouts_of(scene)
    second = RoleDriver(scene, "explorer", process="second")
    scene.clock.advance(11.0)  # the first one stands still
    work_for(scene, second, seconds=1.0)
    work_for(scene, first, second, seconds=30.0)
    assert len(rollouts_of(scene)) == 20
    assert len(before) < 20


@pytest.mark.law("twice")
@pytest.mark.parametrize("point", ["before_commit", "after_commit"])
def test_a_worker_that_stood_still_in_the_middle_of_its_commit(tmp_path: Path, point: str) -> None:
    """Its partitions went to another one meanwhile, and came back: its transaction is of an older assignment."""
    scene = Scene(tmp_path, transport__partitions=2, groups=range(4))
    first = RoleDriver(scene, "explorer", process="first")

    def stand_still() -> None:
        second = RoleDriver(scene, "explorer", process="second")
        scene.clock.advance(11.0)
        second.work()
        assert len(rollouts_of(scene)) == 8
        second.stop()

    scene.log.fault = stood = FaultAt(point, stand_still, "first", most=1)
    first.work()
    assert stood.count == 1
    scene.admit(4)
    first.work()
    assert sequences_of(scene) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_told_to_leave_it_finishes_what_cannot_be_saved(tmp_path: Path) -> None:
    scene = Scene(tmp_path, explorer__max_concurrent=4, **MIXED)
    scene.announce(0)
    scene.admit(*range(10), environment="tests.flow.environments:Conversation")
    explorer = RoleDriver(scene, "explorer")
    work_for(scene, explorer, seconds=4.0)
    before = len(rollouts_of(scene))
    explorer.stop()
    assert len(rollouts_of(scene)) > before
    assert scene.log.group("explorer").members == {}
    RoleDriver(scene, "explorer", process="successor").work(within_s=0.9)
    assert len(rollouts_of(scene)) == 20


@pytest.mark.slow
def test_it_finds_how_many_its_engine_takes_and_a_successor_begins_anew(tmp_path: Path) -> None:
    fake = {"fake": {"tokens_per_s": 20.0, "mean_tokens": 30.0, "batch_size": 100}}
    scene = Scene(tmp_path, explorer__max_concurrent="auto", policies=fake, groups=range(500))
    explorer = RoleDriver(scene, "explorer")

    def limit() -> float:
        found = REGISTRY.get_sample_value("rftstream_max_concurrent")
        assert found is not None and found == explorer.service.health()["max_concurrent"]
        return found

    begins_with = limit()
    work_for(scene, explorer, seconds=8.0)
    assert begins_with == 64 and 90 < limit() <= 256
    explorer = RoleDriver(scene, "explorer", process="successor")
    assert limit() == 64
    work_for(scene, explorer, seconds=60.0)
    assert len(rollouts_of(scene)) == 1000


@pytest.mark.law("lost")
def test_told_to_leave_it_gives_back_what_waits_for_newer_weights(tmp_path: Path) -> None:
    scene = Scene(tmp_path, groups=[0])
    scene.admit(1, min_version=1)
    explorer = RoleDriver(scene, "explorer")
    explorer.work()
    explorer.stop()
    assert sequences_of(scene) == [0, 0]
    scene.announce(1)
    RoleDriver(scene, "explorer", process="successor").work()
    assert sequences_of(scene) == [0, 0, 1, 1]


def test_it_leaves_when_the_run_is_finished(tmp_path: Path) -> None:
    from rftstream.contracts.control import RunFinished

    scene = Scene(tmp_path, **SLOW, groups=[0])
    explorer = RoleDriver(scene, "explorer")
    work_for(scene, explorer, seconds=0.5)
    scene.put("control", RunFinished(reason="steps", name=VersionName(trainer_epoch=1, version=1), finished_at=0.0))
    explorer.work()
    assert explorer.done
    assert rollouts_of(scene) == {}


# --------------------------------------------------------------------------------------------- several turns


def turns_of(scene: Scene, environment: str, **more: Any) -> list[Rollout]:
    scene.announce(0)
    scene.admit(0, environment=f"tests.flow.environments:{environment}", **more)
    RoleDriver(scene, "explorer").work()
    return list(rollouts_of(scene).values())


def test_an_agent_that_rewrites_its_context_has_two_segments(tmp_path: Path) -> None:
    for rollout in turns_of(Scene(tmp_path), "Rewriter"):
        assert rollout.status is RolloutStatus.completed
        assert [turn.role for turn in rollout.turns] == ["assistant", "user", "assistant"]
        assert len(rollout.segments) == 2
        for segment, prompt in zip(rollout.segments, (b"1+2=", rollout.turns[1].content.encode()), strict=True):
            mask = segment.loss_mask.numpy()
            assert bytes(segment.token_ids.numpy()[mask == 0].tolist()) == prompt
            assert mask.tolist() == [0] * len(prompt) + [1] * int(mask.sum())
            logprobs = segment.behavior_logprobs.numpy()
            assert (logprobs[mask == 0] == 0).all()
            assert (logprobs[mask == 1] < 0).all()
            assert sum(span.count for span in segment.versions) == mask.sum()
        assert rollout.num_tokens == sum(int(segment.loss_mask.numpy().sum()) for segment in rollout.segments)


def test_turns_end_with_the_rollouts_tokens(tmp_path: Path) -> None:
    for rollout in turns_of(Scene(tmp_path), "Conversation", sampling=Sampling(max_tokens=3)):
        assert rollout.status is RolloutStatus.truncated
        assert rollout.num_tokens == 3
        assert [turn.num_tokens for turn in rollout.turns if turn.role == "assistant"] == [2, 1]


def test_turns_end_with_the_context(tmp_path: Path) -> None:
    scene = Scene(
        tmp_path,
        model__context=30,
        environments={"tests.flow.environments:Conversation": {"turns": 5, "reply_length": 20}},
    )
    for rollout in turns_of(scene, "Conversation"):
        assert rollout.status is RolloutStatus.truncated
        assert rollout.error is None
        assert [turn.role for turn in rollout.turns] == ["assistant", "user"]
        assert rollout.metrics == {"turns": 1.0}


def test_what_the_policy_sees_and_what_a_person_reads(tmp_path: Path) -> None:
    scene = Scene(tmp_path, environments={"tests.flow.environments:Conversation": {"turns": 3}})
    for rollout in turns_of(scene, "Conversation"):
        asked = [turn.content for turn in rollout.turns if turn.role == "user"]
        assert asked == ["1+1=", "2+2="]
        assert rollout.metrics == {"turns": 3.0}
        (segment,) = rollout.segments
        said = [turn.content if turn.role == "assistant" else f"\n{turn.content}" for turn in rollout.turns]
        tokens = [token for token in segment.token_ids.numpy().tolist() if token]
        assert bytes(tokens).decode() == "".join(["1+2=", *said]), "what was sampled stays as it was sampled"
