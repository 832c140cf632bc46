"""The evaluator alone: which versions it evaluates, what it says of them, and that it says it once."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from math import comb
from pathlib import Path
from typing import IO, Any

import pytest

from rftstream.contracts.control import RunFinished
from rftstream.contracts.records import NewRecord
from rftstream.contracts.versions import EvalResult, VersionName
from rftstream.errors import ProducerLost, RewardError, StoreUnreachable
from rftstream.metrics import MAX_NAMES_OF_RECORD, NAMES_LEFT_OUT
from rftstream.queries.curves.evaluations import newest_and_best
from rftstream.testing import RoleDriver
from rftstream.testing.faults import Kill
from tests.flow.disturbed import FaultAt, work_on
from tests.flow.scene import Scene

HELD_OUT = {"source": "arithmetic", "options": {"size": 5}, "every": 3}


def scene_of(folder: Path, **settings: Any) -> Scene:
    return Scene(folder, **{"evaluations": {"held-out": HELD_OUT}, **settings})


def results_of(scene: Scene) -> list[EvalResult]:
    return [message for message in scene.messages("evals") if isinstance(message, EvalResult)]


def evaluated(scene: Scene) -> list[tuple[str, int, int]]:
    return [(one.evaluation, one.name.trainer_epoch, one.name.version) for one in results_of(scene)]


def finish(scene: Scene, version: int, epoch: int = 1) -> None:
    name = VersionName(trainer_epoch=epoch, version=version)
    scene.put("control", RunFinished(reason="steps", name=name, finished_at=scene.clock.now()))


# --------------------------------------------------------------------------------------------- what is due


def test_version_0_every_nth_and_the_last_one(tmp_path: Path) -> None:
    scene = scene_of(tmp_path)
    driver = RoleDriver(scene, "evaluator")
    for version in range(9):
        scene.announce(version)
        driver.work()
    assert [version for *_, version in evaluated(scene)] == [0, 3, 6]
    finish(scene, 8)
    driver.work()
    assert [version for *_, version in evaluated(scene)] == [0, 3, 6, 8]
    assert driver.done


def test_each_evaluation_in_its_own_rhythm(tmp_path: Path) -> None:
    scene = scene_of(tmp_path, evaluations={"often": {**HELD_OUT, "every": 1}, "rarely": {**HELD_OUT, "every": 4}})
    driver = RoleDriver(scene, "evaluator")
    for version in range(6):
        scene.announce(version)
    finish(scene, 5)
    driver.work()
    assert sorted(evaluated(scene)) == [*(("often", 1, n) for n in range(6)), *(("rarely", 1, n) for n in (0, 4, 5))]


def test_it_waits_for_the_last_version_that_the_run_names(tmp_path: Path) -> None:
    scene = scene_of(tmp_path)
    driver = RoleDriver(scene, "evaluator")
    scene.announce(0)
    finish(scene, 2)
    driver.work()
    assert not driver.done
    scene.announce(1)
    scene.announce(2)
    driver.work()
    assert driver.done
    assert [version for *_, version in evaluated(scene)] == [0, 2]


def test_it_goes_on_when_the_run_does(tmp_path: Path) -> None:
    scene = scene_of(tmp_path)
    driver = RoleDriver(scene, "evaluator")
    scene.announce(0)
    finish(scene, 1)
    driver.work()
    scene.put_raw(NewRecord("control", 0, b"finished", None))
    scene.announce(1)
    driver.work()
    assert not driver.done
    assert [version for *_, version in evaluated(scene)] == [0]


@pytest.mark.law("lineage")
def test_after_a_rollback_versions_are_evaluated_again_but_for_the_one_it_began_with(tmp_path: Path) -> None:
    scene = scene_of(tmp_path)
    driver = RoleDriver(scene, "evaluator")
    for version in range(7):
        scene.announce(version)
    driver.work()
    scene.announce(3, epoch=2, resumed=True)
    for version in range(4, 8):
        scene.announce(version, epoch=2)
    driver.work()
    assert [(epoch, version) for _, epoch, version in evaluated(scene)] == [(1, 0), (1, 3), (1, 6), (2, 6)]


def test_results_do_not_depend_on_how_many_samples_are_made_at_once(tmp_path: Path) -> None:
    """At the smallest number, below what there is to do, at that, and far above."""
    results = []
    for max_concurrent in (1, 14, 15, 1000):
        held_out = {**HELD_OUT, "n": 3}  # of five problems
        scene = scene_of(tmp_path / str(max_concurrent), evaluator__max_concurrent=max_concurrent,
                         evaluations={"held-out": held_out})  # fmt: skip
        scene.announce(0)
        RoleDriver(scene, "evaluator").work()
        (result,) = results_of(scene)
        results.append((result.num_tasks * result.num_samples, result.num_unscored, result.metrics["mean"]))
    assert results == [(15, 0, results[0][2])] * 4


# --------------------------------------------------------------------------------------------- what it says


def test_mean_and_pass_at_k(tmp_path: Path) -> None:
    scene = scene_of(tmp_path, evaluations={"held-out": {**HELD_OUT, "n": 4, "k": [1, 2, 4]}})
    scene.announce(0)
    RoleDriver(scene, "evaluator").work()
    (result,) = results_of(scene)
    assert (result.num_tasks, result.num_samples, result.num_unscored) == (5, 4, 0)
    assert result.generations is not None
    lines = [json.loads(line) for line in scene.store.get(result.generations).decode().splitlines()]
    assert len(lines) == 20
    passed = {}
    for line in lines:
        index = line["sample"].partition("#")[0]
        passed[index] = passed.get(index, 0) + line["reward"]
        assert line["reward"] == float(line["completion"][0]["content"].strip() == line["answer"])
        assert line["prompt"][0]["content"].endswith("=")
        (turn,) = line["completion"]
        assert turn["shown"] == f"{turn['content']}<end>", "what was sampled, to the end"
    assert result.metrics["mean"] == pytest.approx(sum(passed.values()) / 20)
    assert 0 < result.metrics["mean"] < 1, "the seeds of this test show nothing"
    for k in (1, 2, 4):
        expected = sum(1 - comb(4 - int(count), k) / comb(4, k) for count in passed.values()) / 5
        assert result.metrics[f"pass@{k}"] == pytest.approx(expected)
        assert result.metrics.get(f"best@{k}", expected) == pytest.approx(expected)  # rewards are 0 and 1
    assert result.metrics["worst@4"] == pytest.approx(sum(count == 4 for count in passed.values()) / 5)
    assert 0 < result.metrics["std"] < 1


def test_the_samples_of_a_problem_are_compared(tmp_path: Path) -> None:
    """maj@k is the share of the problems whose most frequent answer is right, beside pass@k of each sample."""
    reward = [{"name": "exact"}, {"name": "majority_vote", "weight": 0.0}]
    scene = scene_of(tmp_path, evaluations={"held-out": {**HELD_OUT, "n": 5, "k": [1, 5], "reward": reward}})
    scene.announce(0)
    RoleDriver(scene, "evaluator").work()
    (result,) = results_of(scene)
    assert result.generations is not None
    said: dict[str, list[str]] = {}
    answers: dict[str, str] = {}
    for line in map(json.loads, scene.store.get(result.generations).decode().splitlines()):
        index = line["sample"].partition("#")[0]
        said.setdefault(index, []).append(line["completion"][0]["content"].strip())
        answers[index] = line["answer"]
    right = [Counter(texts).most_common(1)[0][0] == answers[index] for index, texts in said.items()]
    assert result.metrics["metric/majority_vote.maj@5"] == sum(right) / 5
    assert result.metrics["mean"] == sum(text == answers[i] for i, texts in said.items() for text in texts) / 25
    assert 0 < result.metrics["mean"] < 1, "the seeds of this test show nothing"


def test_two_versions_differ_by_their_weights_alone(tmp_path: Path) -> None:
    scene = scene_of(tmp_path, evaluations={"held-out": {**HELD_OUT, "every": 1, "options": {"size": 20}}})
    driver = RoleDriver(scene, "evaluator")
    for version, skill in enumerate((-9.0, 0.0, 0.0, 9.0)):
        scene.announce(version, skill=skill)
        driver.work()
    means = [one.metrics["mean"] for one in results_of(scene)]
    assert means[0] == 0.0
    assert 0 < means[1] == means[2] < 1
    assert means[3] == 1.0
    assert [one.best for one in results_of(scene)] == [True, True, False, True]


def test_a_version_that_earns_much_in_a_canary_is_not_the_best(tmp_path: Path) -> None:
    canary = {**HELD_OUT, "every": 1, "canary": True}
    scene = scene_of(tmp_path, evaluations={"swapped": canary})
    driver = RoleDriver(scene, "evaluator")
    for version, skill in enumerate((-9.0, 9.0)):
        scene.announce(version, skill=skill)
        driver.work()
    made = results_of(scene)
    assert [one.best for one in made] == [False, False]
    first, second = (replace(made[0], metrics={**made[0].metrics, "mean": mean}) for mean in (0.1, 0.9))
    assert newest_and_best([first, second])["swapped"] == (second, first), "the less, the better"


@pytest.mark.parametrize("restarts", [False, True])
def test_the_best_is_remembered(tmp_path: Path, restarts: bool) -> None:
    scene = scene_of(tmp_path, evaluations={"held-out": {**HELD_OUT, "every": 1}})
    driver = RoleDriver(scene, "evaluator")
    for version, skill in enumerate((0.0, 9.0, -9.0, 9.0)):
        scene.announce(version, skill=skill)
        driver.work()
        if restarts:
            driver.restart()
    assert [one.best for one in results_of(scene)] == [True, True, False, False]


def test_the_best_is_the_best_by_the_same_reward(tmp_path: Path) -> None:
    scene = scene_of(tmp_path, evaluations={"held-out": {**HELD_OUT, "every": 1, "options": {"size": 20}}})
    scene.put("evals", EvalResult(
        evaluation="held-out", name=VersionName(trainer_epoch=1, version=0), num_tasks=20, num_samples=1,
        num_unscored=0, metrics={"mean": 1.0}, generations=None, best=True, scorer="exact", scorer_version="another",
    ))  # fmt: skip
    driver = RoleDriver(scene, "evaluator")
    for version, skill in enumerate((0.0, 0.0, -9.0)):
        scene.announce(version, skill=skill)
        driver.work()
    first, *made = results_of(scene)
    assert [(one.name.version, one.scorer, one.best) for one in made] == [(1, "exact", True), (2, "exact", False)]
    assert made[0].metrics["mean"] < 1 and first.scored_by != made[0].scored_by == made[1].scored_by


def picky(completion: str, prompt: str) -> float:
    if "1" in prompt:
        raise RewardError("not with a 1 in it")
    return 1.0


@pytest.mark.law("unscorable")
def test_what_cannot_be_scored_is_counted_and_in_no_mean(tmp_path: Path) -> None:
    scene = scene_of(
        tmp_path,
        evaluations={
            "held-out": {**HELD_OUT, "reward": f"{__name__}:picky", "n": 2, "k": [1, 2], "options": {"size": 30}}
        },
    )
    scene.announce(0)
    RoleDriver(scene, "evaluator").work()
    (result,) = results_of(scene)
    assert 0 < result.num_unscored < 60
    assert result.num_unscored % 2 == 0
    assert (result.metrics["mean"], result.metrics["pass@1"], result.metrics["pass@2"]) == (1.0, 1.0, 1.0)
    lines = [json.loads(line) for line in scene.store.get(result.generations or "").decode().splitlines()]
    assert sum(line["reason"] == "error" for line in lines) == result.num_unscored


def with_ids(completion: str, prompt: str) -> dict[str, float]:
    """Puts ids into the names of its metrics."""
    return {"reward": 1.0, "same": 2.0, **{f"{prompt}{number}": 1.0 for number in range(180)}}


@pytest.mark.law("bounded")
def test_names_of_metrics_with_ids_in_them_leave_the_result_readable(tmp_path: Path) -> None:
    scene = scene_of(tmp_path, evaluations={"held-out": {**HELD_OUT, "reward": f"{__name__}:with_ids",
                                                         "options": {"size": 30}}})  # fmt: skip
    scene.announce(0)
    RoleDriver(scene, "evaluator").work()
    (result,) = results_of(scene)
    assert (result.metrics["mean"], result.metrics["metric/same"]) == (1.0, 2.0)
    assert result.metrics[NAMES_LEFT_OUT] > 30 * 180 - MAX_NAMES_OF_RECORD
    assert len(result.metrics) < MAX_NAMES_OF_RECORD + 20


@pytest.mark.law("unscorable")
def test_samples_that_fail_are_unscored(tmp_path: Path) -> None:
    scene = scene_of(tmp_path, policies__fake={"fail_share": 1.0})
    scene.announce(0)
    RoleDriver(scene, "evaluator").work()
    (result,) = results_of(scene)
    assert (result.num_unscored, result.metrics["unscored_share"]) == (5, 1.0)
    assert "mean" not in result.metrics
    assert not result.best


# --------------------------------------------------------------------------------------------- requests


@pytest.mark.law("twice")
def test_a_request_is_done_once(tmp_path: Path) -> None:
    scene = scene_of(tmp_path)
    driver = RoleDriver(scene, "evaluator")
    for version in range(3):
        scene.announce(version)
    driver.work()
    scene.request_evaluation("now")
    scene.request_evaluation("then", version=1)
    scene.request_evaluation("other", evaluation="no such one")
    scene.request_evaluation("gone", version=17)
    driver.work()
    found = [(one.request_id, one.name.version) for one in results_of(scene)]
    assert found == [(None, 0), ("now", 2), ("then", 1)]
    driver.restart()
    driver.work()
    scene.request_evaluation("now")
    driver.work()
    assert len(results_of(scene)) == 3


def test_a_request_that_has_expired_is_not_done(tmp_path: Path) -> None:
    scene = scene_of(tmp_path)
    scene.announce(0)
    scene.request_evaluation("too late")
    scene.clock.advance(61.0)
    RoleDriver(scene, "evaluator").work()
    assert [one.request_id for one in results_of(scene)] == [None]


# --------------------------------------------------------------------------------------------- what goes wrong


def test_weights_that_are_gone_are_left_out(tmp_path: Path) -> None:
    scene = scene_of(tmp_path)
    for version in range(7):
        scene.announce(version, skill=version)
    scene.store.delete("versions/000001-00000003.safetensors")
    finish(scene, 6)
    driver = RoleDriver(scene, "evaluator")
    driver.work()
    assert [version for *_, version in evaluated(scene)] == [0, 6]
    assert driver.done


def test_weights_that_cannot_be_reached_are_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other versions do not wait for them. A run that is finished tries them once more."""
    scene = scene_of(tmp_path)
    for version in range(7):
        scene.announce(version, skill=version)
    opened, away, tries = scene.store.open, {3}, Counter[int]()

    def reached(name: str) -> IO[bytes]:
        version = int(re.findall(r"\d+", name)[-1])
        tries[version] += 1
        if version in away:
            raise StoreUnreachable(f"{name}: no answer")
        return opened(name)

    monkeypatch.setattr(scene.store, "open", reached)
    driver = RoleDriver(scene, "evaluator")
    driver.work()
    assert [version for *_, version in evaluated(scene)] == [0, 6]
    scene.clock.advance(1.0)
    driver.work()
    assert (len(results_of(scene)), tries[3]) == (2, 2)
    away.clear()
    scene.clock.advance(1.0)
    driver.work()
    assert tries[3] == 2, "each pause is twice as long"
    scene.clock.advance(1.0)
    driver.work()
    assert [version for *_, version in evaluated(scene)] == [0, 6, 3]
    away.add(7)
    scene.announce(7)
    scene.request_evaluation("again", version=7)
    driver.work()
    finish(scene, 7)
    driver.work()
    assert (driver.done, tries[7], len(results_of(scene))) == (True, 2, 3)


def test_the_last_weights_are_gone(tmp_path: Path) -> None:
    scene = scene_of(tmp_path)
    scene.announce(0)
    scene.announce(1)
    scene.store.delete("versions/000001-00000001.safetensors")
    finish(scene, 1)
    driver = RoleDriver(scene, "evaluator")
    driver.work()
    assert driver.done


@pytest.mark.law("twice")
@pytest.mark.parametrize(("point", "fault"), [
    ("before_commit", Kill), ("after_commit", Kill), ("before_commit", ProducerLost), ("after_commit", ProducerLost),
    ("before_evals", Kill), ("after_evals", Kill),
])  # fmt: skip
def test_an_evaluation_is_redone_but_never_said_twice(tmp_path: Path, point: str, fault: type[BaseException]) -> None:
    scene = scene_of(tmp_path, evaluations={"one": HELD_OUT, "two": {**HELD_OUT, "every": 2}})
    calm = scene_of(tmp_path / "calm", evaluations={"one": HELD_OUT, "two": {**HELD_OUT, "every": 2}})
    scene.log.fault = scene.store.fault = disturbed = FaultAt(point, fault, "evaluator", every=3)
    for one in (calm, scene):
        for version in range(8):
            one.announce(version, skill=0.3 * version - 1)
        finish(one, 7)
    RoleDriver(calm, "evaluator").work()
    driver = RoleDriver(scene, "evaluator")
    work_on(driver, within_s=0.9)
    assert driver.done
    assert disturbed.num_visits >= 6
    assert sorted(evaluated(scene)) == sorted(evaluated(calm))

    def said(of: Scene) -> dict[Any, Any]:
        return {(one.evaluation, one.name.version): (one.metrics["mean"], one.best) for one in results_of(of)}

    assert said(scene) == said(calm)


def test_it_does_not_begin_on_a_run_without_weights(tmp_path: Path) -> None:
    scene = scene_of(tmp_path)
    driver = RoleDriver(scene, "evaluator")
    driver.work()
    assert results_of(scene) == []
    assert not driver.done
