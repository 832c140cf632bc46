"""Agents for flow tests: they put requests into an explorer's inbox and look at what they are told."""

from __future__ import annotations

import json
from typing import Any

from rftstream.gateway.dialects import DIALECTS, read_call
from rftstream.roles.explorer.agents.step import AgentExplorerStep
from rftstream.roles.explorer.model_calls import (
    AgentAnswer,
    AgentRequest,
    CallAnswer,
    Delivered,
    ModelCall,
    Refusal,
    RolloutEnd,
    SessionWanted,
)
from rftstream.testing import RoleDriver

CHAT = DIALECTS["chat/completions"]
AGENTS: dict[str, Any] = {"tasksets__sums__environment": "agent", "transport__partitions": 1}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


class Try:
    """One request, and what it was told."""

    def __init__(self, rollout_id: str, wanted: ModelCall | RolloutEnd | SessionWanted, launch: str = "") -> None:
        self.answers: list[AgentAnswer] = []
        self.request = AgentRequest(rollout_id=rollout_id, launch=launch, wanted=wanted, reply=self.answers.append)

    @property
    def answer(self) -> AgentAnswer | None:
        assert len(self.answers) <= 1
        return self.answers[0] if self.answers else None

    @property
    def body(self) -> dict[str, Any]:
        assert isinstance(self.answer, CallAnswer), self.answer
        found: dict[str, Any] = json.loads(self.answer.body)
        return found

    @property
    def message(self) -> dict[str, Any]:
        message = self.body["choices"][0]["message"]
        return {"role": "assistant", "content": message["content"]}

    @property
    def refusal(self) -> Refusal:
        assert isinstance(self.answer, Refusal), self.answer
        return self.answer


class Agent:
    """The agent of one rollout, at whichever explorer has it."""

    def __init__(self, explorer: RoleDriver, rollout_id: str, launch: str = "") -> None:
        self.explorer, self.rollout_id, self.launch = explorer, rollout_id, launch

    def send(self, *messages: dict[str, Any], headers: dict[str, str] | None = None, **values: Any) -> Try:
        """Send a call, and do not wait."""
        body = json.dumps({"model": "m", "messages": list(messages), **values}).encode()
        call = read_call(CHAT, body, headers or {})
        assert isinstance(call, ModelCall), call
        return self.put(call)

    def ask(self, *messages: dict[str, Any], headers: dict[str, str] | None = None, **values: Any) -> Try:
        """Send a call, let the explorer work, and take the answer from the connection."""
        found = self.send(*messages, headers=headers, **values)
        self.explorer.work()
        if isinstance(found.answer, CallAnswer):
            self.step.inbox.put(Delivered(rollout_id=self.rollout_id, launch=self.launch, number=found.answer.number))
        return found

    def end(self, **values: Any) -> Try:
        """End the rollout."""
        found = self.put(RolloutEnd(**values))
        self.explorer.work()
        return found

    def put(self, wanted: ModelCall | RolloutEnd) -> Try:
        found = Try(self.rollout_id, wanted, self.launch)
        self.step.inbox.put(found.request)
        return found

    @property
    def step(self) -> AgentExplorerStep:
        return step_of(self.explorer)


def step_of(explorer: RoleDriver) -> AgentExplorerStep:
    step = explorer.service.step  # type: ignore[attr-defined]
    assert isinstance(step, AgentExplorerStep)
    return step


def session(explorer: RoleDriver, name: str = "") -> Try:
    """Ask for a rollout."""
    found = Try("", SessionWanted(name=name))
    step_of(explorer).inbox.put(found.request)
    explorer.work()
    return found


AWAY_S = 11.0
"""Longer than the log waits for a member that is gone."""


def kill_and_restart(explorer: RoleDriver) -> None:
    """Start an explorer again as after a SIGKILL, when the log has noticed that the one before is gone."""
    explorer.run.clock.advance(AWAY_S)
    explorer.restart()
    explorer.work()
