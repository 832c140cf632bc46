"""A taskset that grows while the run goes on: what the feeder draws of it when, also over kills, and computed again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rftstream.contracts.control import DesiredState, Drawn, TasksEnded
from rftstream.contracts.problems import NewProblem, ProblemMaker, given_problem_id, problem_digest
from rftstream.contracts.tasks import ChatMessage, Problem, Task
from rftstream.errors import ConfigError
from rftstream.roles.feeder.growth import GrowthWalk
from rftstream.testing import RoleDriver
from rftstream.testing.faults import Kill
from tests.flow.disturbed import FaultAt, work_on
from tests.flow.scene import Scene


def new_problem(
    text: str, *, taskset: str = "more", problem_id: str | None = None, answer: str | None = None
) -> NewProblem:
    problem = Problem(messages=(ChatMessage(role="user", content=text),), answer=answer or str(len(text)))
    digest = problem_digest(problem)
    return NewProblem(
        problem_id=problem_id or given_problem_id(taskset, digest), taskset=taskset, problem=problem, digest=digest,
        maker=ProblemMaker.person, made_by="ada",
    )  # fmt: skip


def growing(folder: Path, *, more: dict[str, Any] | None = None, base: bool = True, **settings: Any) -> Scene:
    tasksets: dict[str, Any] = {"sums": {"source": "arithmetic"}} if base else {}
    tasksets["more"] = {"source": "log:problems", **(more or {})}
    return Scene(folder, manifest=False, tasksets=tasksets, **settings)


def groups_of(scene: Scene) -> list[str]:
    tasks = [task for task in scene.messages("tasks") if isinstance(task, Task) and task.ids.sibling == 0]
    return [task.ids.group_id for task in sorted(tasks, key=lambda task: task.ids.sequence)]


def feed(scene: Scene, feeder: RoleDriver, batches: int) -> None:
    """Let the feeder admit, as if so many batches had been trained beside those before."""
    version = max(scene.trained)
    for number in range(batches):
        scene.step(version + number + 1)
        feeder.work()


# --------------------------------------------------------------------------------------------- the walk


@pytest.mark.parametrize(("passes", "expected"), [
    (1, [(0, 0), (0, 1), None, (0, 2), None]),
    (2, [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (1, 2), None]),
    (None, [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (1, 2), (2, 0), (2, 1)]),
])  # fmt: skip
def test_new_problems_come_first_and_old_ones_again(passes: int | None, expected: list[tuple[int, int] | None]) -> None:
    """Two are there at first; a third one joins after the third draw, or when there is nothing more to draw."""
    walk, count, drawn = GrowthWalk(), 2, []
    for _ in expected:
        drawn.append(walk.next(count, passes) if walk.has_next(count, passes) else None)
        if len(drawn) == 3:
            count = 3
    assert drawn == expected


def test_nothing_is_drawn_of_an_empty_one() -> None:
    assert not GrowthWalk().has_next(0, None)


# --------------------------------------------------------------------------------------------- the feeder


@pytest.mark.law("twice", "order")
def test_problems_that_join_are_drawn_once_in_order(tmp_path: Path) -> None:
    scene = growing(tmp_path, more={"passes": 1}, base=False)
    feeder = RoleDriver(scene, "feeder")
    feeder.work()
    assert groups_of(scene) == []
    assert feeder.service.health()["waits_for_problems"] == ["more"]
    scene.put("problems", new_problem("one"), new_problem("three", taskset="other"), new_problem("seven"))
    feeder.work()
    assert groups_of(scene) == ["more/0/0/0", "more/0/1/0"]
    scene.put("problems", new_problem("eleven"), new_problem("one"), new_problem("seven", problem_id="by/another/id"))
    feeder.work()
    assert groups_of(scene) == ["more/0/0/0", "more/0/1/0", "more/0/2/0"], "what is there already has no index"
    task = next(one for one in scene.messages("tasks") if isinstance(one, Task) and one.ids.group_id == "more/0/2/0")
    assert (task.problem.messages[-1].content, task.problem.answer) == ("eleven", "6")
    assert task.problems_end == scene.records("problems")[-1].offset + 1
    assert scene.recompute().to_json() | {"draws": 3, "equal": True} == scene.recompute().to_json()


def test_a_taskset_that_never_grows_waits_and_ends_when_told(tmp_path: Path) -> None:
    scene = growing(tmp_path, base=False)
    feeder = RoleDriver(scene, "feeder")
    feeder.work()
    feeder.restart()
    feeder.work()
    assert not any(isinstance(one, TasksEnded) for one in scene.messages("control"))
    scene.ask(DesiredState.draining)
    feeder.work()
    ends = [one for one in scene.messages("control") if isinstance(one, TasksEnded)]
    assert [(end.admitted, end.reason) for end in ends] == [(0, "draining")]
    assert feeder.service.health()["waits_for_problems"] == []


def test_one_that_comes_late_gets_its_share_and_no_more(tmp_path: Path) -> None:
    """It does not make up for what others had while it was empty."""
    scene = growing(tmp_path, more={"weight": 1.0})
    feeder = RoleDriver(scene, "feeder")
    feeder.work()
    feed(scene, feeder, 10)
    before = len(groups_of(scene))
    assert before > 20
    scene.put("problems", *[new_problem(f"{'x' * number}") for number in range(1, 9)])
    feed(scene, feeder, 6)
    names = [group.partition("/")[0] for group in groups_of(scene)[before:]]
    assert 5 <= names.count("more") <= 7, names
    assert scene.recompute().fine, scene.recompute().to_text()


def play(scene: Scene, kill_at: str | None, *, bounds: Sequence[int] = (2, 3, 5)) -> None:
    """Let problems join while the feeder works; with `kill_at` it is killed at each of its commits."""
    # the claim after it and one transaction more get through
    scene.log.fault = disturbed = FaultAt(kill_at or "never", Kill, "feeder", every=3)
    feeder = RoleDriver(scene, "feeder")
    work_on(feeder)
    for version in range(1, 9):
        for number in range(bounds[version % len(bounds)]):
            scene.put("problems", new_problem("y" * (10 * version + number)))
        scene.step(version)
        work_on(feeder)
    assert kill_at is None or disturbed.num_visits > 8


OPERATORS: tuple[dict[str, Any], ...] = ({"op": "length", "max_characters": 15}, {"op": "solve_rate"})


@pytest.mark.law("derived")
@pytest.mark.parametrize("operators", [(), OPERATORS], ids=["bare", "operators"])
@pytest.mark.parametrize("point", ["before_commit", "after_commit"])
def test_a_killed_feeder_draws_the_same_of_what_has_joined(
    tmp_path: Path, point: str, operators: tuple[dict[str, Any], ...]
) -> None:
    scenes = {}
    for kill_at in (None, point):
        scenes[kill_at] = scene = growing(tmp_path / str(kill_at), pipeline=operators)
        play(scene, kill_at)
        found = scene.recompute()
        assert found.fine, found.to_text()
        assert found.num_draws >= len(groups_of(scene))
        assert len(set(groups_of(scene))) == len(groups_of(scene))
    calm, killed = (
        [(task.ids, task.problem, task.problems_end) for task in scene.messages("tasks") if isinstance(task, Task)]
        for scene in scenes.values()
    )
    assert calm == killed
    if operators:
        drawn = [one for one in scenes[point].messages("control") if isinstance(one, Drawn)][-1]
        assert drawn.skipped["more"]["length"]
        assert drawn.problems_end is not None


def test_a_wrong_end_is_told(tmp_path: Path) -> None:
    """A task that says that a problem was known which was not: the draws do not come out the same."""
    scene = growing(tmp_path, base=False, more={"passes": 1})
    feeder = RoleDriver(scene, "feeder")
    scene.put("problems", new_problem("one"), new_problem("seven"))
    feeder.work()
    assert scene.recompute().fine
    other = growing(tmp_path / "other", base=False, more={"passes": 1})
    other.put("problems", new_problem("seven"), new_problem("one"))
    other.put("tasks", *[task for task in scene.messages("tasks") if isinstance(task, Task)])
    found = other.recompute()
    assert not found.fine
    assert "its problem, computed again another one" in found.differences[0]


@pytest.mark.law("bounded")
def test_bodies_that_are_not_held_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rftstream.data.tasksets.growing.HELD_PROBLEMS", 2)
    scene = growing(tmp_path, base=False)
    scene.put("problems", *[new_problem("z" * number) for number in range(1, 6)])
    feeder = RoleDriver(scene, "feeder")
    feeder.work()
    feed(scene, feeder, 6)
    tasks = [task for task in scene.messages("tasks") if isinstance(task, Task)]
    assert {task.ids.group_id.split("/")[1] for task in tasks} == {"0", "1", "2", "3"}
    assert all(task.problem.answer == str(int(task.ids.group_id.split("/")[2]) + 1) for task in tasks)


@pytest.mark.parametrize(("changed", "told"), [
    ({"source": "log:tasks"}, "got the topic 'tasks'"),
    ({"columns": {"prompt": "question"}}, "columns: got prompt"),
])  # fmt: skip
def test_what_is_wrong_with_the_section_is_told(tmp_path: Path, changed: dict[str, Any], told: str) -> None:
    scene = growing(tmp_path, more=changed)
    with pytest.raises(ConfigError, match=f"tasksets.more: .*{told}"):
        RoleDriver(scene, "feeder")
