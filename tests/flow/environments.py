"""Environments to test the turn loop with."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import Any

from rftstream.contracts.tasks import ChatMessage, Problem
from rftstream.environments.base import AssistantMessage, Reply
from rftstream.environments.calls import Pause


class _Environment:
    def __init__(self, config: Config, *, problem: Problem, seed: int) -> None:
        self.config, self.problem, self.turn = config, problem, 0

    def start(self) -> tuple[ChatMessage, ...]:
        return self.problem.messages

    def save(self) -> bytes | None:
        return None

    def load(self, state: bytes) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class Config:
    turns: int = 2
    reply_length: int = 0
    """Characters that each reply has beside the next question."""
    state_bytes: int = 0
    """Size of what `Saving` saves, at least."""
    fails_in: str = ""
    """`start`, `reply` or `close`."""


class Conversation(_Environment):
    """Asks one sum after the other."""

    Config = Config

    def start(self) -> tuple[ChatMessage, ...]:
        if self.config.fails_in == "start":
            raise RuntimeError("the environment does not start")
        return super().start()

    def reply(self, said: AssistantMessage) -> Reply:
        if self.config.fails_in == "reply":
            raise RuntimeError("the environment does not answer")
        self.turn += 1
        if self.turn == self.config.turns:
            return Reply(done=True, metrics={"turns": self.turn})
        text = " " * self.config.reply_length + f"{self.turn}+{self.turn}="
        return Reply(done=False, messages=(ChatMessage(role="user", content=text),), metrics={"turns": self.turn})

    def close(self) -> None:
        if self.config.fails_in == "close":
            raise RuntimeError("the environment does not close")


class Awaited(_Environment):
    """As Conversation, written with `async def`; a reply takes a second of the clock."""

    Config = Config

    def __init__(self, config: Config, *, problem: Problem, seed: int) -> None:
        super().__init__(config, problem=problem, seed=seed)
        self._conversation = Conversation(config, problem=problem, seed=seed)

    async def start(self) -> tuple[ChatMessage, ...]:  # type: ignore[override]  # either is an Environment
        return self._conversation.start()

    async def reply(self, said: AssistantMessage) -> Reply:
        await Pause(1.0)
        return self._conversation.reply(said)

    async def close(self) -> None:  # type: ignore[override]  # as above
        self._conversation.close()


class Rewriter(_Environment):
    """Forgets the first question: the second one stands alone."""

    Config = Config

    def reply(self, said: AssistantMessage) -> Reply:
        self.turn += 1
        if self.turn == 2:
            return Reply(done=True)
        question = ChatMessage(role="user", content=f"it was {said.text}; 5+5=")
        return Reply(done=False, messages=(question,), rewrite=(question,))


class Saving(Conversation):
    """As above, and can be saved."""

    Config = Config

    def save(self) -> bytes | None:
        if self.config.fails_in == "save":
            raise RuntimeError("the environment cannot be saved")
        return f"turn {self.turn}".encode().ljust(self.config.state_bytes)

    def load(self, state: bytes) -> None:
        if self.config.fails_in == "load":
            raise RuntimeError("the environment cannot be loaded")
        self.turn = int(state.removeprefix(b"turn "))


class SavingRewriter(Rewriter):
    """As above, and can be saved."""

    Config = Config

    def save(self) -> bytes | None:
        return bytes([self.turn])

    def load(self, state: bytes) -> None:
        self.turn = state[0]


class Careless(_Environment):
    """Answers what is no answer."""

    Config = Config

    def reply(self, said: AssistantMessage) -> Reply:
        match self.config.fails_in:
            case "nothing":
                return None  # type: ignore[return-value]
            case "metrics":
                return Reply(done=True, metrics={"time": "long"})  # type: ignore[dict-item]
            case "text":
                return Reply(done=False, messages=(ChatMessage(role="user", content="\udcff"),))
            case "number":
                return Reply(done=False, messages=(ChatMessage(role="user", content=7),))  # type: ignore[arg-type]
        return Reply(done=True, metrics={"\udcff": 1.0})


@dataclass(frozen=True, kw_only=True)
class GameConfig:
    turns: int = 3
    reply_s: float = 0.0
    """Seconds of the clock that each reply takes."""
    reward: float | None = 0.5
    """Of each turn."""
    odd_turn: int = -1
    """The turn in which `odd` happens."""
    odd: str = ""
    """`hangs`, `nan`, `none` (no reward), `nan part` or `exits`."""
    saves: bool = True


class Game:
    """Gives a reward in each turn; a reply takes its time."""

    Config = GameConfig

    def __init__(self, config: GameConfig, *, problem: Problem, seed: int) -> None:
        self.config, self.problem, self.turn = config, problem, 0

    async def start(self) -> tuple[ChatMessage, ...]:
        return self.problem.messages

    async def reply(self, said: AssistantMessage) -> Reply:
        config, turn = self.config, self.turn
        if config.reply_s:
            await Pause(config.reply_s)
        odd = config.odd if turn == config.odd_turn else ""
        if odd == "hangs":
            await Pause(1e9)
        if odd == "exits":
            raise SystemExit(3)
        self.turn += 1
        return Reply(
            done=self.turn == config.turns,
            messages=(ChatMessage(role="user", content=f"{turn}+1="),) if self.turn < config.turns else (),
            reward={"nan": float("nan"), "none": None}.get(odd, config.reward),
            parts={"turns": 1.0, "odd": float("inf") if odd == "nan part" else 0.0},
            metrics={"turns": self.turn},
        )

    def save(self) -> bytes | None:
        return bytes([self.turn]) if self.config.saves else None

    async def load(self, state: bytes) -> None:
        self.turn = state[0]

    def close(self) -> None:
        pass


class Gate:
    """Where a test holds replies up: `entered` says that one has come, `opened` lets all go on."""

    def __init__(self) -> None:
        self.entered, self.opened, self.closed = threading.Event(), threading.Event(), threading.Event()

    def reset(self) -> None:
        for event in (self.entered, self.opened, self.closed):
            event.clear()


GATE = Gate()


class Blocking(_Environment):
    """Its first reply waits at the gate, in its thread."""

    Config = Config

    def reply(self, said: AssistantMessage) -> Reply:
        GATE.entered.set()
        GATE.opened.wait()
        return Reply(done=True, reward=1.0)

    def close(self) -> None:
        GATE.closed.set()


class BlockingLater(_Environment):
    """As above, as a coroutine."""

    Config = Config

    async def reply(self, said: AssistantMessage) -> Reply:
        GATE.entered.set()
        while not GATE.opened.is_set():
            await asyncio.sleep(0.001)
        return Reply(done=True, reward=1.0)

    def close(self) -> None:
        GATE.closed.set()


class Offering(_Environment):
    """Offers a tool, and answers each call that it reads."""

    Config = Config

    def tools(self) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]

    def reply(self, said: AssistantMessage) -> Reply:
        answers = [
            ChatMessage(role="tool", content=call.error or str(call.arguments), tool_call_id=call.id)
            for call in said.tool_calls
        ]
        return Reply(done=not answers, messages=tuple(answers))
