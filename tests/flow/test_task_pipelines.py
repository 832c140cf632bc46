"""The feeder with all built-in operators of the task side: a kill changes nothing, and an index is the same again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rftstream.config import loader
from rftstream.contracts.control import Drawn
from rftstream.contracts.outcomes import GroupOutcome, GroupResult, RolloutSummary
from rftstream.contracts.rollouts import RolloutStatus
from rftstream.contracts.tasks import Task
from rftstream.errors import ConfigError
from rftstream.testing import RoleDriver
from rftstream.testing.faults import Kill
from tests.flow.disturbed import FaultAt, work_on
from tests.flow.scene import Scene
from tests.flow.test_pipelines import check_balance, feeding, indexes_of, own, tasks_of

ALL: tuple[dict[str, Any], ...] = (
    {"op": "length", "max_characters": 100},
    {"op": "language"},
    {"op": "dedupe"},
    {"op": "mixture", "adaptive": True},
    {"op": "curriculum", "stages": [["low"], ["high"]], "groups": 4, "success": 0.1},
    {"op": "solve_rate", "keep": [0.1, 0.9]},
    {"op": "budget", "max_size": 12},
)
OWN = (own("Seen"), own("Sizes"))


def write_problems(folder: Path, name: str, texts: list[str]) -> dict[str, Any]:
    rows = [{"prompt": text, "answer": "1", "level": "low" if n % 2 else "high"} for n, text in enumerate(texts)]
    path = folder / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return {"source": f"jsonl:{path}"}


@pytest.mark.slow
@pytest.mark.law("lost", "twice", "derived")
@pytest.mark.parametrize("point", ["before_commit", "after_commit"])
@pytest.mark.parametrize("operators", [ALL, OWN], ids=["built in", "own"])
def test_a_feeder_killed_at_every_commit_admits_the_same(
    tmp_path: Path, point: str, operators: tuple[dict[str, Any], ...]
) -> None:
    texts = [f"{number}+{number % 7}=" for number in range(40)]

    def play(folder: Path, *, kills: bool) -> Scene:
        source = write_problems(folder, "sums", [*texts, *texts[:6]])
        held_out = write_problems(folder, "held_out", texts[10:14])
        scene = feeding(folder, *operators, tasksets={"sums": source}, evaluations={"held-out": held_out},
                        feeder__groups_per_batch=4, buffer__max_refill=10_000)  # fmt: skip
        scene.log.fault = deaths = FaultAt(point if kills else "never", Kill, "feeder", every=3)
        feeder = RoleDriver(scene, "feeder")
        for version in range(1, 9):
            work_on(feeder)
            groups = {task.ids.group_id: task.ids for task in tasks_of(scene)}
            for group in list(groups)[4 * version - 4 : 4 * version]:
                scene.put("outcomes", outcome_of(group, groups[group].sequence, groups[group].group_size, version))
            scene.step(version, trained=4 * version)
        assert deaths.num_visits > 8 or not kills
        return scene

    calm, killed = play(tmp_path / "calm", kills=False), play(tmp_path / "killed", kills=True)
    assert check_balance(killed) == check_balance(calm)
    assert [(task.ids, task.seen) for task in tasks_of(killed)] == [(task.ids, task.seen) for task in tasks_of(calm)]
    assert len({task.seen for task in tasks_of(calm)}) > 3
    found = killed.recompute()
    assert found.fine and found.num_draws == sum(check_balance(killed).drawn.values()), found.to_text()
    found = killed.recompute(loader.replace(killed.config, pipeline=operators[:1]))
    assert not found.fine, "by other operators"
    if operators is OWN:
        return
    skipped = drawn_skips(calm)
    assert {"dedupe", "mixture", "curriculum"} <= set(skipped)
    assert {"equal in sums", "equal in the evaluation held-out"} == set(skipped["dedupe"])
    assert "of an earlier stage" in skipped["curriculum"], "the second stage began"
    assert len({task.ids.group_size for task in tasks_of(calm)}) > 2


def outcome_of(group: str, sequence: int, size: int, version: int) -> GroupOutcome:
    index = int(group.split("/")[2])
    rollouts = tuple(
        RolloutSummary(rollout_id=f"{group}/{n}", num_tokens=1, status=RolloutStatus.completed,
                       reward=float((n + index) % 4 == 0))
        for n in range(size)
    )  # fmt: skip
    return GroupOutcome(group_id=group, taskset="sums", sequence=sequence, result=GroupResult.batched,
                        reason="complete", rollouts=rollouts, batch_sequence=version - 1)  # fmt: skip


def drawn_skips(scene: Scene) -> dict[str, dict[str, int]]:
    return [message for message in scene.messages("control") if isinstance(message, Drawn)][-1].skipped["sums"]


def test_what_is_wrong_with_the_problems_is_told_with_the_place_of_the_operator(tmp_path: Path) -> None:
    source = write_problems(tmp_path, "sums", ["1+1=", "1+2="])
    scene = feeding(tmp_path, {"op": "curriculum", "stages": [["low"], ["top"]]}, tasksets={"sums": source})
    with pytest.raises(ConfigError, match=r"pipeline.0.column: problem 0 of the taskset sums has level = 'high'"):
        RoleDriver(scene, "feeder").work()


def test_dedupe_of_one_taskset_leaves_the_others_alone(tmp_path: Path) -> None:
    texts = ["1+1=", "1+1=", "1+2="]
    first = {**write_problems(tmp_path, "a", texts), "shuffle": False, "passes": 1}
    second = {**write_problems(tmp_path, "b", texts), "shuffle": False, "passes": 1}
    scene = feeding(tmp_path, tasksets={"a": first, "b": {**second, "pipeline": [{"op": "dedupe"}]}},
                    feeder__groups_per_batch=8)  # fmt: skip
    RoleDriver(scene, "feeder").work()
    assert check_balance(scene).skipped == {"b": {"dedupe": {"equal in a": 3}}}
    assert sorted(indexes_of(scene)) == [0, 1, 2]
    assert all(isinstance(task, Task) and task.ids.taskset == "a" for task in tasks_of(scene))
