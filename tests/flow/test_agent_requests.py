"""What agents may ask for beside plain calls: earlier items, counts, stop strings, forms of answers, short sessions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rftstream.contracts.rollouts import Rollout, RolloutStatus
from rftstream.errors import ConfigError
from rftstream.gateway.dialects import CHAT, DIALECTS, MESSAGES, read_call
from rftstream.policies.base import Constraint, Policy, SampleRequest
from rftstream.roles.explorer.model_calls import (
    CallAnswer,
    CountWanted,
    ModelCall,
    SessionGranted,
    SessionWanted,
    TokensCounted,
)
from rftstream.testing import RoleDriver
from tests.flow.agents import AGENTS, Agent, Try, kill_and_restart, step_of, user
from tests.flow.scene import Scene

RESPONSES = DIALECTS["responses"]


def opened(tmp_path: Path) -> tuple[Scene, RoleDriver, Agent]:
    scene = Scene(tmp_path, **AGENTS)
    scene.announce(0)
    tasks = scene.admit(0, environment="agent")
    explorer = RoleDriver(scene, "explorer")
    explorer.work()
    return scene, explorer, Agent(explorer, tasks[0].ids.rollout_id)


def call_of(dialect: Any, **body: Any) -> ModelCall:
    call = read_call(dialect, json.dumps(body).encode(), {})
    assert isinstance(call, ModelCall), call
    return call


@pytest.mark.law("lost", "twice")
def test_a_reference_is_an_item_of_the_log(tmp_path: Path) -> None:
    """Also after the explorer that answered is gone. The call goes on in the segment of the answer."""
    scene, explorer, agent = opened(tmp_path)
    first = agent.put(call_of(RESPONSES, input="1+1="))
    explorer.work()
    (item,) = first.body["output"]
    kill_and_restart(explorer)
    reference = {"type": "item_reference", "id": item["id"]}
    history = [{"role": "user", "content": "1+1="}, reference, {"role": "user", "content": "2+2="}]
    second = agent.put(call_of(RESPONSES, input=history))
    explorer.work()
    assert isinstance(second.answer, CallAnswer)
    for wrong in (item["id"].replace("call/0", "call/7"), item["id"].replace("sums/0/0", "sums/0/1"), "msg-1"):
        third = agent.put(call_of(RESPONSES, input=[{"type": "item_reference", "id": wrong}]))
        explorer.work()
        assert third.refusal.status == 400 and "expected an item of an earlier answer" in third.refusal.sentence
    agent.end(reward=1.0)
    (rollout,) = (one for one in scene.messages("rollouts") if isinstance(one, Rollout))
    assert [(call.segment, call.opened) for call in rollout.calls] == [(0, "first"), (0, "")]


def test_counted_is_what_a_call_would_be_given(tmp_path: Path) -> None:
    scene, explorer, agent = opened(tmp_path)
    body = {"messages": [user("1+1="), {"role": "assistant", "content": "2"}, user("2+2=")]}
    counted = Try(agent.rollout_id, CountWanted(call=call_of(MESSAGES, **body)))
    step_of(explorer).inbox.put(counted.request)
    explorer.work()
    asked = agent.ask(*body["messages"])
    assert isinstance(counted.answer, TokensCounted)
    assert counted.answer.count == asked.body["usage"]["prompt_tokens"] > 8
    agent.end()
    (rollout,) = (one for one in scene.messages("rollouts") if isinstance(one, Rollout))
    assert len(rollout.calls) == 1


def refuse_choices(constraint: Constraint) -> None:
    if constraint.kind == "choice":
        raise ConfigError(f"{constraint.setting}: choice: no choice here")


def test_what_a_call_says_of_its_answer_reaches_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene, explorer, agent = opened(tmp_path)
    loop = step_of(explorer)._agents._calls  # type: ignore[attr-defined]
    form = {"type": "json_object"}
    refused = agent.ask(user("1+1="), response_format=form).refusal
    assert refused.status == 400
    assert refused.sentence.startswith(
        "response_format: this policy does not constrain tokens (hf, vllm and openai do)"
    )
    requests: list[SampleRequest] = []
    policy: Policy = loop.policy
    submit = policy.submit
    monkeypatch.setattr(loop, "check_form", refuse_choices)
    monkeypatch.setattr(policy, "submit", lambda request: (requests.append(request), submit(request)))
    agent.ask(user("1+1="), response_format=form, stop=["END"])
    refused = agent.ask(user("1+1="), structured_outputs={"choice": ["a"]}).refusal
    assert (refused.status, refused.sentence) == (400, "structured_outputs: choice: no choice here")
    (request,) = requests
    assert request.constraint is not None and request.constraint.kind == "json_object"
    assert request.sampling.stop == ("END",)
    agent.end()
    (rollout,) = (one for one in scene.messages("rollouts") if isinstance(one, Rollout))
    assert rollout.calls[0].asked == {"response_format": form, "stop": ["END"]}
    assert call_of(CHAT, messages=[user("a")]).constraint is None


def test_an_agent_that_says_how_long_it_may_be_silent_holds_its_group_no_longer(tmp_path: Path) -> None:
    """It may be killed, and nobody is there to say so."""
    scene, explorer, _ = opened(tmp_path)
    granted = []
    for idle_timeout_s in (30.0, None):
        found = Try("", SessionWanted(idle_timeout_s=idle_timeout_s))
        step_of(explorer).inbox.put(found.request)
        explorer.work()
        assert isinstance(found.answer, SessionGranted)
        granted.append(found.answer.rollout_id)
    scene.clock.advance(31.0)
    explorer.work()
    (rollout,) = (one for one in scene.messages("rollouts") if isinstance(one, Rollout))
    assert (rollout.ids.rollout_id, rollout.status) == (granted[0], RolloutStatus.failed)
    assert rollout.error == "the agent was silent for 30 s (its session's idle_timeout_s), and made no call"
