"""What the explorer samples with `hf` in rollouts of several turns with a tool, beside as many tokens in one turn each.

A rollout of several turns asks the calculator after each turn but the last; its turns end where the model stops. The
rollouts of one turn then have the same prompts, and each the number of tokens that its twin has sampled. Both are
measured in CPU seconds, one after the other, so that what else the machine does counts for little.

Then the tokens of prompts that are asked for, beside those that are computed: of an agent of eight turns with two
forks, and of groups that two explorers share.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks._exploring import CONCURRENT, GROUP_SIZE, NUM_GROUPS, Load, explored, make_load, weights
from rftstream.clock import SystemClock
from rftstream.contracts.assistant import AssistantMessage
from rftstream.contracts.tasks import ChatMessage, Problem, Sampling
from rftstream.contracts.versions import VersionName
from rftstream.environments.base import Reply
from rftstream.metrics import REGISTRY
from rftstream.models.folders.folder import prepare_model
from rftstream.models.rendering import open_renderer
from rftstream.policies.base import SampleRequest
from rftstream.policies.hf.policy import HfPolicy
from rftstream.testing import MemoryRun, RoleDriver
from rftstream.weights.publisher import publish

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
        rows = [_prompts("an agent of 8 turns with two forks", lambda: _fork(load)),
                _prompts(f"{NUM_GROUPS} groups of {GROUP_SIZE} over two explorers",
                         lambda: _share(load, Path(folder) / "shared"))]  # fmt: skip
    ours, reference = num_tokens / ours_s, num_tokens / reference_s
    return [
        *rows,
        {
            "name": f"turns: {NUM_TURNS} turns with a tool, 1 thread, {CONCURRENT} at once",
            "unit": "tokens/CPU s",
            "ours": ours,
            "reference": reference,
            "reference_name": "as many tokens in one turn",
            "ratio": ours / reference,
        },
    ]


def _prompts(name: str, work: Callable[[], None]) -> dict[str, Any]:
    def counted() -> list[float]:
        counts = (REGISTRY.get_sample_value("rftstream_prompt_tokens_total", {"result": result})
                  for result in ("computed", "reused"))  # fmt: skip
        return [count or 0.0 for count in counts]

    before = counted()
    work()
    computed, reused = (now - then for now, then in zip(counted(), before, strict=True))
    return {
        "name": f"turns: prompts of {name}",
        "unit": "tokens computed",
        "ours": computed,
        "reference": computed + reused,
        "reference_name": "tokens asked for",
        "ratio": computed / (computed + reused),
    }


def _fork(load: Load) -> None:
    """Prompts of 200 tokens, replies of 8, answers of 24: turn after turn, and beside turns 4 and 7 a fork of two
    turns with the same history and another reply."""
    spec = prepare_model(load.run.model, Path(load.run.base) / "model", 0)
    policy = HfPolicy(HfPolicy.Config(), model=spec, renderer=open_renderer(spec), clock=SystemClock())
    policy.load(weights(spec), VersionName(trainer_epoch=1, version=0))
    chance, number = random.Random(0), 0

    def reply(known: tuple[int, ...]) -> tuple[int, ...]:
        return (*known, *(chance.randrange(1, 17) for _ in range(8)))

    def ask(*prompts: tuple[int, ...]) -> list[tuple[int, ...]]:
        nonlocal number
        names = {}
        for prompt in prompts:
            sampling = Sampling(min_tokens=24, max_tokens=24)
            names[f"r{number}"] = prompt
            policy.submit(SampleRequest(request_id=f"r{number}", token_ids=prompt, sampling=sampling, seed=number,
                                        max_tokens=24, may_go_on=True))  # fmt: skip
            number += 1
        said: dict[str, tuple[int, ...]] = {}
        while policy.num_active:
            said |= {one.request_id: (*names[one.request_id], *one.token_ids.tolist()) for one in policy.step()}
        return [said[name] for name in names]

    known = tuple(chance.randrange(1, 17) for _ in range(192))
    for turn in range(1, 9):
        if turn in (4, 7):
            known, fork = ask(reply(known), reply(known))
            ask(reply(fork))
        else:
            [known] = ask(reply(known))
    policy.close()


def _share(load: Load, folder: Path) -> None:
    """The groups of the load, by two explorers that share the partitions."""
    run = MemoryRun(load.run, folder=folder)
    run.put_manifest()
    spec = prepare_model(load.run.model, folder / "model", load.run.run.seed)
    first = VersionName(trainer_epoch=1, version=0)
    run.put("weights", publish(run.store, weights(spec), first, spec.name, spec.dtype, resumed=True))
    sampling = Sampling(min_tokens=8, max_tokens=8)
    problems = [load.tasks[number - number % GROUP_SIZE].problem for number in range(len(load.tasks))]
    tasks = zip(load.tasks, problems, strict=True)
    run.put("tasks", *(replace(task, sampling=sampling, problem=problem) for task, problem in tasks))
    explorers = [RoleDriver(run, "explorer", process=f"explorer-{number}") for number in range(2)]
    while sum(run.transport().admin.end_offsets("rollouts").values()) < len(load.tasks):
        for explorer in explorers:
            explorer.tick()
        run.clock.advance(0.01)
    for explorer in explorers:
        explorer.stop()


def _with(load: Load, samplings: list[Any], environment: str = "single_turn") -> Load:
    tasks = zip(load.tasks, samplings, strict=True)
    return replace(load, tasks=tuple(replace(task, sampling=one, environment=environment) for task, one in tasks))
