"""One question, one answer."""

from __future__ import annotations

from dataclasses import dataclass

from rftstream.contracts.assistant import AssistantMessage
from rftstream.contracts.tasks import ChatMessage, Problem
from rftstream.environments.base import Reply


class SingleTurn:
    """An environment that shows the problem's messages and is done after one reply."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[environments.single_turn]`."""

    def __init__(self, config: Config, *, problem: Problem, seed: int) -> None:
        self._messages = problem.messages

    def start(self) -> tuple[ChatMessage, ...]:
        return self._messages

    def reply(self, said: AssistantMessage) -> Reply:
        return Reply(done=True)

    def save(self) -> bytes | None:
        return b""

    def load(self, state: bytes) -> None:
        pass

    def close(self) -> None:
        pass
