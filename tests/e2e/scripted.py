"""A policy that says what a model would say that knows how to use tools. It stands beside a run file of a test."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rftstream.clock import Clock
from rftstream.contracts.rollouts import VersionSpan
from rftstream.contracts.versions import VersionName
from rftstream.models.rendering import Renderer
from rftstream.models.spec import ModelSpec
from rftstream.policies.base import Completion, SampleRequest
from rftstream.weights.snapshot import RawTensor

DONE, TOKEN = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT", "3f-otter-19"


def said(prompt: str, seed: int) -> str:
    """Return the next turn. A fourth of the answers are wrong, and a fifth of the first turns use no tool."""
    if DONE in prompt:  # mini-swe-agent, on the task find-token
        what = f"echo {TOKEN} > /app/token.txt" if seed % 4 else "ls /data"
        return call("bash", {"command": f"echo {DONE}" if "<tool_call>" in prompt.rpartition(DONE)[2] else what})
    *_, last = re.finditer(r"(\d+)\+(\d+)=", prompt)
    numbers, later = {"a": int(last[1]), "b": int(last[2])}, prompt[last.end() :]
    answer = str(sum(numbers.values()) + (seed % 4 == 0))
    if "<code>" in prompt:
        what = f"final_answer({answer!r})" if "Observation:" in later else "print(add({a}, {b}))".format(**numbers)
        return f"Thought: I write it as code.\n<code>\n{what}\n</code>"
    if "final_answer" in prompt:  # smolagents ends by a tool
        if "Observation:" in later:
            return call("final_answer", {"answer": answer})
        return "I do not know." if seed % 5 == 0 else call("add", numbers)
    if "Work it out with a tool" in prompt:  # coding agents, which have tools of their own
        if "<tool_call>" in later:
            return answer
        what = "echo $(({a} + {b}))".format(**numbers)
        if "Codex CLI" in prompt:
            return call("exec_command", {"cmd": what})
        return call("Bash", {"command": what, "description": "add"}) if "Claude" in prompt else call("add", numbers)
    if "Use the tool add." in prompt and not later.strip() and seed % 5:
        return call("add", numbers)
    return answer


def call(name: str, arguments: Mapping[str, object]) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Scripted:
    @dataclass(frozen=True, kw_only=True)
    class Config:
        pass

    slots = 64

    def __init__(self, config: Config, *, model: ModelSpec, renderer: Renderer, clock: Clock) -> None:
        self._renderer = renderer
        self._waiting: dict[str, SampleRequest] = {}
        self.version: VersionName | None = None

    @property
    def num_active(self) -> int:
        return len(self._waiting)

    def load(self, tensors: Mapping[str, RawTensor], name: VersionName) -> None:
        self.version = name

    def submit(self, request: SampleRequest) -> None:
        self._waiting[request.request_id] = request

    def so_far(self, request_id: str) -> Completion | None:
        return None

    def abort(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)

    def step(self) -> list[Completion]:
        if self.version is None:
            return []
        requests, self._waiting = list(self._waiting.values()), {}
        return [self._complete(request, self.version) for request in requests]

    def idle_s(self) -> float:
        return 0.0 if self._waiting and self.version is not None else math.inf

    def close(self) -> None:
        self._waiting.clear()

    def _complete(self, request: SampleRequest, name: VersionName) -> Completion:
        ids = [*said(self._renderer.decode(request.token_ids), request.seed).encode(), 0][: request.max_tokens]
        return Completion(
            request_id=request.request_id,
            token_ids=np.asarray(ids, np.int32),
            behavior_logprobs=np.full(len(ids), -0.5, np.float32),
            versions=(VersionSpan(start=0, count=len(ids), trainer_epoch=name.trainer_epoch, version=name.version),),
            finish_reason="stop" if ids[-1] == 0 else "length",
        )
