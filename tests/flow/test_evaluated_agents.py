"""Evaluations whose samples agents make: the same numbers and records as of other environments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rftstream.contracts.versions import EvalResult
from rftstream.gateway.dialects import read_call
from rftstream.roles.evaluator.agents import AgentSamples
from rftstream.roles.evaluator.step import EvaluatorStep
from rftstream.roles.explorer.model_calls import CallAnswer, ModelCall, RolloutEnd, SessionGranted, SessionWanted
from rftstream.testing import RoleDriver
from tests.flow.agents import CHAT, Try
from tests.flow.scene import Scene

HELD_OUT = {"source": "arithmetic", "options": {"size": 3}, "environment": "agent", "reward": "environment"}


def evaluator_of(tmp_path: Path, **settings: Any) -> tuple[Scene, RoleDriver, AgentSamples]:
    scene = Scene(tmp_path, **{"evaluations": {"held-out": {**HELD_OUT, "n": 2, "k": (1, 2)}}, **settings})
    scene.announce(0)
    driver = RoleDriver(scene, "evaluator")
    driver.tick()
    driver.tick()
    return scene, driver, samples_of(driver)


def samples_of(driver: RoleDriver) -> AgentSamples:
    step = driver.service.step  # type: ignore[attr-defined]
    assert isinstance(step, EvaluatorStep) and step._agents is not None
    return step._agents


def told(driver: RoleDriver, rollout_id: str, wanted: Any) -> Any:
    """Put a request into the inbox and work until it is answered."""
    found = Try(rollout_id, wanted)
    samples_of(driver)._parts.inbox.put(found.request)
    for _ in range(200):
        if found.answer is not None:
            return found.answer
        driver.tick()
        driver.run.clock.advance(0.01)
    raise AssertionError("no answer")


def attempt(driver: RoleDriver, reward: float) -> str:
    """Be the agent of the next sample."""
    granted = told(driver, "", SessionWanted())
    assert isinstance(granted, SessionGranted)
    body = json.dumps({"model": "m", "messages": granted.problem["messages"]}).encode()
    call = read_call(CHAT, body, {})
    assert isinstance(call, ModelCall)
    assert isinstance(told(driver, granted.rollout_id, call), CallAnswer)
    told(driver, granted.rollout_id, RolloutEnd(reward=reward, metrics={"calls": 1.0}))
    return granted.rollout_id


def result_of(scene: Scene, driver: RoleDriver) -> EvalResult:
    driver.work()
    (result,) = (one for one in scene.messages("evals") if isinstance(one, EvalResult))
    return result


def test_rewards_of_agents_are_the_results(tmp_path: Path) -> None:
    scene, driver, samples = evaluator_of(tmp_path)
    assert samples.num_open == samples.num_free == 6
    rewards = iter([1.0, 0.0, 0.0, 0.0, 1.0, 1.0])
    seen = [attempt(driver, reward) for reward in rewards]
    assert len(set(seen)) == 6 and seen[0].startswith("eval/held-out/1-0/")
    result = result_of(scene, driver)
    assert (result.num_tasks, result.num_samples, result.num_unscored) == (3, 2, 0)
    assert result.metrics["mean"] == 0.5 and result.metrics["pass@2"] == 2 / 3
    assert result.metrics["metric/calls"] == 1.0 and result.metrics["length_mean"] > 0
    assert driver.service.health()["gateway"] == ""


def test_samples_for_which_no_agent_comes_are_given_up(tmp_path: Path) -> None:
    scene, driver, _ = evaluator_of(tmp_path, explorer__idle_timeout_s=30.0)
    attempt(driver, 1.0)
    scene.clock.advance(31.0)
    result = result_of(scene, driver)
    assert result.num_unscored == 5 and result.metrics["mean"] == 1.0
    text = scene.store.get(str(result.generations)).decode()
    assert text.count("no agent asked for it within 30 s (explorer.idle_timeout_s)") == 5


def test_an_evaluation_that_is_interrupted_is_made_again_by_new_agents(tmp_path: Path) -> None:
    scene, driver, _ = evaluator_of(tmp_path)
    before = attempt(driver, 1.0)
    driver.restart()
    driver.tick()
    driver.tick()
    seen = {attempt(driver, 0.0) for _ in range(6)}
    assert before not in seen
    assert result_of(scene, driver).metrics["mean"] == 0.0
