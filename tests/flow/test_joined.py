"""Own loops on a run's log: what they hand in, what is refused, and what becomes of work in hand."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rftstream.backends.joined import TrainerDesk
from rftstream.backends.joined_state import write_state
from rftstream.contracts.rollouts import PartialRollout, Rollout, RolloutStatus
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.contracts.versions import StepRecord, VersionName
from rftstream.desk import AnswerRefused, Desk
from rftstream.errors import ConfigError, TakenOver
from rftstream.joined.explorer import JoinedExplorer, SampleTask
from rftstream.joined.join import check_scored_alone
from rftstream.joined.trainer import JoinedTrainer, StateOutdated
from rftstream.joined.verifier import JoinedVerifier
from rftstream.policies.fake_model import SKILL
from rftstream.policies.joined import JoinedPolicy, SamplerDesk
from rftstream.rewards.resolve import build_rewards
from rftstream.roles.build import role_builder
from rftstream.service.role import Role, RoleContext
from rftstream.testing import RoleDriver
from tests.configs import small_run
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
        learnt = torch.tensor([-0.5, 1e-7], requires_grad=True)
        logprobs = [[-0.5, 1e-7], learnt.bfloat16(), list(learnt)][number]
        assert me.finish(task, tokens=given, logprobs=logprobs, version=me.version)
    assert me.fail(tasks[3], MemoryError("no memory"))  # type: ignore[arg-type]
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
    assert (found[tasks[3].id].status, found[tasks[3].id].error) == (RolloutStatus.failed, "MemoryError: no memory")
    assert scene.audit().balanced


GOOD: dict[str, Any] = {"tokens": ids_of("3"), "logprobs": [-0.5, -0.1], "version": 0}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"tokens": [51, 256]}, "tokens: got the id 256, expected 0 to 255.*another tokenizer"),
        ({"tokens": [51, -1]}, "tokens: got the id -1"),
        ({"tokens": [51.0, 0.5]}, "tokens: got float64 values, expected integers"),
        ({"tokens": [[51, 0]]}, "tokens: got list of shape .1, 2., expected a row"),
        ({"tokens": "30"}, "tokens: got str, expected a row of numbers"),
        ({"tokens": None}, "tokens: got NoneType, expected"),
        ({"logprobs": [{51: -0.1}, {0: -0.1}]}, "logprobs: got list with a dict, expected"),
        ({"logprobs": [torch.tensor([-0.1, 0.0]), torch.tensor([-0.1])]}, "logprobs: got list with a Tensor"),
        ({"version": "latest"}, "version: got a str, expected a version's number, or one for each token"),
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
    with pytest.raises(AnswerRefused, match="got a str, expected a SampleTask"):
        me.finish("first", **GOOD)  # type: ignore[arg-type]
    with pytest.raises(AnswerRefused, match="take: got 0, expected a number of tasks, at least 1"):
        me.take(0)  # a loop takes no tasks for a sign that the run has ended
    _, other = sampler(scene, process="second")
    other._desk.known = me._desk.known
    with pytest.raises(AnswerRefused, match="it belongs to another loop that has joined"):
        other.finish(second, **GOOD)
    work_for(driver, 1.0)
    driver.service.step.drop([1])  # type: ignore[union-attr]  # as if its partition had gone
    with caplog.at_level(logging.WARNING):
        assert second.is_lost and not me.save(second, **GOOD) and not me.finish(second, **GOOD)
    assert "another has it" in caplog.text
    work_for(driver, 1.0)
    assert list(rollouts_of(scene)) == [first.id]


def test_a_new_loop_begins_with_what_the_interrupted_one_had_in_hand(scene: Scene) -> None:
    driver, me = sampler(scene)
    for _ in range(3):
        driver.tick()
    me.weights_folder()
    had = [task for _, task in zip(range(2), me.tasks(), strict=False)]
    me.save(had[0], tokens=[32], logprobs=[-1.0])
    again = [task for _, task in zip(range(4), me.tasks(), strict=False)]
    assert [task.id for task in again[:2]] == [task.id for task in had]
    assert [task.num_sampled for task in again] == [1, 0, 0, 0] and bytes(again[0].prompt_ids) == b"1+2= "
    assert me.finish(again[0], tokens=[51, 0], logprobs=[-2.0, -3.0])
    work_for(driver, 1.0)
    (segment,) = rollouts_of(scene)[again[0].id].segments
    assert segment.behavior_logprobs.numpy()[4:].tolist() == [-1, -2, -3]
    assert next(me.tasks()).id == had[1].id
    assert me.finish(again[3], **GOOD) and me._desk.num_taken == 1  # the last task waited on the desk again


def test_an_event_loop_waits_for_tasks_and_may_be_interrupted(scene: Scene) -> None:
    driver, me = sampler(scene)
    found: list[str] = []

    async def sample(*, interrupted: bool) -> None:
        tasks = me.tasks()
        first = asyncio.ensure_future(anext(tasks))
        await asyncio.sleep(0)
        if interrupted:
            return  # `asyncio.run` cancels what waits, and closes the event loop
        for _ in range(5):
            driver.tick()
        found.append((await first).id)
        async for task in tasks:
            found.append(task.id)
            if len(found) == 4:
                me.stop()

    for interrupted in (True, False):
        asyncio.run(sample(interrupted=interrupted))
    assert len(set(found)) == 4


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


def test_the_newest_folder_stays_until_the_loop_leaves(scene: Scene) -> None:
    driver, me = sampler(scene)
    with me:
        take(driver, me)
        first = me.weights_folder()
        scene.announce(1)
        take(driver, me)
        driver.stop()
        assert me.has_ended and me.new_version  # of a task in hand, nobody has said that it counts for nothing
        assert me.take(64) == [] and not me.new_version
        newest = me.weights_folder()
        assert (newest / "model.safetensors").is_file() and me.version == 1 and not first.exists()
    assert not newest.parent.exists()


def test_an_interrupted_loop_says_that_all_is_well(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    driver, me = sampler(scene)
    first, *_ = take(driver, me)
    me.weights_folder()
    me.finish(first, **GOOD)
    with caplog.at_level(logging.WARNING), pytest.raises(KeyboardInterrupt), me:
        raise KeyboardInterrupt
    assert "it has left the run in order, what was handed in counts, and 3 in hand went back" in caplog.text


def test_the_policy_needs_a_loop(scene: Scene) -> None:
    with pytest.raises(ConfigError, match="has no loop that samples"):
        RoleDriver(scene, "explorer")


# --------------------------------------------------------------------------------------------- training loop


@pytest.fixture
def batches(tmp_path: Path) -> Scene:
    scene = Scene(tmp_path, trainer__backend="joined", trainer__checkpoint_every=2, run__steps=6)
    for sequence in range(6):
        scene.batch(sequence)
    return scene


class Loop:
    """The role in a thread, as `join` has it, on a log in memory."""

    def __init__(self, scene: Scene, process: str = "trainer") -> None:
        self.desk = TrainerDesk()
        self.me = JoinedTrainer(self.desk)
        self.after_tick: Callable[[], None] = lambda: None
        self.driver = RoleDriver(scene, "trainer", process=process, build=self._build)
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _build(self, context: RoleContext) -> Role:
        return role_builder("trainer")(dataclasses.replace(context, desk=self.desk, simulated=False))

    def _work(self) -> None:
        service, error = self.driver.service, None
        try:
            while not service.done:
                if self.desk.stops:
                    service.drain()
                service.wait(min(service.tick(), 0.01))
                self.after_tick()
        except Exception as found:
            error = found
        self.desk.end(error)
        service.close()

    def close(self) -> None:
        self.desk.leave()
        self._thread.join()


def plus_one(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: one + 1 for name, one in weights.items()}


def test_a_joined_loop_trains_the_batches_and_goes_on_where_it_was(batches: Scene) -> None:
    loop = Loop(batches)
    me, weights, momentum = loop.me, loop.me.state(), 0
    assert me.kept is None
    first = {name: one.clone() for name, one in weights.items()}
    for batch in me.batches():
        assert batch.tokens.shape == batch.masks.shape == batch.advantages.shape == batch.logprobs.shape
        assert len(batch.groups) == 2 and batch.segments.tolist() == [row.group for row in batch.rows]
        weights, momentum = plus_one(weights), momentum + 1
        me.step(batch, weights=weights, metrics={"loss": torch.tensor(0.5, requires_grad=True)})
        assert steps_of(batches)[-1].name.version == batch.version + 1
        assert me.checkpoint_due is (batch.version in (1, 3))
        assert me.checkpoint({"momentum": momentum, "nested": [(1, weights)]}) is (batch.version in (1, 3))
        if batch.version == 4:
            break
    loop.close()
    loop = Loop(batches, process="second")
    me, weights = loop.me, loop.me.state()
    assert me.kept is not None and (me.kept["momentum"], me.kept["nested"][0][0]) == (4, 1)
    assert all(torch.equal(weights[name], first[name] + 4) for name in first)
    for batch in me.batches():
        me.step(batch, weights=plus_one(me.kept["nested"][0][1]) if batch.version == 4 else weights)
        me.checkpoint({"momentum": 0})
    assert me.has_ended
    loop.close()
    steps = [step for step in steps_of(batches) if not step.resumed]
    assert [step.batch_sequence for step in steps] == [0, 1, 2, 3, 4, 4, 5]
    assert steps[4].weights_digest == steps[5].weights_digest and steps[0].metrics["loss"] == 0.5


def steps_of(scene: Scene) -> list[StepRecord]:
    return [message for message in scene.messages("steps") if isinstance(message, StepRecord)]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda weights: {}, "weights: got dict, expected tensors by name"),
        (lambda weights: {"x": weights[SKILL]}, "weights: lack 2 .* and have other 1 .'x'. of the model's 2 names"),
        (lambda weights: {**weights, SKILL: torch.zeros(2)}, "'fake.skill' has the shape .2,., expected .1,."),
        (lambda weights: {**weights, SKILL: "one"}, "'fake.skill' is a str, expected a tensor"),
        (lambda weights: {**weights, SKILL: torch.tensor([math.nan])}, "'fake.skill' has values that are not finite"),
        (lambda weights: {**weights, SKILL: torch.ones(1, device="meta")}, "is float32 of strided on meta, expected"),
        (lambda weights: {**weights, SKILL: torch.ones(1).to_sparse()}, "is float32 of sparse_coo on cpu, expected"),
    ],
)
def test_weights_that_are_not_the_models_are_refused(batches: Scene, change: Any, text: str) -> None:
    loop = Loop(batches)
    me, weights = loop.me, loop.me.state()
    batch = next(me.batches())
    with pytest.raises(AnswerRefused, match=text):
        me.step(batch, weights=change(weights))
    with pytest.raises(AnswerRefused, match=r"metrics\.loss: got a str, expected a number"):
        me.step(batch, weights=weights, metrics={"loss": "low"})
    with pytest.raises(AnswerRefused, match=r"metrics: got a list, expected a dict of numbers by name"):
        me.step(batch, weights=weights, metrics=[0.5])  # type: ignore[arg-type]
    with pytest.raises(AnswerRefused, match=r"state: got a list, expected a dict"):
        me.checkpoint([weights])  # type: ignore[arg-type]
    assert not [step for step in steps_of(batches) if not step.resumed]
    me.skip(batch, metrics={"loss": math.nan})
    assert steps_of(batches)[-1].skipped
    with pytest.raises(AnswerRefused, match="batch 0: handed in for the second time"):
        me.step(batch, weights=weights)
    for wrong, what in (
        (object(), "object, expected tensors"), (np.complex64(1), "complex64, expected tensors"),
        (np.array(["a"]), "ndarray of <U1 on cpu, expected"), (torch.ones(1, device="meta"), "float32 on meta, expe"),
    ):  # fmt: skip
        with pytest.raises(AnswerRefused, match=rf"state\.own: got a .*{what}"):
            write_state(batches.folder.path, {"own": wrong})
    loop.close()


def test_a_loop_that_has_not_loaded_or_not_answered(batches: Scene) -> None:
    loop = Loop(batches)
    with pytest.raises(StateOutdated, match=r"nothing is loaded yet.*load `state"):
        next(loop.me.batches())
    loop.me.state()
    work = loop.me.batches()
    batch = next(work)
    with pytest.raises(AnswerRefused, match="batch 0: no answer, expected one before the next batch"):
        next(work)
    assert next(loop.me.batches()).version == batch.version  # a cell that is run again after ctrl-C
    loop.close()
    assert not [step for step in steps_of(batches) if not step.resumed]


def test_the_newer_of_two_loops_wins(batches: Scene) -> None:
    older = Loop(batches)
    weights = older.me.state()
    batch = next(older.me.batches())
    newer = Loop(batches, process="second")
    newer.me.state()
    with pytest.raises(TakenOver, match="took over with epoch 2"):
        older.me.step(batch, weights=weights)
    again = next(newer.me.batches())
    newer.me.step(again, weights=weights)
    assert [step.name for step in steps_of(batches) if not step.resumed] == [VersionName(trainer_epoch=2, version=1)]
    newer.close()


@pytest.mark.parametrize("ends_by", [TakenOver, KeyError, StateOutdated])
def test_a_loop_that_waits_for_its_step_hears_what_became_of_the_role(batches: Scene, ends_by: type[Exception]) -> None:
    """The next batch lies on the desk by then, and nobody will answer it."""
    loop, is_ready, others = Loop(batches), threading.Event(), []
    service: Any = loop.driver.service
    commit = service._commit

    def look() -> None:
        batches.clock.advance(1.0)
        if service.health()["batches_ready"]:
            is_ready.set()

    def lose(in_force: Any, transaction: Any) -> bool:
        service._commit = commit
        loop.desk.wait(lambda: loop.desk.find("batch"))
        if ends_by is KeyError:
            raise KeyError("a fault of the role")
        if ends_by is TakenOver:
            others.append(Loop(batches, process="second"))
            others[0].me.state()
        else:  # another producer under the role's name, and no claim
            batches.transport().producer(f"{batches.folder.run_id}.trainer", timeout_s=60.0).start()
        return bool(commit(in_force, transaction))

    weights = loop.me.state()
    batch = next(loop.me.batches())
    loop.after_tick = look
    is_ready.wait()
    service._commit = lose
    with pytest.raises(ends_by):
        loop.me.step(batch, weights=weights)
    if ends_by is StateOutdated:
        weights = loop.me.state()
        loop.me.step(next(loop.me.batches()), weights=weights)
        assert [step.name.version for step in steps_of(batches) if not step.resumed] == [1]
    for one in (loop, *others):
        one.close()


# --------------------------------------------------------------------------------------------- scorer


@pytest.mark.parametrize("reward", ["diversity", [{"name": "exact"}, {"name": "my:own", "group": True}]])
def test_a_joined_scorer_takes_no_rewards_that_compare_siblings(reward: Any) -> None:
    check_scored_alone(small_run())
    with pytest.raises(ConfigError, match=r"tasksets\.more\.reward: '.*' compares all rollouts of a group, expected"):
        check_scored_alone(small_run(tasksets={"more": {"source": "arithmetic", "reward": reward}}))


@pytest.mark.slow
def test_a_joined_scorer_makes_the_verdicts(tmp_path: Path) -> None:
    scene = Scene(tmp_path, groups=range(2))
    RoleDriver(scene, "explorer").work()
    desk = Desk()
    driver = RoleDriver(scene, "verifier", build=with_desk("verifier", desk))
    me = JoinedVerifier(desk)
    for _ in range(3):
        driver.tick()
    first, second, third, fourth = me.take(4, wait_s=0)
    assert (first.rollout.prompt, first.rollout.answer, first.taskset) == ("1+2=", "3", "sums")
    for wrong, text in (({"reward": math.nan}, "reward: got nan"), ({"reward": "1 of 2"}, "reward: got a str"),
                        ({"reward": 1, "parts": {"form": math.inf}}, "parts.form: got inf")):  # fmt: skip
        with pytest.raises(AnswerRefused, match=text):
            me.score(first, **wrong)
    assert me.score(first, torch.tensor(0.5, requires_grad=True), parts={"form": 1}, version="2")
    with pytest.raises(AnswerRefused, match="for the second time"):
        me.score(first, 1.0)
    assert me.fail(second, "the service is down")
    step: Any = driver.service.step  # type: ignore[attr-defined]
    step.drop([int(third._item.key)])  # as if its partition had gone
    assert third.is_lost and not me.score(third, 1.0)
    work_for(driver, 1.0)
    verified = {one.ids.rollout_id: one for one in scene.messages("verified") if isinstance(one, VerifiedRollout)}
    assert verified.keys() == {first.id, second.id}
    verdict = verified[first.id].verdict
    assert verdict is not None
    assert (verdict.reward, verdict.parts) == (0.5, {"form": 1.0})
    assert (verdict.scorer, verdict.scorer_version) == ("joined", "2")
    assert (verified[second.id].verdict, verified[second.id].detail) == (None, "the service is down")
    assert [task.id for _, task in zip(range(1), me.rollouts(), strict=False)] == [fourth.id]


def test_our_verifier_written_with_a_joined_loop_makes_the_same_verdicts(tmp_path: Path) -> None:
    """There is one chassis: claims, transactions and records are the role's, whoever scores."""

    def verdicts(scene: Scene, verify: Callable[[Scene], object]) -> dict[str, Any]:
        RoleDriver(scene, "explorer").work()
        verify(scene)
        found = [one for one in scene.messages("verified") if isinstance(one, VerifiedRollout)]
        return {one.ids.rollout_id: (one.rollout, one.verdict.reward, one.verdict.parts) for one in found}  # type: ignore[union-attr]

    def with_a_loop(scene: Scene) -> None:
        rewards: Any = build_rewards(scene.config)
        driver = RoleDriver(scene, "verifier", build=with_desk("verifier", desk := Desk()))
        for _ in range(3):
            driver.tick()
        me = JoinedVerifier(desk)
        for task in me.take(100, wait_s=0):
            found = rewards[task.taskset](task.rollout)
            me.score(task, found.reward, parts=found.parts, metrics=found.metrics)
        work_for(driver, 1.0)

    ours = verdicts(Scene(tmp_path / "ours", groups=range(3)), lambda scene: RoleDriver(scene, "verifier").work())
    assert len(ours) == 6 and ours == verdicts(Scene(tmp_path / "joined", groups=range(3)), with_a_loop)
