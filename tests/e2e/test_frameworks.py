"""Unmodified agents of smolagents and openai-agents and an environment of verifiers in one run, each in a virtual
environment of its own: the examples of docs/agents.md. The log has the rewards and calls that the frameworks report."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from random import choice
from typing import Any

import pytest

from rftstream.contracts.rollouts import Rollout, RolloutStatus
from tests.e2e.workplace import Workplace
from tests.unit.environments.hosts.venvs import interpreter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
PACKAGES = {
    "smolagents": ("smolagents[openai]==1.26.0", "openai==3.54.0"),
    "openai-agents": ("openai-agents==0.24.0", "openai==3.54.0"),
    "verifiers": ("verifiers==0.4.0",),
}

NOTED = '''
"""The examples, and a record of what they return, which says whose it is."""

import json
from pathlib import Path


def note(**what):
    with Path(__file__).with_name("notes.jsonl").open("a") as notes:
        notes.write(json.dumps(what) + "\\n")


def smolagents(problem, base_url, api_key, seed):
    from my_smolagents import solve

    found = solve(problem, base_url, api_key, seed)
    note(taskset="smolagents", seed=seed, **found)
    return found


async def openai(problem, base_url, api_key, seed, options):
    from my_openai_agents import solve

    found = await solve(problem, base_url, api_key, seed, options)
    note(taskset=f"openai-{options['api']}", seed=seed, **found)
    return found
'''

NOTED_TASKSET = '''
"""The taskset of the example, and a record of what verifiers reports of each of its episodes."""

from my_taskset import SumTaskset
from noted import note
from verifiers.v1.env import Env

run_episode = Env.run_episode


async def noted(self, *arguments, **more):
    episode = await run_episode(self, *arguments, **more)
    for trace in episode.traces:
        parts = {name: reward.value for name, reward in trace.rewards.items()}
        note(taskset="verifiers", idx=trace.task.data.idx, reward=trace.reward, parts=parts, ok=episode.ok,
             num_turns=trace.num_turns, said=trace.last_reply)
    return episode


Env.run_episode = noted
__all__ = ["SumTaskset"]
'''

OVERLAY = """
run.steps = 2
explorer.policy = "scripted:Scripted"
tasksets.smolagents.environment.target = "noted:smolagents"
tasksets.openai-chat.environment.target = "noted:openai"
tasksets.openai-responses.environment.target = "noted:openai"
tasksets.verifiers.environment.options.env.taskset.id = "noted_taskset"
"""


@pytest.fixture
def frameworks(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    """The examples with what they need. Programs of verifiers are run by uv, which must be found."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("UV_SYSTEM_CERTS", "1")
    for name in ("my_smolagents.py", "my_openai_agents.py", "my_taskset.py", "frameworks.toml"):
        shutil.copy(EXAMPLES / name, place.folder)
    shutil.copy(Path(__file__).with_name("scripted.py"), place.folder)
    place.write_lines("tasks.jsonl", [{"prompt": "", "idx": index} for index in range(8)])
    (place.folder / "venvs").mkdir()
    for name, packages in PACKAGES.items():
        (place.folder / "venvs" / name).symlink_to(Path(interpreter(*packages)).parents[1])
    return place


def test_what_they_need_excludes_each_other(frameworks: Workplace) -> None:
    code = "import importlib.metadata; print(importlib.metadata.version('openai').partition('.')[0])"
    versions = [
        subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        for name in PACKAGES
        if (python := frameworks.folder / "venvs" / name / "bin" / "python")
    ]
    assert versions == ["3", "3", "2"]


@pytest.mark.sampled(1, "frameworks")
def test_the_log_has_what_the_frameworks_report(frameworks: Workplace) -> None:
    place = frameworks
    place.write("noted.py", NOTED)
    place.write("noted_taskset.py", NOTED_TASKSET)
    place.write("overlay.toml", OVERLAY)
    done = place.call("run", "frameworks.toml", "overlay.toml", "--json")
    assert done.code == 0, done.err
    view = place.view("runs/frameworks")
    view.assert_nothing_lost()
    seeds = {task.ids.rollout_id: task.seed for task in view.messages("tasks") if hasattr(task, "seed")}
    notes: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in (place.folder / "notes.jsonl").read_text().splitlines():
        notes[json.loads(line)["taskset"]].append(json.loads(line))
    verdicts = {one.ids.rollout_id: one.verdict for one in view.verified()}
    found: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in view.rollouts():
        if rollout.status is RolloutStatus.skipped:
            continue
        assert rollout.status is RolloutStatus.completed, (rollout.ids.rollout_id, rollout.error)
        assert rollout.posted is not None and rollout.posted.source == "agent"
        found[rollout.ids.taskset].append(rollout)
        verdict = verdicts.get(rollout.ids.rollout_id)
        assert verdict is None or verdict.reward == rollout.posted.reward
        assert rollout.num_tokens == sum(call.count for call in rollout.calls)
        (note,) = [one for one in notes[rollout.ids.taskset] if is_of(one, rollout, seeds[rollout.ids.rollout_id])][:1]
        check(note, rollout)
    assert found.keys() == {"smolagents", "openai-chat", "openai-responses", "verifiers"}
    for rollouts in found.values():
        assert len(rollouts) >= 4
        assert {call.dialect for one in rollouts for call in one.calls} == {
            "responses" if rollouts is found["openai-responses"] else "chat"
        }
    for name in ("openai-chat", "openai-responses"):
        assert all(call.segment == 0 for one in found[name] for call in one.calls), "each call goes on from the last"
    rewards = {one.posted.reward for one in [*found["smolagents"], *found["openai-chat"]] if one.posted is not None}
    assert rewards == {0.0, 1.0}


WAYS = """
import asyncio

from noted import note


def code(problem, base_url, api_key, seed):
    from my_smolagents import LogLevel, OpenAIServerModel, add
    from smolagents import CodeAgent

    model = OpenAIServerModel("policy", api_base=base_url, api_key=api_key)
    agent = CodeAgent(tools=[add], model=model, max_steps=3, verbosity_level=LogLevel.OFF, return_full_result=True)
    return noted(seed, agent.run(problem["messages"][-1]["content"]), problem)


def stream(problem, base_url, api_key, seed):
    from my_smolagents import LogLevel, OpenAIServerModel, ToolCallingAgent, add

    model = OpenAIServerModel("policy", api_base=base_url, api_key=api_key)
    agent = ToolCallingAgent(tools=[add], model=model, max_steps=3, verbosity_level=LogLevel.OFF,
                             stream_outputs=True, return_full_result=True)
    return noted(seed, agent.run(problem["messages"][-1]["content"]), problem)


def noted(seed, result, problem):
    reward = float(str(result.output).strip() == problem["answer"])
    found = {"reward": reward, "metrics": {"output_tokens": result.token_usage.output_tokens}}
    note(seed=seed, **found)
    return found


async def streamed(problem, base_url, api_key, seed, options):
    from agents import ModelSettings
    from my_openai_agents import MODELS, Agent, AsyncOpenAI, Runner, add

    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        model = MODELS[options["api"]](model="policy", openai_client=client)
        settings = ModelSettings(include_usage=True)  # or a stream of chat completions does not tell it
        adder = Agent(
            name="adder", instructions="Use the tool add.", tools=[add], model=model, model_settings=settings
        )
        result = Runner.run_streamed(adder, problem["messages"][-1]["content"], max_turns=3)
        async for _ in result.stream_events():
            pass
    usage = result.context_wrapper.usage
    found = {"reward": float(result.final_output.strip() == problem["answer"]),
             "metrics": {"requests": usage.requests, "output_tokens": usage.output_tokens}}
    note(seed=seed, **found)
    return found
"""

WAYS_RUN = """
[run]
name = "ways"
steps = 4
[model]
path = "fake"
[environments.hosted_agent]
python = "venvs/smolagents/bin/python"
[sampling]
max_tokens = 2000
[feeder]
groups_per_batch = NUM_WAYS
group_size = 2
[explorer]
policy = "scripted:Scripted"
[trainer]
backend = "fake"
"""

OPENAI = 'python = "venvs/openai-agents/bin/python", options.api'
OTHER_WAYS = {
    "code": ('target = "ways:code"', 'reward = "environment"'),
    "stream": ('target = "ways:stream"', 'reward = "environment"'),
    "streamed-chat": (f'target = "ways:streamed", {OPENAI} = "chat"', 'reward = "environment"'),
    "streamed-responses": (f'target = "ways:streamed", {OPENAI} = "responses"', 'reward = "environment"'),
    "cut-smolagents": ('target = "my_smolagents:solve"', 'sampling.max_tokens = 60\nreward = "exact"'),
    "cut-responses": (
        f'target = "my_openai_agents:solve", {OPENAI} = "responses"', 'sampling.max_tokens = 60\nreward = "exact"'
    ),
}  # fmt: skip
"""Taskset -> its agent, and its settings beside that."""


def check_other_ways(place: Workplace, names: Sequence[str]) -> None:
    """Run agents of these tasksets, and compare what they report with the log."""
    tasksets = [
        f'[tasksets.{name}]\nsource = "arithmetic"\nenvironment = {{ name = "hosted_agent", {agent} }}\n{more}\n'
        for name, (agent, more) in OTHER_WAYS.items()
        if name in names
    ]
    place.write("noted.py", NOTED)
    place.write("ways.py", WAYS)
    place.write("ways.toml", WAYS_RUN.replace("NUM_WAYS", str(len(names))) + "".join(tasksets))
    done = place.call("run", "ways.toml", "--json")
    assert done.code == 0, done.err
    view = place.view("runs/ways")
    view.assert_nothing_lost()
    seeds = {task.ids.rollout_id: task.seed for task in view.messages("tasks") if hasattr(task, "seed")}
    noted = place.folder / "notes.jsonl"
    notes = {one["seed"]: one for one in map(json.loads, noted.read_text().splitlines() if noted.exists() else ())}
    found: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in view.rollouts():
        if rollout.status is not RolloutStatus.skipped:
            found[rollout.ids.taskset].append(rollout)
    assert found.keys() == set(names)
    for name, rollouts in found.items():
        for rollout in rollouts:
            if not name.startswith("cut-"):
                assert rollout.status is RolloutStatus.completed, (name, rollout.error)
                check(notes[seeds[rollout.ids.rollout_id]], rollout)
            elif rollout.status is not RolloutStatus.completed:
                assert rollout.status is RolloutStatus.truncated, (name, rollout.error)
                assert rollout.num_tokens == 60 and "and then the agent failed: " in str(rollout.error)
        assert any(one.status is RolloutStatus.truncated for one in rollouts) == name.startswith("cut-")


@pytest.mark.sampled(1, "frameworks")
def test_another_way_of_the_frameworks_and_rollouts_that_are_cut_off(frameworks: Workplace) -> None:
    """Two of the tasksets, which are others each time."""
    names = [choice([name for name in OTHER_WAYS if name.startswith("cut-") is cut]) for cut in (False, True)]
    print(names)
    check_other_ways(frameworks, names)


@pytest.mark.long
def test_all_other_ways_of_the_frameworks(frameworks: Workplace) -> None:
    check_other_ways(frameworks, tuple(OTHER_WAYS))


def is_of(note: dict[str, Any], rollout: Rollout, seed: int) -> bool:
    """Return whether a note is of this rollout: by its seed, or, where none is told, by task and answer."""
    if "seed" in note:
        return bool(note["seed"] == seed)
    assert rollout.problem is not None
    return (note["idx"], note["said"]) == (rollout.problem.info["idx"], rollout.turns[-1].content)


def check(note: dict[str, Any], rollout: Rollout) -> None:
    assert rollout.posted is not None and rollout.posted.reward == note["reward"]
    if "seed" not in note:
        assert note["ok"] and rollout.posted.parts == note["parts"] and len(rollout.calls) == note["num_turns"]
        return
    assert rollout.metrics == note["metrics"]
    assert note["metrics"]["output_tokens"] == rollout.num_tokens
    if "steps" in note["metrics"]:  # the first is the task
        assert len(rollout.calls) == note["metrics"]["steps"] - 1
    elif "requests" in note["metrics"]:
        assert len(rollout.calls) == note["metrics"]["requests"]
