"""Agents that run elsewhere: they ask the gateway for a rollout, make model calls, and end it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from rftstream.contracts.assistant import AssistantMessage
from rftstream.contracts.tasks import ChatMessage, Problem
from rftstream.environments.base import Reply


class DrivesItself:
    """Stands for an agent in the run file. The explorer's agent loop takes the tasks that name it; nothing else can
    attempt them, so what asks this object for a conversation is told so."""

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
    class Config:
        """The settings in `[environments.agent]`."""

    def __init__(self, config: Config, *, problem: Problem, seed: int) -> None:
        pass
