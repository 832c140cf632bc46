"""Own loops on a run's log: what they hand in, what is refused, and what becomes of work in hand."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rftstream.contracts.rollouts import PartialRollout, Rollout, RolloutStatus
from rftstream.desk import AnswerRefused, Desk
from rftstream.errors import ConfigError
from rftstream.joined.explorer import JoinedExplorer, SampleTask
from rftstream.policies.joined import JoinedPolicy, SamplerDesk
from rftstream.roles.build import role_builder
from rftstream.service.role import Role, RoleContext
from rftstream.testing import RoleDriver
from tests.flow.scene import Scene


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JoinedPolicy, "wait_s", 0.0)


def with_desk(role: str, desk: Desk) -> Callable[[RoleContext], Role]:
    return lambda context: role_builder(role)(dataclasses.replace(context, desk=desk))


def sampler(scene: Scene, process: str = "explorer") -> tuple[RoleDriver, JoinedExplorer]:
    desk = SamplerDesk()
    driver = RoleDriver(scene, "explorer", process=process, build=with_desk("explorer", desk))
    return driver, JoinedExplorer(desk)


def take(driver: RoleDriver, me: JoinedExplorer, most: int = 100) -> list[SampleTask]:
    for _ in range(5):
        driver.tick()
    return me.take(most, wait_s=0)


def work_for(driver: RoleDriver, seconds: float) -> None:
    """Open requests keep the role from coming to rest."""
    until = driver.run.clock.now() + seconds
    while driver.run.clock.now() < until and not driver.done:
        driver.tick()
        driver.run.clock.advance(0.05)


def rollouts_of(scene: Scene) -> dict[str, Rollout]:
    rollouts = [message for message in scene.messages("rollouts") if isinstance(message, Rollout)]
    assert len({one.ids.rollout_id for one in rollouts}) == len(rollouts)
    return {one.ids.rollout_id: one for one in rollouts}


def ids_of(text: str) -> list[int]:
    return [*text.encode(), 0]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path, explorer__policy="joined", groups=range(2))


# --------------------------------------------------------------------------------------------- sampler


def test_a_joined_sampler_makes_the_rollouts(scene: Scene) -> None:
    driver, me = sampler(scene)
    tasks = take(driver, me)
    assert me.new_version and me.version is None
    assert (me.weights_folder() / "model.safetensors").is_file()
    assert (me.version, me.new_version) == (0, False)
    assert [task.messages for task in tasks] == [[{"role": "user", "content": "1+2="}]] * 4
    assert bytes(tasks[0].prompt_ids) == b"1+2=" and tasks[0].sampling["max_tokens"] == tasks[0].max_tokens
    for number, task in enumerate(tasks[:3]):
        given = [ids_of("3"), np.array(ids_of("4")), tuple(ids_of("5"))][number]
        assert me.finish(task, tokens=given, logprobs=[-0.5, 1e-7], version=me.version)
    assert me.fail(tasks[3], "no memory")
    work_for(driver, 1.0)
    found = rollouts_of(scene)
    assert {one: found[one].turns[0].content for one in found if found[one].turns} == {
        task.id: text for task, text in zip(tasks[:3], "345", strict=True)
    }
    done = found[tasks[0].id]
    (segment,) = done.segments
    assert segment.behavior_logprobs.numpy().tolist() == [0, 0, 0, 0, -0.5, 0]
    assert [(span.version, span.count) for span in segment.versions] == [(0, 2)]
    assert done.status is RolloutStatus.completed
    assert (found[tasks[3].id].status, found[tasks[3].id].error) == (RolloutStatus.failed, "no memory")
    assert scene.audit().balanced


GOOD: dict[str, Any] = {"tokens": ids_of("3"), "logprobs": [-0.5, -0.1], "version": 0}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"tokens": [51, 256]}, "tokens: got the id 256, expected 0 to 255.*another tokenizer"),
        ({"tokens": [51, -1]}, "tokens: got the id -1"),
        ({"tokens": [51.0, 0.5]}, "tokens: got float64 values, expected integers"),
        ({"tokens": [[51, 0]]}, "tokens: got list of shape .1, 2., expected a row"),
        ({"tokens": "30"}, "tokens: got str of shape"),
        ({"tokens": [], "logprobs": []}, "got no tokens, expected at least one"),
        ({"tokens": [51] * 300, "logprobs": [-1.0] * 300}, "tokens: got 300, expected at most 256"),
        ({"logprobs": [-0.5]}, "got 1 logprobs for 2 tokens"),
        ({"logprobs": [-0.5, 0.2]}, "logprobs: got 0.2, expected at most 0"),
        ({"logprobs": [-0.5, math.nan]}, "logprobs: got nan, expected finite"),
        ({"logprobs": [-0.5, -math.inf]}, "logprobs: got -inf, expected finite"),
        ({"version": 7}, "version: got 7, which this loop was never given, expected at most 1"),
        ({"version": 0}, "version: got 0, expected at least 1 .task.min_version."),
        ({"version": [1]}, "version: got 1 for 2 tokens"),
        ({"version": None}, "version: got none, expected one; load `weights_folder"),
        ({"finish_reason": "done"}, "finish_reason: got 'done', expected 'stop' or 'length'"),
    ],
)  # fmt: skip
def test_what_cannot_be_right_is_refused_and_stays_in_hand(tmp_path: Path, given: dict[str, Any], text: str) -> None:
    scene = Scene(tmp_path, explorer__policy="joined", groups=())
    scene.announce(0)
    driver, me = sampler(scene)
    take(driver, me)
    scene.announce(1)
    scene.admit(0, min_version=1)
    task, *_ = take(driver, me)
    with pytest.raises(AnswerRefused, match=text) as error:
        me.finish(task, **{**GOOD, "version": 1, **given})
    assert "\n" not in str(error.value)
    work_for(driver, 1.0)
    assert rollouts_of(scene) == {}
    assert me.finish(task, **{**GOOD, "version": 1})
    work_for(driver, 1.0)
    assert list(rollouts_of(scene)) == [task.id]


def test_an_answer_for_the_second_time_or_for_a_lost_task(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    driver, me = sampler(scene)
    first, second, *_ = take(driver, me)
    me.weights_folder()
    assert me.finish(first, **GOOD)
    with pytest.raises(AnswerRefused, match="for the second time"):
        me.finish(first, **GOOD)
    with pytest.raises(AnswerRefused, match="got a str, expected a task"):
        me.finish("first", **GOOD)  # type: ignore[arg-type]
    work_for(driver, 1.0)
    driver.service.step.drop([1])  # type: ignore[union-attr]  # as if its partition had gone
    with caplog.at_level(logging.WARNING):
        assert second.is_lost and not me.save(second, **GOOD) and not me.finish(second, **GOOD)
    assert "another does the task" in caplog.text
    work_for(driver, 1.0)
    assert list(rollouts_of(scene)) == [first.id]


def test_a_new_loop_begins_with_what_the_interrupted_one_had_in_hand(scene: Scene) -> None:
    driver, me = sampler(scene)
    for _ in range(3):
        driver.tick()
    had = [task.id for _, task in zip(range(2), me.tasks(), strict=False)]
    assert [task.id for _, task in zip(range(4), me.tasks(), strict=False)][:2] == had


def test_saved_tokens_outlive_the_process_and_keep_their_version(scene: Scene) -> None:
    driver, me = sampler(scene)
    tasks = take(driver, me)
    me.weights_folder()
    me.save(tasks[0], tokens=[32, 32], logprobs=[-1.0, -2.0])
    with pytest.raises(AnswerRefused, match="got others than the 2 that were saved"):
        me.finish(tasks[0], **GOOD)
    work_for(driver, 31.0)
    assert [piece.num_tokens for piece in scene.messages("partials") if isinstance(piece, PartialRollout)] == [2]
    driver, me = sampler(scene, process="second")  # the first one was killed
    work_for(driver, 60.0)
    scene.announce(1)
    work_for(driver, 1.0)
    task = next(task for task in me.take(100, wait_s=0) if task.id == tasks[0].id)
    assert (task.num_sampled, bytes(task.prompt_ids)) == (2, b"1+2=  ")
    me.weights_folder()
    me.save(task, tokens=[51], logprobs=[-3.0], version=0)
    assert me.finish(task, tokens=[51, 0], logprobs=[-9.0, -4.0], version=1)
    work_for(driver, 1.0)
    rollout = rollouts_of(scene)[task.id]
    (segment,) = rollout.segments
    assert segment.behavior_logprobs.numpy()[4:].tolist() == [-1, -2, -3, -4]
    assert [(span.version, span.count) for span in segment.versions] == [(0, 3), (1, 1)]


def test_a_loop_that_leaves_gives_its_tasks_back(scene: Scene) -> None:
    driver, me = sampler(scene)
    tasks = take(driver, me)
    me.weights_folder()
    assert me.finish(tasks[0], **GOOD)
    me.save(tasks[1], tokens=[32], logprobs=[-1.0])
    me.stop()
    assert list(me.tasks()) == []
    driver.stop()
    assert list(rollouts_of(scene)) == [tasks[0].id]
    assert all(task.is_lost for task in tasks[1:])
    successor, me = sampler(scene, process="second")
    again = {task.id: task.num_sampled for task in take(successor, me)}
    assert again == {tasks[1].id: 1, tasks[2].id: 0, tasks[3].id: 0}


def test_the_policy_needs_a_loop(scene: Scene) -> None:
    with pytest.raises(ConfigError, match="has no loop that samples"):
        RoleDriver(scene, "explorer")
