"""Several attempts at one problem: each answer is scored at once, and the policy is told whether it was right."""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from rftstream.contracts.assistant import AssistantMessage
from rftstream.contracts.tasks import ChatMessage, Problem
from rftstream.data.gym_entries import KEYS, EntryScorer, find_answer
from rftstream.environments.base import Reply
from rftstream.errors import ConfigError

Check = Callable[[str, Problem], Any]
"""A function from answer and problem to a score, or to an awaitable score."""


class Attempts:
    """An environment that scores each attempt. It is done when an attempt is right or none is left.

    At any time, the rewards of all turns add up to the reward of the best (or the last) attempt. So a rollout that is
    cut short has the reward of its attempts so far."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[environments.attempts]`."""

        max_attempts: Annotated[int, Meta(ge=1)] = 3
        """Largest number of the policy's turns."""
        check: str | None = None
        """Scorer of an answer: `module:function` with `(answer: str, problem: Problem) -> float`, plain or async.
        Default: for problems of reasoning-gym, the task's own scorer; for others, 1 if the answer equals the problem's
        exactly, else 0."""
        tag: str | None = "answer"
        """The answer is the content of the last <tag>...</tag>, or the whole text if there is none."""
        solved_at: float = 1.0
        """Smallest score of a right attempt. After it there is no further attempt."""
        counts: Literal["best", "last"] = "best"
        """The attempt that determines the reward."""
        discount: Annotated[float, Meta(gt=0, le=1)] = 0.9
        """Factor of the second attempt's score; the third attempt has its square, and so on. 1: all attempts count the
        same."""
        feedback: str = "That is wrong. Try again."
        """Message to the policy after a wrong answer. {left}, {attempt} and {score} stand for the number of attempts
        that are left, the number of the last attempt, and its score."""

    def __init__(self, config: Config, *, problem: Problem, seed: int) -> None:
        self._config, self._problem = config, problem
        self._scores: list[float] = []

    def start(self) -> tuple[ChatMessage, ...]:
        find_check(self._config.check, self._problem)
        return self._problem.messages

    async def reply(self, said: AssistantMessage) -> Reply:
        config = self._config
        check = find_check(config.check, self._problem)
        answer, _ = find_answer(said.content, config.tag)
        found = await asyncio.to_thread(check, answer, self._problem)
        score = float(await found if inspect.isawaitable(found) else found)
        if not math.isfinite(score):
            raise ValueError(f"environments.attempts: the check gave {score}, expected a finite score")
        before = self._value()
        self._scores.append(score)
        left = config.max_attempts - len(self._scores)
        done = score >= config.solved_at or left <= 0 or said.finish_reason != "stop"
        values = {"left": str(left), "attempt": str(len(self._scores)), "score": f"{score:g}"}
        text = functools.reduce(
            lambda text, item: text.replace(f"{{{item[0]}}}", item[1]), values.items(), config.feedback
        )
        return Reply(
            done=done,
            messages=() if done else (ChatMessage(role="user", content=text),),
            reward=self._value() - before,
            metrics={
                "num_attempts": float(len(self._scores)),
                "first_score": self._scores[0],
                "best_score": max(self._scores),
                "solved": float(max(self._scores) >= config.solved_at),
            },
        )

    def save(self) -> bytes | None:
        return json.dumps(self._scores).encode()

    def load(self, state: bytes) -> None:
        self._scores = [float(score) for score in json.loads(state)]

    def close(self) -> None:
        pass

    def _value(self) -> float:
        """Return the reward of the attempts so far; 0 before the first."""
        values = [score * self._config.discount**number for number, score in enumerate(self._scores)]
        return (max(values) if self._config.counts == "best" else values[-1]) if values else 0.0


def find_check(name: str | None, problem: Problem) -> Check:
    """Return the function that scores the answers to a problem. ConfigError if there is none."""
    if name is not None:
        return _import_check(name)
    if all(key in problem.info for key in KEYS):
        score = _entry_scorer()
        return lambda answer, problem: score(answer, problem.info)
    if problem.answer is None:
        raise ConfigError("environments.attempts: the problem has no answer; set check to a function that scores one")
    return _is_the_answer


def _is_the_answer(answer: str, problem: Problem) -> float:
    return float(answer.strip() == (problem.answer or "").strip())


@functools.cache
def _entry_scorer() -> EntryScorer:
    try:
        return EntryScorer()
    except ImportError as error:
        raise ConfigError(f"environments.attempts: needs reasoning-gym ({error}); pip install reasoning-gym") from None


@functools.cache
def _import_check(name: str) -> Check:
    module, _, attribute = name.partition(":")
    try:
        check: Check = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"environments.attempts.check: {name!r} cannot be imported: {type(error).__name__}: {error}; write "
            "'module:function'"
        ) from None
    if not callable(check):
        raise ConfigError(f"environments.attempts.check: {name!r} is a {type(check).__name__}, expected a function")
    return check
