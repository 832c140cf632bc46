"""Agents that run elsewhere: they ask the gateway for a rollout, or a service is called with one, and they make model
calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from rftstream.contracts.assistant import AssistantMessage
from rftstream.contracts.tasks import ChatMessage, Problem
from rftstream.environments.base import Reply
from rftstream.environments.called import CalledAgentConfig


class DrivesItself:
    """Stands for an agent in the run file. The explorer's agent loop takes the tasks that name it. Nothing else can
    attempt these tasks, so asking this object for a conversation is an error that says so."""

    def __init__(self, config: Any, *, problem: Problem, seed: int) -> None:
        pass

    def start(self) -> Sequence[ChatMessage]:
        self._refuse()

    def reply(self, said: AssistantMessage) -> Reply:
        self._refuse()

    def save(self) -> bytes | None:
        return None

    def load(self, state: bytes) -> None:
        self._refuse()

    def close(self) -> None:
        pass

    def _refuse(self) -> NoReturn:
        raise RuntimeError("an agent drives itself: only explorers with a gateway attempt its tasks")


class RemoteAgent(DrivesItself):
    """An agent that runs elsewhere."""

    @dataclass(frozen=True, kw_only=True)
    class Config(CalledAgentConfig):
        """The settings in `[environments.agent]`. All except `url` apply only to agents that are called."""

        on_restart: Literal["replay", "anew"] = "replay"
        """Action of another explorer that takes over a rollout. In both cases it calls the service again. `replay`:
        a request that equals a recorded one gets the recorded answer. `anew`: the recorded calls are dropped."""
