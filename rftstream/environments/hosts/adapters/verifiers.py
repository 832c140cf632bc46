"""Environments of the package verifiers (0.4): taskset, harness and rewards, run as an agent. `agent = "verifiers"`.

Options:

    env    the environment as verifiers' own run files have it in [env]: taskset, agents, harness. An agent's runtime is
           `subprocess` unless it is said otherwise; verifiers' own default is a cloud.
    model  the name of the model in requests, "policy" by default

The problem's `info.idx` is the number of the task in the taskset. The reward is that of the trace, or the mean of
several traces. In verifiers a failed trace has the reward 0; here it is an error, so its rollout is not trained on.

An environment of several agents is an episode with a role for each, which has the name and the reward of its trace (the
mean of its traces). An agent that verifiers does not train (`trainable = False`) is not trained here either. An agent
with a model or a client of its own has no role.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import os
import sys
import uuid
from collections.abc import Iterator
from typing import Any

from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.runtimes import SubprocessConfig
from verifiers.v1.utils.loaders import load_environment, load_taskset, resolve_env_config

os.environ["PATH"] = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", "")))  # uv may be there


class LoadedEnvironment:
    """A verifiers environment with its servers and the tasks used so far. There is one for each `env`."""

    def __init__(self, env: dict[str, Any]) -> None:
        config = resolve_env_config(copy.deepcopy(env))
        agents = agent_config_fields(config)
        own = [name for name, agent in agents.items() if agent.model is None and agent.client is None]
        self.roles = own if len(agents) > 1 else []
        """Agents that the policy plays, if there are several."""
        changed = {}
        for name, agent in agents.items():
            here = {} if (env.get(name) or {}).get("runtime") else {"runtime": SubprocessConfig()}
            model = {"model": f"policy:{name}"} if name in self.roles else {}
            changed[name] = agent.model_copy(update={**here, **model})
        self.environment = load_environment(config.model_copy(update=changed))
        self._tasks: dict[int, Any] = {}
        self._is_serving = asyncio.Event()
        self._server = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        async with self.environment.serving():
            self._is_serving.set()
            await asyncio.Event().wait()  # until the host ends

    async def ready(self) -> None:
        """Wait until the servers run; raise their error if they fail."""
        waiting = asyncio.create_task(self._is_serving.wait())
        await asyncio.wait((waiting, self._server), return_when=asyncio.FIRST_COMPLETED)
        if self._server.done():
            waiting.cancel()
            self._server.result()

    def task(self, number: int) -> Any:
        """Return the task at this place of the taskset."""
        if number not in self._tasks:
            found = next(itertools.islice(iter(self.environment.taskset), number, None), None)
            if found is None:
                raise ValueError(f"info.idx: got {number}, but the taskset has no such task")
            self._tasks[number] = found
        return self._tasks[number]


LOADED: dict[str, LoadedEnvironment] = {}


def tasks(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the tasks of the taskset, with the prompts that their agents begin with."""
    for number, task in enumerate(load_taskset(resolve_env_config(copy.deepcopy(options["env"])).taskset)):
        data = task.data
        prompt = data.prompt or ""
        said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [_said(one) for one in prompt]
        system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        info = {"idx": number, **{key: value for key in ("id", "name") if (value := getattr(data, key)) is not None}}
        yield {"messages": system + said, "answer": getattr(data, "answer", None), "info": info}


def _said(message: Any) -> dict[str, Any]:
    content = message.content if not isinstance(message, dict) else message.get("content")
    role = message.role if not isinstance(message, dict) else message["role"]
    if isinstance(content, list):
        parts = (part if isinstance(part, dict) else part.model_dump() for part in content)
        content = "\n".join(str(part.get("text") or f"({part.get('type')})") for part in parts)
    return {"role": role, "content": content or ""}


async def run(
    problem: dict[str, Any], base_url: str, api_key: str, seed: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Run one episode, and return its reward, parts and metrics."""
    if "idx" not in problem["info"] or "env" not in options:
        raise ValueError("expected the options `env`, and `info.idx` in every problem")
    key = json.dumps(options["env"], sort_keys=True)
    if key not in LOADED:
        LOADED[key] = LoadedEnvironment(options["env"])
    loaded = LOADED[key]
    await loaded.ready()
    variable = f"RFTSTREAM_KEY_{uuid.uuid4().hex}"  # verifiers takes a key in no other way
    os.environ[variable] = api_key
    try:
        client = EvalClientConfig(base_url=base_url, api_key_var=variable)
        context = ModelContext(model=options.get("model", "policy"), client=client)
        episode = await loaded.environment.run_episode(loaded.task(problem["info"]["idx"]), context)
    finally:
        del os.environ[variable]
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError(f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode failed")
    return result_of(episode.traces, loaded.roles)


def result_of(traces: list[Any], roles: list[str]) -> dict[str, Any]:
    """Return the mean reward of the traces, with their parts and metrics, and the reward of each role."""
    parts: dict[str, list[float]] = {}
    metrics: dict[str, list[float]] = {}
    for trace in traces:
        for name, reward in trace.rewards.items():
            if reward is not None:
                parts.setdefault(name, []).append(reward.value)
        for name, value in {**trace.metrics, "num_turns": trace.num_turns}.items():
            if value is not None:
                metrics.setdefault(name, []).append(float(value))
    scored = [trace for trace in traces if any(reward is not None for reward in trace.rewards.values())]
    trained = [trace for trace in scored if trace.agent.trainable] if roles else scored
    return {
        "reward": mean([trace.reward for trace in trained]),
        "roles": {
            role: mean([trace.reward for trace in trained if trace.agent.name == role])
            for role in dict.fromkeys(trace.agent.name for trace in traces if trace.agent.name in roles)
        },
        "parts": {name: sum(values) / len(traces) for name, values in parts.items()},
        "metrics": {name: sum(values) / len(values) for name, values in metrics.items()},
    }


def mean(rewards: list[float]) -> float | None:
    """Return the mean of rewards; None if there are none."""
    return sum(rewards) / len(rewards) if rewards else None
