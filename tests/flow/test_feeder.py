"""The feeder alone: what it admits when, under which ids, and that a restart changes nothing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rftstream.contracts import ids
from rftstream.contracts.control import Claim, DesiredState, RunManifest, TasksEnded
from rftstream.contracts.outcomes import GroupResult
from rftstream.contracts.tasks import Task
from rftstream.errors import ConfigError
from rftstream.testing import RoleDriver
from tests.flow.disturbed import FaultAt, at_commits, work_on
from tests.flow.scene import Scene


def scene_of(folder: Path, **settings: Any) -> Scene:
    return Scene(folder, manifest=False, **settings)


def tasks_of(scene: Scene) -> list[Task]:
    tasks = [message for message in scene.messages("tasks") if isinstance(message, Task)]
    return sorted(tasks, key=lambda task: (task.ids.sequence, task.ids.sibling))


def groups_of(scene: Scene) -> list[Task]:
    """The first sibling of each group."""
    return [task for task in tasks_of(scene) if task.ids.sibling == 0]


def end_of(scene: Scene) -> TasksEnded | None:
    return next((one for one in scene.messages("control") if isinstance(one, TasksEnded)), None)


# --------------------------------------------------------------------------------------------- the run


def test_the_manifest_comes_before_any_task(tmp_path: Path) -> None:
    scene = scene_of(tmp_path)
    feeder = RoleDriver(scene, "feeder")
    while not scene.records("tasks"):
        feeder.tick()
        manifests = [one for one in scene.messages("control") if isinstance(one, RunManifest)]
        assert manifests or not scene.records("tasks")
    (manifest,) = manifests
    assert manifest.partitions == 3
    assert set(manifest.digests) == {"model", "tokenizer", "chat_template", "taskset.sums"}
    feeder.restart()
    feeder.work()
    assert sum(isinstance(one, RunManifest) for one in scene.messages("control")) == 1


@pytest.mark.parametrize(("change", "named"), [
    ({"tasksets__sums": {"source": "arithmetic", "options": {"high": 4}}}, "taskset.sums"),
    ({"model__path": None, "model__make": {}}, "model"),
])  # fmt: skip
def test_a_run_does_not_go_on_with_other_data(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    scene = scene_of(tmp_path)
    RoleDriver(scene, "feeder").work()
    other = scene_of(tmp_path / "other", **change)
    other.log = scene.log
    feeder = RoleDriver(other, "feeder")
    with pytest.raises(ConfigError, match=named):
        feeder.work()
    assert len(tasks_of(scene)) == 8
    assert sum(isinstance(one, Claim) for one in scene.messages("control")) == 1, "it takes the role from nobody"


# --------------------------------------------------------------------------------------------- admission


@pytest.mark.law("conservation", "staleness")
@pytest.mark.parametrize("max_staleness", [0, 1, 2, 3])
def test_admission_at_each_moment(tmp_path: Path, max_staleness: int) -> None:
    """admitted = trained + (max_staleness + 1) * groups_per_batch + rejected, never more, and never less for long."""
    scene = scene_of(tmp_path, feeder__max_staleness=max_staleness, feeder__groups_per_batch=3)
    feeder = RoleDriver(scene, "feeder")
    trained = rejected = version = 0
    expected: list[int] = []
    """min_version of each group, by the formula."""

    def check() -> None:
        feeder.work()
        allowed = trained + (max_staleness + 1) * 3 + rejected
        while len(expected) < allowed:
            ahead = len(expected) - trained - rejected
            expected.append(max(0, version + ahead // 3 - max_staleness))
        assert [task.ids.min_version for task in groups_of(scene)] == expected

    check()
    for round_number in range(4):
        for result in (GroupResult.filtered, GroupResult.dead, GroupResult.expired)[: round_number % 4]:
            scene.decide(rejected, result)
            rejected += 1
            check()
        scene.decide(50 + round_number, GroupResult.batched, batch=version)  # neither trained nor rejected
        scene.decide(0, GroupResult.expired, late=True)  # counts no group
        check()
        version, trained = version + 1, trained + 3
        scene.step(version, trained=trained)
        check()


@pytest.mark.law("lineage")
def test_a_rollback_of_the_trainer_lowers_what_counts_as_trained(tmp_path: Path) -> None:
    scene = scene_of(tmp_path)
    feeder = RoleDriver(scene, "feeder")
    scene.step(0, resumed=True)
    for version in (1, 2, 3):
        scene.step(version)
    feeder.work()
    assert len(groups_of(scene)) == 6 + 4
    scene.step(1, epoch=2, resumed=True)
    scene.step(2, epoch=2)
    feeder.work()
    assert len(groups_of(scene)) == 10
    scene.step(3, epoch=2)
    scene.step(4, epoch=2)
    feeder.work()
    assert len(groups_of(scene)) == 8 + 4
    assert groups_of(scene)[-1].ids.min_version == 4 + (11 - 8) // 2 - 1


@pytest.mark.law("fencing")
def test_a_replaced_trainers_step_record_counts_for_nothing(tmp_path: Path) -> None:
    scene = scene_of(tmp_path)
    feeder = RoleDriver(scene, "feeder")
    scene.step(0, resumed=True)
    scene.step(1)
    scene.step(1, epoch=2, resumed=True)
    scene.step(2, epoch=1)  # a zombie
    scene.step(3, epoch=1)
    feeder.work()
    assert len(groups_of(scene)) == 2 + 4
    feeder.restart()
    feeder.work()
    assert len(groups_of(scene)) == 2 + 4


def test_it_admits_no_more_than_the_steps_need(tmp_path: Path) -> None:
    scene = scene_of(tmp_path, run__steps=3, feeder__max_staleness=4)
    feeder = RoleDriver(scene, "feeder")
    feeder.work()
    assert len(groups_of(scene)) == 6
    scene.decide(0, GroupResult.dead)
    scene.step(1)
    feeder.work()
    assert len(groups_of(scene)) == 7
    assert end_of(scene) is None


# --------------------------------------------------------------------------------------------- what a task is


@pytest.mark.law("derived")
@pytest.mark.parametrize("group_size", [1, 2, 5])
@pytest.mark.parametrize("partitions", [1, 2, 7])
def test_groups_partitions_ids_and_seeds(tmp_path: Path, group_size: int, partitions: int) -> None:
    scene = scene_of(
        tmp_path,
        feeder__group_size=group_size,
        transport__partitions=partitions,
        run__seed=11,
        feeder__groups_per_batch=5,
    )
    RoleDriver(scene, "feeder").work()
    records = scene.records("tasks")
    assert len(records) == 10 * group_size
    tasks = tasks_of(scene)
    assert [task.ids.sequence for task in tasks] == [number for number in range(10) for _ in range(group_size)]
    assert [task.ids.sibling for task in tasks] == list(range(group_size)) * 10
    assert len({task.seed for task in tasks}) == len(tasks)
    by_id = {task.ids.rollout_id: task for task in tasks}
    for record in records:
        task = by_id[(record.key or b"").decode()]
        assert record.partition == task.ids.sequence % partitions
        assert task.ids.group_size == group_size
        assert task.seed == ids.derive_seed(11, task.ids.rollout_id)
        taskset, taskset_pass, index, attempt = task.ids.group_id.split("/")
        assert (taskset, taskset_pass, attempt) == ("sums", "0", "0")
        assert 0 <= int(index) < 100


def test_tasksets_by_weight_each_with_its_own_sampling(tmp_path: Path) -> None:
    scene = scene_of(
        tmp_path, feeder__groups_per_batch=20,
        tasksets={
            "easy": {"source": "arithmetic", "weight": 3.0, "sampling": {"temperature": 0.5}},
            "hard": {"source": "arithmetic", "options": {"operation": "*"}, "sampling": {"max_tokens": 7}},
            "unused": {"source": "arithmetic", "weight": 0.0},
        },
    )  # fmt: skip
    RoleDriver(scene, "feeder").work()
    names = [task.ids.taskset for task in groups_of(scene)]
    assert Counter(names) == {"easy": 30, "hard": 10}
    for place in range(0, 40, 4):
        assert Counter(names[place : place + 4]) == {"easy": 3, "hard": 1}
    sampling = {task.ids.taskset: task.sampling for task in groups_of(scene)}
    assert (sampling["easy"].temperature, sampling["easy"].max_tokens) == (0.5, 256)
    assert (sampling["hard"].temperature, sampling["hard"].max_tokens) == (1.0, 7)


# --------------------------------------------------------------------------------------------- the end


@pytest.mark.law("derived")
def test_passes_each_in_another_order_then_the_end(tmp_path: Path) -> None:
    scene = scene_of(
        tmp_path,
        feeder__groups_per_batch=20,
        tasksets={"sums": {"source": "arithmetic", "options": {"size": 6}, "passes": 2}},
    )
    RoleDriver(scene, "feeder").work()
    places = [task.ids.group_id.split("/")[1:3] for task in groups_of(scene)]
    assert [taskset_pass for taskset_pass, _ in places] == ["0"] * 6 + ["1"] * 6
    first, second = [index for _, index in places[:6]], [index for _, index in places[6:]]
    assert sorted(first) == sorted(second) == list("012345")
    assert first != second
    assert end_of(scene) == TasksEnded(admitted=12, reason="taskset")


def test_the_order_without_shuffling(tmp_path: Path) -> None:
    scene = scene_of(tmp_path, tasksets={"sums": {"source": "arithmetic", "shuffle": False}})
    RoleDriver(scene, "feeder").work()
    assert [task.ids.group_id.split("/")[2] for task in groups_of(scene)] == list("0123")


def test_a_taskset_that_ends_leaves_the_rest_to_the_others(tmp_path: Path) -> None:
    scene = scene_of(tmp_path, feeder__groups_per_batch=20, tasksets={
        "short": {"source": "arithmetic", "options": {"size": 3}, "passes": 1},
        "long": {"source": "arithmetic", "options": {"size": 5}, "passes": 1},
    })  # fmt: skip
    RoleDriver(scene, "feeder").work()
    assert Counter(task.ids.taskset for task in groups_of(scene)) == {"short": 3, "long": 5}
    assert end_of(scene) == TasksEnded(admitted=8, reason="taskset")


def test_a_pause_stops_admission_until_it_is_taken_back(tmp_path: Path) -> None:
    scene = scene_of(tmp_path)
    feeder = RoleDriver(scene, "feeder")
    feeder.work()
    scene.ask(DesiredState.paused)
    scene.step(1)
    feeder.work()
    assert len(groups_of(scene)) == 4
    feeder.restart()
    feeder.work()
    assert len(groups_of(scene)) == 4
    scene.ask(DesiredState.running)
    feeder.work()
    assert len(groups_of(scene)) == 6


def test_draining_ends_admission_for_good(tmp_path: Path) -> None:
    scene = scene_of(tmp_path)
    feeder = RoleDriver(scene, "feeder")
    feeder.work()
    scene.ask(DesiredState.draining)
    feeder.work()
    assert end_of(scene) == TasksEnded(admitted=4, reason="draining")
    scene.step(1)
    feeder.work()
    feeder.restart()
    feeder.work()
    assert len(groups_of(scene)) == 4
    assert sum(isinstance(one, TasksEnded) for one in scene.messages("control")) == 1


# --------------------------------------------------------------------------------------------- long prompts


def long_and_short(folder: Path, lengths: list[int]) -> str:
    lines = [json.dumps({"prompt": "x" * length, "answer": "y"}) for length in lengths]
    folder.mkdir(exist_ok=True)
    (folder / "tasks.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return f"jsonl:{folder / 'tasks.jsonl'}"


def long_scene(folder: Path, lengths: list[int], too_long: str) -> Scene:
    return scene_of(folder, model__context=20, feeder__groups_per_batch=20, tasksets={"sums": {
        "source": long_and_short(folder, lengths), "too_long": too_long, "shuffle": False, "passes": 1,
    }})  # fmt: skip


def test_long_prompts_are_left_out_and_not_counted(tmp_path: Path) -> None:
    scene = long_scene(tmp_path, [5, 20, 19, 50, 7], "skip")
    feeder = RoleDriver(scene, "feeder")
    feeder.work()
    assert [task.ids.group_id.split("/")[2] for task in groups_of(scene)] == ["0", "2", "4"]
    assert [task.ids.sequence for task in groups_of(scene)] == [0, 1, 2]
    assert end_of(scene) == TasksEnded(admitted=3, reason="taskset")
    assert feeder.service.health()["left_out"] == 2


@pytest.mark.parametrize(("lengths", "too_long", "says"), [
    ([30, 40], "skip", "every prompt is longer than the context"),
    ([5, 50], "error", "problem 1 has a prompt of 50 tokens.*context of 20"),
])  # fmt: skip
def test_long_prompts_are_an_error(tmp_path: Path, lengths: list[int], too_long: str, says: str) -> None:
    feeder = RoleDriver(long_scene(tmp_path, lengths, too_long), "feeder")
    with pytest.raises(ConfigError, match=f"tasksets.sums: {says}"):
        feeder.work()


def test_long_prompts_are_cut_by_the_explorer(tmp_path: Path) -> None:
    scene = long_scene(tmp_path, [5, 50], "truncate")
    RoleDriver(scene, "feeder").work()
    assert [len(task.problem.messages[0].content) for task in groups_of(scene)] == [5, 50]


# --------------------------------------------------------------------------------------------- restarts


def happenings(scene: Scene) -> list[Callable[[], None]]:
    """What the others do in the course of a run."""
    return [
        lambda: scene.step(0, resumed=True), lambda: scene.decide(0, GroupResult.filtered), lambda: scene.step(1),
        lambda: scene.decide(1, GroupResult.dead), lambda: scene.step(2), lambda: scene.step(1, epoch=2, resumed=True),
        lambda: scene.step(2, epoch=2), lambda: scene.step(3, epoch=2), lambda: scene.step(4, epoch=2),
    ]  # fmt: skip


SETTINGS = {
    "feeder__groups_per_batch": 3,
    "tasksets": {
        "one": {"source": "arithmetic", "options": {"size": 7}, "passes": 2, "weight": 2.0},
        "two": {"source": "arithmetic", "options": {"operation": "-"}},
    },
}


def admitted_by(scene: Scene, between: Callable[[RoleDriver], None]) -> list[Any]:
    """All tasks of a run, but for their times; `between`: what is done to the feeder between two happenings."""
    feeder = RoleDriver(scene, "feeder")
    for happens in happenings(scene):
        feeder.work()
        between(feeder)
        happens()
    feeder.work()
    return [(task.ids, task.problem, task.seed, task.sampling) for task in tasks_of(scene)]


@pytest.fixture
def undisturbed(tmp_path: Path) -> list[Any]:
    return admitted_by(scene_of(tmp_path / "undisturbed", **SETTINGS), lambda feeder: None)


@pytest.mark.law("lost", "twice", "derived")
def test_a_restart_goes_on_exactly(tmp_path: Path, undisturbed: list[Any]) -> None:
    assert len(undisturbed) > 30
    assert admitted_by(scene_of(tmp_path, **SETTINGS), lambda feeder: feeder.restart()) == undisturbed


@pytest.mark.slow
@pytest.mark.law("lost", "twice", "bounded")
@pytest.mark.parametrize("length", [6, 32, 230])
def test_a_restart_goes_on_exactly_in_each_of_many_tasksets(tmp_path: Path, length: int) -> None:
    """Their names and numbers need more room than there is beside a position (4,096 bytes), or come near it."""
    tasksets = {f"{number:03}".ljust(length, "x"): {"source": "arithmetic"} for number in range(120)}
    settings = {"feeder__groups_per_batch": 40, "tasksets": tasksets}
    undisturbed = admitted_by(scene_of(tmp_path / "undisturbed", **settings), lambda feeder: None)
    assert len({ids.taskset for ids, *_ in undisturbed}) == 120
    assert admitted_by(scene_of(tmp_path, **settings), lambda feeder: feeder.restart()) == undisturbed


@pytest.mark.law("lost", "twice")
@at_commits
def test_no_fault_at_a_commit_changes_what_is_admitted(
    tmp_path: Path, undisturbed: list[Any], point: str, fault: type[BaseException]
) -> None:
    scene = scene_of(tmp_path, **SETTINGS)
    scene.log.fault = disturbed = FaultAt(point, fault, "feeder", every=3)
    feeder = RoleDriver(scene, "feeder")
    for happens in [*happenings(scene), lambda: None]:
        work_on(feeder, within_s=0.9)
        happens()
    assert [(one.ids, one.problem, one.seed, one.sampling) for one in tasks_of(scene)] == undisturbed
    assert disturbed.num_visits > 8


def test_the_first_sibling_is_greedy_where_the_algorithm_compares_with_it(tmp_path: Path) -> None:
    """And after a restart, and for a group that is put back; nothing else of its sampling changes."""
    scene = scene_of(tmp_path, trainer__algorithm="remax", sampling={"max_tokens": 7, "top_p": 0.9})
    feeder = RoleDriver(scene, "feeder")
    feeder.work()
    scene.step(1)
    feeder.restart()
    feeder.work()
    tasks = tasks_of(scene)
    assert len(tasks) > 8
    for task in tasks:
        assert task.sampling.temperature == (0.0 if task.ids.sibling == 0 else 1.0)
        assert (task.sampling.max_tokens, task.sampling.top_p) == (7, 0.9)
    plain = scene_of(tmp_path / "plain")
    RoleDriver(plain, "feeder").work()
    assert {task.sampling.temperature for task in tasks_of(plain)} == {1.0}
