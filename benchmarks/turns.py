"""What the explorer samples with `hf` in rollouts of several turns with a tool, beside as many tokens in one turn each.

A rollout of several turns asks the calculator after each turn but the last; its turns end where the model stops. The
rollouts of one turn then have the same prompts, and each the number of tokens that its twin has sampled. Both are
measured in CPU seconds, one after the other, so that what else the machine does counts for little.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks._exploring import CONCURRENT, Load, explored, make_load
from rftstream.contracts.assistant import AssistantMessage
from rftstream.contracts.tasks import ChatMessage, Problem
from rftstream.environments.base import Reply

MODEL = {"characters": "0123456789+-*/= ", "layers": 12, "width": 384, "heads": 6, "context": 1024}
NUM_TURNS, LEAST_TOKENS = 4, 24
"""Turns of a rollout, and the least tokens of a turn; the made model stops with one token in 17 from then on."""
NUM_ROUNDS = 2
RESULT = "= 12345 "
"""What the tool says: eight tokens."""


class Calculation:
    """An environment that answers each turn but the last as a tool does."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Nothing is to be set."""

    def __init__(self, config: Config, *, problem: Problem, seed: int) -> None:
        self._problem, self._num_turns = problem, 0

    def start(self) -> tuple[ChatMessage, ...]:
        return self._problem.messages

    def reply(self, said: AssistantMessage) -> Reply:
        self._num_turns += 1
        done = self._num_turns == NUM_TURNS
        return Reply(done=done, messages=() if done else (ChatMessage(role="tool", content=RESULT),))

    def save(self) -> bytes | None:
        return bytes([self._num_turns])

    def load(self, state: bytes) -> None:
        self._num_turns = state[0]

    def close(self) -> None:
        pass


def run() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="rftstream-bench-") as folder:
        load = make_load({"make": MODEL}, 1, folder, "hf")
        environment = f"{__name__}:{Calculation.__name__}"
        most = max(load.run.sampling.max_tokens, 1000)
        turns = _with(load, [replace(one.sampling, min_tokens=LEAST_TOKENS, max_tokens=most) for one in load.tasks],
                      environment=environment)  # fmt: skip
        ours_s = reference_s = 0.0
        num_tokens = 0
        for number in range(NUM_ROUNDS):
            took_s, rollouts = explored(turns, Path(folder) / f"turns-{number}", time.process_time)
            ours_s += took_s
            counts = {one.ids.rollout_id: one.num_tokens for one in rollouts}
            assert all(len([turn for turn in one.turns if turn.role == "assistant"]) == NUM_TURNS for one in rollouts)
            lengths = [counts[one.ids.rollout_id] for one in load.tasks]
            single = _with(load, [replace(task.sampling, min_tokens=length, max_tokens=length)
                                  for task, length in zip(load.tasks, lengths, strict=True)])  # fmt: skip
            took_s, rollouts = explored(single, Path(folder) / f"single-{number}", time.process_time)
            reference_s += took_s
            assert sum(one.num_tokens for one in rollouts) == sum(lengths)
            num_tokens += sum(lengths[1:])
    ours, reference = num_tokens / ours_s, num_tokens / reference_s
    return [
        {
            "name": f"turns: {NUM_TURNS} turns with a tool, 1 thread, {CONCURRENT} at once",
            "unit": "tokens/CPU s",
            "ours": ours,
            "reference": reference,
            "reference_name": "as many tokens in one turn",
            "ratio": ours / reference,
        }
    ]


def _with(load: Load, samplings: list[Any], environment: str = "single_turn") -> Load:
    tasks = zip(load.tasks, samplings, strict=True)
    return replace(load, tasks=tuple(replace(task, sampling=one, environment=environment) for task, one in tasks))
