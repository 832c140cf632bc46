"""Runs whose explorer is killed at every call of a rollout, or the hosts of its agents: what agents elsewhere and those
in hosts are told, and what is on the log in the end. Both logs are tested with them.

A call has four points to die at. In a round each call has another one, so four rounds are all points at all calls.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import psutil

from rftstream import faults
from rftstream.contracts.rollouts import Rollout, RolloutStatus, Segment
from rftstream.contracts.tasks import Task
from rftstream.gateway.keys import SECRET_VARIABLE, GatewayKeys
from tests.agents_elsewhere import (
    SECRET,
    AgentThreads,
    Conversation,
    Gateways,
    RolloutIsOverError,
    check_calls,
    texts_of,
)
from tests.e2e.workplace import FAKE, LONG_S, RunView, Workplace

POINTS = ("call_received", "call_sampled", "call_committed", "call_answered")
NUM_CALLS = 4
ROLES = ("asker", "solver")
"""Who speaks in turn in the rollouts of agents in hosts: each has two calls."""
ROUNDS = tuple(
    tuple(f"explorer:{POINTS[(number + shift) % len(POINTS)]}:{number + 1}" for number in range(NUM_CALLS))
    for shift in range(len(POINTS))
)
"""The faults of each round."""

IDLE_S = 300.0
"""After which an agent is late, also on a machine that has much else to do."""

RUN = (
    FAKE.replace("max_tokens = 8", "max_tokens = 400")
    .replace("steps = 6", "steps = 2")
    .replace('source = "arithmetic"', 'source = "arithmetic"\nenvironment = "{environment}"\nreward = "environment"')
    .replace('policy = "fake"', f'policy = "fake"\nidle_timeout_s = {IDLE_S}\n{{explorer}}')
    .replace("[transport]", "[policies.fake]\nmean_tokens = 8.0\nsigma = 0.4\n{more}[transport]\n{transport}")
)

AGENT = '''
import asyncio, json, os, signal, urllib.request

MOMENTS = ("before", "during", "after")


async def work(problem, base_url, api_key, seed, options):
    """Make the calls. On the way kill this host once, at a call and a moment that nobody has died at yet."""
    calls, die = options["calls"], None
    for place in [f"{moment}.{number}" for number in range(calls) for moment in MOMENTS] if options["kills"] else ():
        try:
            os.close(os.open(f"{options['folder']}/{place}.{seed}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            break  # this agent has died before
        try:
            os.close(os.open(f"{options['folder']}/{place}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        die = place
        break
    question, rewards = problem["messages"][-1]["content"], {}
    talks = {role: [{"role": "user", "content": question}] for role in options["roles"]}
    for number in range(calls):
        role = options["roles"][number % len(talks)]
        if die == f"before.{number}":
            os.kill(os.getpid(), signal.SIGKILL)
        body = asyncio.ensure_future(asyncio.to_thread(ask, base_url, api_key, f"policy:{role}", talks[role]))
        if die == f"during.{number}":
            await asyncio.sleep(options["during_s"])
            os.kill(os.getpid(), signal.SIGKILL)
        body = await body
        note = {"seed": seed, "host": os.getpid(), "call": number, "body": body}
        with open(options["log"], "a") as log:
            log.write(json.dumps(note) + "\\n")
        if die == f"after.{number}":
            os.kill(os.getpid(), signal.SIGKILL)
        text = json.loads(body)["choices"][0]["message"]["content"]
        rewards[role] = len(text) / 8
        talks[role] += [{"role": "assistant", "content": text}, {"role": "user", "content": f"{number + 1}+1="}]
    return {"roles": rewards}


def ask(base_url, api_key, model, messages):
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        json.dumps({"model": model, "messages": messages}).encode(),
        {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        return response.read().decode()
'''


def kill_under_agents(place: Workplace, name: str, told: Sequence[str], transport: str, policy: str = "") -> None:
    """Agents elsewhere make four calls in each rollout; the explorer dies at each call, once, as it is told. `policy`:
    more settings of the policy."""
    place.write("run.toml", RUN.format(environment="agent", explorer="", more=policy, transport=transport)
                .replace('"tiny"', f'"{name}"'))  # fmt: skip
    run = place.start("run", "run.toml", "--json", env={SECRET_VARIABLE: SECRET, faults.VARIABLE: ",".join(told)})
    view = place.view(f"runs/{name}")
    gateways = Gateways(view.folder.logs)
    agents = _Agents(gateways, GatewayKeys(SECRET.encode(), view.folder.run_id))
    threads = AgentThreads(gateways, agents.work, 6)
    try:
        done = run.finish(IDLE_S + LONG_S)
    finally:
        threads.join()
    assert done.code == 0, done.err
    _check_died(view, told)
    view.assert_nothing_lost()
    rollouts = check_calls(view, agents.told)
    completed = [one for one in rollouts.values() if one.status is RolloutStatus.completed]
    # An answer to /sessions that dies with its explorer may be asked for again before the successor has that partition:
    # the agent gets another rollout, and the first one stays with nobody until it is late.
    nobodys = [one for one in rollouts.values() if one.error is not None and one.error.endswith("and made no call")]
    assert len(completed) + len(nobodys) >= 12
    assert all(len(one.calls) == NUM_CALLS for one in completed)
    assert all(not one.calls for one in nobodys)
    others = {one.status for one in rollouts.values() if one not in nobodys}
    assert others <= {RolloutStatus.completed, RolloutStatus.skipped}
    _check_rewards(view, agents.rewards)
    assert SECRET not in done.err + done.out
    for path in view.folder.path.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path
    place.assert_nobody_left()


class _Agents:
    """Agents that make four calls in each rollout, and each of them twice."""

    def __init__(self, gateways: Gateways, keys: GatewayKeys) -> None:
        self._gateways, self._keys = gateways, keys
        self.told: dict[str, list[bytes]] = {}
        self.rewards: dict[str, float] = {}

    def work(self, number: int) -> None:
        count = 0
        while True:
            name = f"session {number}/{count}"
            session = json.loads(self._gateways.ask("/sessions", self._keys.session_token(), {}, name))
            count += 1
            self._attempt(session, named=number % 2 == 0)

    def _attempt(self, session: dict[str, Any], *, named: bool) -> None:
        talk = Conversation(
            self._gateways, rollout_id=session["rollout_id"], key=session["api_key"],
            question=session["problem"]["messages"][0]["content"], named=named,
        )  # fmt: skip
        self.told[talk.rollout_id] = talk.bodies
        try:
            for _ in range(NUM_CALLS):
                said = talk.call()
                assert talk.call_again() == talk.bodies[-1], "a retry gets the same bytes"
            reward = len(said.strip()) / 8
            talk.end(reward=reward)
            self.rewards[talk.rollout_id] = reward
        except RolloutIsOverError:
            return


def _check_died(view: RunView, told: Sequence[str]) -> None:
    marks = view.folder.logs / "faults"
    died = {path.name for path in marks.iterdir()} if told else set()
    assert died == {one.replace(":", ".") for one in told}, "it died as it was told"


def _check_rewards(view: RunView, rewards: dict[str, float]) -> None:
    for verified in view.verified():
        if verified.verdict is not None and verified.ids.rollout_id in rewards:
            assert verified.verdict.reward == rewards[verified.ids.rollout_id]


def kill_under_hosted(place: Workplace, name: str, told: Sequence[str], transport: str) -> None:
    """Agents in hosts make four calls in each rollout, two of each role. Their explorer dies at each call, once, as it
    is told; if it is told nothing their hosts die at each call, once before it, once while it is sampled, and once
    after it."""
    kills, log = place.folder / "kills", place.folder / "told.jsonl"
    kills.mkdir()
    options = {
        "calls": NUM_CALLS, "kills": not told, "folder": str(kills), "log": str(log), "during_s": 0.02,
        "roles": list(ROLES),
    }  # fmt: skip
    table = ", ".join(f"{key} = {json.dumps(value)}" for key, value in options.items())
    target = f'[environments.hosted_agent]\ntarget = "agents_here:work"\noptions = {{ {table} }}\n'
    # A rollout whose host dies three times fails: one at a time, none meets more than its own.
    explorer = "" if told else "max_concurrent = 1"
    text = RUN.format(environment="hosted_agent", explorer=explorer, more=target, transport=transport)
    place.write("run.toml", text.replace('"tiny"', f'"{name}"'))
    place.write("agents_here.py", AGENT)
    done = place.call("run", "run.toml", "--json", env={faults.VARIABLE: ",".join(told)})
    assert done.code == 0, done.err
    view = place.view(f"runs/{name}")
    if told:
        _check_died(view, told)
    else:
        assert len([one for one in os.listdir(kills) if one.count(".") == 1]) == 3 * NUM_CALLS
    view.assert_nothing_lost()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    seeds = {task.seed: task.ids.rollout_id for task in view.messages("tasks") if isinstance(task, Task)}
    bodies: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for line in lines:
        bodies[seeds[line["seed"]]][line["call"]].add(line["body"])
    twice = [(rollout_id, call) for rollout_id, calls in bodies.items() for call in calls if len(calls[call]) > 1]
    assert not twice, f"a call that is run again gets the same bytes: {twice}"
    assert max(Counter((line["seed"], line["call"]) for line in lines).values()) > 1, "some were run again"
    answers = {
        rollout_id: [next(iter(calls[number])).encode() for number in sorted(calls)]
        for rollout_id, calls in bodies.items()
    }
    rollouts = check_calls(view, answers)
    completed = [one for one in rollouts.values() if one.status is RolloutStatus.completed]
    assert len(completed) >= 12
    assert all(len(one.calls) == NUM_CALLS for one in completed)
    assert {one.status for one in rollouts.values()} <= {RolloutStatus.completed, RolloutStatus.skipped}
    _check_roles(view, completed)
    place.assert_nobody_left()
    hosts = {line["host"] for line in lines}
    place.wait_for(lambda: not any(psutil.pid_exists(host) for host in hosts), "the end of every host")


def _check_roles(view: RunView, completed: Sequence[Rollout]) -> None:
    """Check that each role's tokens are trained once, with the reward that its agent gave the role."""
    sampled, rewards = {}, {}
    for rollout in completed:
        sampled[rollout.ids.rollout_id] = _tokens_of_roles(rollout.segments)
        texts = zip(texts_of(rollout), ROLES * NUM_CALLS, strict=False)
        rewards[rollout.ids.rollout_id] = {role: len(text) / 8 for text, role in texts}
    trained = Counter(one.ids.rollout_id for one in view.experiences())
    assert trained and set(trained.values()) == {1} and set(trained) <= set(sampled)
    for experience in view.experiences():
        rollout_id = experience.ids.rollout_id
        assert _tokens_of_roles(experience.segments) == sampled[rollout_id] and len(sampled[rollout_id]) == len(ROLES)
        assert experience.roles == rewards[rollout_id]


def _tokens_of_roles(segments: Sequence[Segment]) -> dict[str, list[int]]:
    """Return the sampled tokens of each role."""
    found: dict[str, list[int]] = defaultdict(list)
    for segment in segments:
        found[segment.role] += segment.token_ids.numpy()[segment.loss_mask.numpy().astype(bool)].tolist()
    return dict(found)
