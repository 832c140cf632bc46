"""Guess a number: after each guess the environment says whether to go higher or lower."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from rftstream.contracts.tasks import ChatMessage, Problem
from rftstream.environments.base import AssistantMessage, Reply


class HigherLower:
    @dataclass(frozen=True, kw_only=True)
    class Config:
        max_guesses: Annotated[int, Meta(ge=1)] = 5

    def __init__(self, config: Config, *, problem: Problem, seed: int) -> None:
        self._config, self._problem = config, problem
        self._num_guesses = 0

    def start(self) -> tuple[ChatMessage, ...]:
        return self._problem.messages

    def reply(self, said: AssistantMessage) -> Reply:
        self._num_guesses += 1
        right = int(self._problem.answer or 0)
        guess = int(said.text) if said.text.strip().isdecimal() else None
        if guess == right or self._num_guesses == self._config.max_guesses:
            return Reply(done=True, metrics={"guesses": self._num_guesses, "found": guess == right})
        hint = "a number, please" if guess is None else "higher" if guess < right else "lower"
        return Reply(done=False, messages=(ChatMessage(role="user", content=hint),))

    def save(self) -> bytes | None:
        return json.dumps(self._num_guesses).encode()

    def load(self, state: bytes) -> None:
        self._num_guesses = json.loads(state)

    def close(self) -> None:
        pass
