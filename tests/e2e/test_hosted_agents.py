"""Agents that the explorer runs in host processes, in whole runs: their ends, deaths of host and explorer."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from rftstream.contracts.rollouts import PartialRollout, Rollout, RolloutStatus
from rftstream.contracts.verdicts import UnscorableReason
from rftstream.contracts.versions import EvalResult
from tests.e2e.workplace import FAKE, RunView, Workplace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

AGENT = '''
import asyncio, json, os, urllib.request


async def work(problem, base_url, api_key, seed, options):
    """Ends as its seed says, after one call or two."""
    how = seed % options["ways"]
    question = problem["messages"][-1]["content"] + (f" {os.getpid()}" if options["restless"] else "")
    messages = [{"role": "user", "content": question}]
    messages += [await ask(base_url, api_key, messages, seed, options), {"role": "user", "content": "sure?"}]
    if how == 1:
        raise LookupError("no such thing")
    if how == 2:
        return None
    while options["gate"] and not os.path.exists(options["gate"]):
        await asyncio.sleep(0.02)
    last = await ask(base_url, api_key, messages, seed, options)
    reward = len(last["content"]) / 8
    return {"reward": reward, "parts": {"long": reward}, "metrics": {"calls": 2}}


async def ask(base_url, api_key, messages, seed, options):
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"},
    )

    def send():
        with urllib.request.urlopen(request) as response:
            return response.read().decode()

    body = await asyncio.to_thread(send)
    with open(options["log"], "a") as log:
        log.write(json.dumps({"seed": seed, "host": os.getpid(), "call": len(messages) // 2, "body": body}) + "\\n")
    return json.loads(body)["choices"][0]["message"]
'''

HELD_OUT = """
[evaluations.held-out]
source = "arithmetic"
options = { size = 3 }
environment = { name = "hosted_agent", options = OPTIONS }
reward = "environment"
n = 2
k = [1, 2]
every = 2
"""


def write_run(place: Workplace, *, ways: int, restless: bool = False, gate: str = "", **settings: Any) -> Path:
    """Write a run file and its agent; return the file in which the agents note what they were told."""
    log = place.folder / "told.jsonl"
    options = {"ways": ways, "restless": restless, "gate": gate, "log": str(log)}
    text = (
        FAKE.replace(
            'source = "arithmetic"', 'source = "arithmetic"\nenvironment = "hosted_agent"\nreward = "environment"'
        )
        .replace("max_tokens = 8", "max_tokens = 400")
        .replace("steps = 6", "steps = 4")
    )
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    table = ", ".join(f"{name} = {json.dumps(value)}" for name, value in options.items())
    text += "\n".join(
        ["[environments.hosted_agent]", 'target = "agents_here:work"', f"options = {{ {table} }}", *lines, ""]
    )
    text += "[policies.fake]\nmean_tokens = 8.0\nsigma = 0.4\n"
    place.write("agents_here.py", AGENT)
    place.write("tiny.toml", text)
    return log


def told(log: Path) -> list[dict[str, Any]]:
    text = log.read_text() if log.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def assert_nobody_left(place: Workplace, log: Path) -> None:
    """Hosts are looked for by their process ids: they do not see the variables of those who started them."""
    place.assert_nobody_left()
    hosts = {line["host"] for line in told(log)}
    place.wait_for(lambda: not any(psutil.pid_exists(host) for host in hosts), "the end of every host")


def by_seed(place: Workplace) -> dict[int, Rollout]:
    """The rollouts by the seeds of their tasks; one record for each."""
    view = place.view("runs/tiny")
    seeds = {task.ids.rollout_id: task.seed for task in view.messages("tasks") if hasattr(task, "seed")}
    rollouts = [one for one in view.rollouts() if one.status is not RolloutStatus.skipped]
    assert max(Counter(one.ids.rollout_id for one in rollouts).values()) == 1
    return {seeds[one.ids.rollout_id]: one for one in rollouts}


def test_how_agents_end(place: Workplace) -> None:
    """The evaluator runs agents as explorers do; here all of its agents end well."""
    log = write_run(place, ways=7)
    options = f'{{ ways = 1, restless = false, gate = "", log = {json.dumps(str(log))} }}'
    place.write("tiny.toml", (place.folder / "tiny.toml").read_text() + HELD_OUT.replace("OPTIONS", options))
    done = place.call("run", "tiny.toml", "--json")
    assert done.code == 0, done.err
    view = place.view("runs/tiny")
    view.assert_nothing_lost()
    rollouts = by_seed(place)
    verdicts = {one.ids.rollout_id: one for one in view.verified()}
    assert {seed % 7 for seed in rollouts} >= {1, 2}
    check_evaluations(view)
    for seed, rollout in rollouts.items():
        verified = verdicts.get(rollout.ids.rollout_id)
        if seed % 7 == 1:
            assert rollout.status is RolloutStatus.failed and len(rollout.calls) == 1
            assert rollout.error == "the agent failed: LookupError: no such thing"
        elif seed % 7 == 2:
            assert rollout.status is RolloutStatus.completed and rollout.posted is None and len(rollout.calls) == 1
            assert verified is None or verified.reason is UnscorableReason.no_reward
        else:
            assert rollout.status is RolloutStatus.completed and [one.segment for one in rollout.calls] == [0, 0]
            last = json.loads(next(one["body"] for one in told(log) if one["seed"] == seed and one["call"] == 1))
            reward = len(last["choices"][0]["message"]["content"]) / 8
            assert rollout.posted is not None and rollout.metrics == {"calls": 2.0}
            assert (rollout.posted.reward, rollout.posted.parts) == (reward, {"long": reward})
            assert verified is None or (verified.verdict is not None and verified.verdict.reward == reward)
    assert_nobody_left(place, log)


@pytest.mark.sampled(5, "kills")
@pytest.mark.law("lost", "twice")
@pytest.mark.parametrize("on_restart", ["replay", "anew"])
def test_host_and_explorer_are_killed_in_the_middle(place: Workplace, on_restart: str) -> None:
    """All agents wait behind their first call: in a host that is killed, in an explorer that is, in a run that is
    stopped."""
    gate, anew = place.folder / "gate", on_restart == "anew"
    log = write_run(place, ways=1, restless=anew, gate=str(gate), on_restart=on_restart)
    run = place.start("run", "tiny.toml", "--json")
    view = place.view("runs/tiny")

    def first_calls() -> dict[int, set[int]]:
        """Seed -> the hosts in which its agent was given its first answer."""
        found: dict[int, set[int]] = defaultdict(set)
        for line in told(log):
            found[line["seed"]].add(line["host"])
        return found

    place.wait_for(lambda: len(first_calls()) >= 4, "first calls")
    begun = set(first_calls())
    host = next(iter(first_calls()[min(begun)]))
    if not anew:
        os.kill(host, signal.SIGKILL)
        place.wait_for(lambda: all(len(first_calls()[seed]) >= 2 for seed in begun), "another host")
    count = 1 if anew else 2  # hosts in which each of these agents has run so far
    place.kill_worker("explorer-0")
    place.wait_for(lambda: all(len(first_calls()[seed]) >= count + 1 for seed in begun), "another explorer")
    num_pieces = Counter(one.ids.rollout_id for one in view.messages("partials") if isinstance(one, PartialRollout))
    if not anew:  # who leaves cancels its agents before they are refused, so none of them fails of it
        run.send(signal.SIGINT)
        run.finish()
        assert_nobody_left(place, log)
        run = place.start("resume", "runs/tiny", "--json")
    gate.touch()
    done = run.finish()
    assert done.code == 0, done.err
    view.assert_nothing_lost()
    rollouts = by_seed(place)
    assert {one.status for one in rollouts.values()} == {RolloutStatus.completed}
    assert begun <= rollouts.keys()
    bodies: dict[int, set[str]] = defaultdict(set)
    for line in told(log):
        if line["call"] == 0:
            bodies[line["seed"]].add(line["body"])
    for seed in begun:
        rollout = rollouts[seed]
        assert rollout.status is RolloutStatus.completed and rollout.posted is not None
        assert [(call.number, call.segment) for call in rollout.calls] == [(0, 0), (1, 0)]
        assert rollout.num_tokens == int(rollout.segments[0].loss_mask.numpy().sum())
        if anew:
            assert num_pieces[rollout.ids.rollout_id] == 2
        else:
            assert num_pieces[rollout.ids.rollout_id] == 1
    if not anew:
        assert all(len(found) == 1 for found in bodies.values()), "a recorded call is answered with the same bytes"
    assert all(len(one.calls) == 2 for one in rollouts.values())
    assert_nobody_left(place, log)


def check_evaluations(view: RunView) -> None:
    """Two calls each, with rewards, parts and metrics."""
    results = [one for one in view.messages("evals") if isinstance(one, EvalResult)]
    assert [one.name.version for one in results] == [0, 2, 4]
    for result in results:
        assert (result.num_tasks, result.num_samples, result.num_unscored) == (3, 2, 0)
        assert result.metrics["metric/calls"] == 2.0 and result.metrics["metric/long"] == result.metrics["mean"]
        assert result.metrics["environment_reward"] == result.metrics["mean"] > 0.0
        text = (view.folder.path / "weights" / str(result.generations)).read_text()
        assert [len(json.loads(line)["completion"]) for line in text.splitlines()] == [3] * 6


def test_an_agent_that_is_not_there_ends_the_run(place: Workplace) -> None:
    write_run(place, ways=1)
    place.write("agents_here.py", "import a_module_that_nobody_has\n")
    done = place.call("run", "tiny.toml", "--json")
    assert done.code != 0
    assert "a_module_that_nobody_has" in done.err + done.out
    place.assert_nobody_left()
