"""Guess a word letter by letter: each turn has a reward, and each wrong letter costs a little."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from rftstream.contracts.assistant import AssistantMessage
from rftstream.contracts.tasks import ChatMessage, Problem
from rftstream.environments.base import Reply


class Hangman:
    @dataclass(frozen=True, kw_only=True)
    class Config:
        max_wrong: Annotated[int, Meta(ge=1)] = 5
        penalty: Annotated[float, Meta(ge=0)] = 0.1

    def __init__(self, config: Config, *, problem: Problem, seed: int) -> None:
        self._config, self._problem = config, problem
        self._word, self._tried = problem.answer or "", ""

    def start(self) -> tuple[ChatMessage, ...]:
        return (*self._problem.messages, ChatMessage(role="user", content=self._shown()))

    def reply(self, said: AssistantMessage) -> Reply:
        letter = said.content.strip().lower()[:1]
        new = letter not in self._tried and letter in self._word
        self._tried += letter
        found = self._word.count(letter) / len(self._word) if new else 0.0
        wrong = sum(tried not in self._word for tried in self._tried)
        penalty = 0.0 if new else self._config.penalty
        done = set(self._word) <= set(self._tried) or wrong >= self._config.max_wrong
        return Reply(
            done=done,
            messages=() if done else (ChatMessage(role="user", content=self._shown()),),
            reward=found - penalty,
            parts={"found": found, "penalty": -penalty},
            metrics={"num_wrong": wrong},
        )

    def _shown(self) -> str:
        return "".join(letter if letter in self._tried else "_" for letter in self._word)

    def save(self) -> bytes | None:
        return json.dumps(self._tried).encode()

    def load(self, state: bytes) -> None:
        self._tried = json.loads(state)

    def close(self) -> None:
        pass
