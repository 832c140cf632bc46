"""Agents in a run with faults: threads outside of it, and agents in hosts. What each does follows from its task alone,
so nothing that goes wrong may change what becomes of it."""

from __future__ import annotations

import contextlib
import os
import queue
from collections import Counter
from zlib import crc32

import psutil

from rftstream.contracts.records import TopicPartition
from rftstream.contracts.rollouts import RolloutStatus
from rftstream.contracts.tasks import Task
from rftstream.errors import TransportError
from rftstream.gateway.keys import GatewayKeys
from rftstream.runs.folder import open_run
from rftstream.service.role import Log
from tests.agents_elsewhere import (
    SECRET,
    AgentThreads,
    CallFailedError,
    Conversation,
    Gateways,
    RolloutIsOverError,
    check_calls,
)
from tests.e2e.workplace import RunView, Workplace

NUM_THREADS = 16
IDLE_S = 20.0
LOOK_S = 0.2

RUN_FILE = """
[run]
name = "{name}"
[model]
path = "fake"
[tasksets.elsewhere]
source = "arithmetic"
environment = "agent"
reward = "environment"
passes = 1
options = {{ size = 44 }}
[tasksets.hosted]
source = "arithmetic"
environment = "hosted_agent"
reward = "environment"
passes = 1
options = {{ skip = 44, size = 28 }}
[tasksets.plain]
source = "arithmetic"
reward = "odd:score"
passes = 1
options = {{ skip = 72, size = 16 }}
[environments.hosted_agent]
target = "agents_here:work"
options = {{ hosts = "{hosts}" }}
[sampling]
max_tokens = 400
[feeder]
groups_per_batch = 4
group_size = 3
max_staleness = 1
[explorer]
policy = "fake"
count = 2
partial_every_s = 0.1
yield_after_tokens = 20
idle_timeout_s = {idle_s}
[trainer]
backend = "fake"
checkpoint_every = 2
[evaluations.held-out]
source = "arithmetic"
options = {{ skip = 88, size = 4 }}
every = 8
[policies.fake]
tokens_per_s = 50.0
mean_tokens = 10.0
sigma = 0.8
fail_share = 0.02
answer_depends_on = "task"
[transport]
partitions = 6
"""
"""As the run without agents: about 20 steps, in which some groups die. Two agents or so fall silent."""

HOSTED = '''
import asyncio, json, os, urllib.request


async def work(problem, base_url, api_key, seed, options):
    """One call to four, told by the seed; no reward now and then."""
    with open(options["hosts"], "a") as hosts:
        hosts.write(f"{os.getpid()}\\n")
    messages = [{"role": "user", "content": problem["messages"][-1]["content"]}]
    for number in range(1 + seed % 4):
        body = await asyncio.to_thread(ask, base_url, api_key, messages)
        said = json.loads(body)["choices"][0]["message"]["content"]
        if seed % 3 == 0:  # begins its context anew, as a summary does
            messages = []
        messages += [{"role": "assistant", "content": said}] if messages else []
        messages += [{"role": "user", "content": f"{number}+{seed % 10}="}]
    return None if seed % 23 == 0 else len(said) / 8


def ask(base_url, api_key, messages):
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        return response.read().decode()
'''


def write_agents(place: Workplace, name: str) -> str:
    """Write what the run's hosts import; return its run file."""
    place.write("agents_here.py", HOSTED)
    return RUN_FILE.format(name=name, hosts=place.folder / "hosts", idle_s=IDLE_S)


class RigAgents:
    """The agents of one run. Whoever plays it calls `join` at its end, and `check` if it went well."""

    def __init__(self, place: Workplace, view: RunView) -> None:
        self._place, self._view = place, view
        self._gateways = Gateways(view.folder.logs)
        self._keys = GatewayKeys(SECRET.encode(), view.folder.run_id)
        self._tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self.told: dict[str, list[bytes]] = {}
        self._counts: Counter[str] = Counter()
        self._threads = AgentThreads(self._gateways, self._work, NUM_THREADS + 1)

    def join(self) -> None:
        """End them. What one of them met that must not be is raised."""
        self._threads.join()

    @property
    def happened(self) -> Counter[str]:
        """What they did beside the ordinary."""
        return self._counts

    def check(self) -> None:
        """Check what is on the log of their calls, and that no host is left."""
        rollouts = check_calls(self._view, self.told)
        silent = [one for one in rollouts.values() if one.status is RolloutStatus.truncated and one.calls]
        assert all(is_silent(one.ids.rollout_id) for one in silent), "only who falls silent is cut short"
        path = self._place.folder / "hosts"
        pids = set(map(int, path.read_text().split())) if path.exists() else set()
        self._place.wait_for(lambda: not any(map(_is_host, pids)), "the end of every host")

    # ------------------------------------------------------------------------------------------ in the threads

    def _work(self, number: int) -> None:
        if number == NUM_THREADS:
            self._give_tasks()
            return
        while True:
            with contextlib.suppress(queue.Empty):
                self._attempt(self._tasks.get_nowait())
            self._gateways.wait(LOOK_S)

    def _give_tasks(self) -> None:
        """An agent that knows its rollout can make its key, and needs no session."""
        positions: dict[TopicPartition, int] = {}
        transport = open_run(self._view.folder.path).transport
        try:
            while True:
                with contextlib.suppress(TransportError):  # a broker that is gone just now
                    for received in Log(transport).messages("tasks", start=positions):
                        positions[received.record.place] = received.record.offset + 1
                        if isinstance(received.message, Task) and received.message.environment == "agent":
                            self._tasks.put(received.message)
                self._gateways.wait(LOOK_S)
        finally:
            transport.close()

    def _attempt(self, task: Task) -> None:
        rollout_id = task.ids.rollout_id
        talk = Conversation(
            self._gateways, rollout_id=rollout_id, key=self._keys.rollout_key(rollout_id),
            question=task.problem.messages[-1].content, named=_draw(rollout_id, "named", 2) > 0,
        )  # fmt: skip
        num_calls = 1 + _draw(rollout_id, "calls", 4)
        with contextlib.suppress(RolloutIsOverError):
            try:
                for number in range(num_calls):
                    if _draw(rollout_id, f"leaves {number}", 4) == 0:
                        self._counts["an agent goes away"] += 1
                        talk.begin_and_leave()
                    said = talk.call()
                    if _draw(rollout_id, f"again {number}", 4) == 0:
                        self._counts["an agent asks again"] += 1
                        assert talk.call_again() == talk.bodies[-1], f"{rollout_id}: a retry got another answer"
                    if is_silent(rollout_id):
                        self._counts["an agent falls silent"] += 1
                        return
            except CallFailedError:
                talk.end(error="the policy failed")
                return
            finally:
                self.told[rollout_id] = talk.bodies
            talk.end(
                reward=None if _draw(rollout_id, "reward", 20) == 0 else len(said) / 8, metrics={"calls": num_calls}
            )


def is_silent(rollout_id: str) -> bool:
    """Whether the agent of a rollout stops after its first call."""
    return _draw(rollout_id, "silent", 90) == 0


def _draw(rollout_id: str, what: str, below: int) -> int:
    return crc32(f"{what} {rollout_id}".encode()) % below


def hosts_of(process: psutil.Process) -> list[psutil.Process]:
    """Return the hosts that an explorer has."""
    with contextlib.suppress(psutil.Error):
        return [one for one in process.children(recursive=True) if _is_host(one.pid)]
    return []


def _is_host(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(word.endswith(f"hosts{os.sep}runner.py") for word in psutil.Process(pid).cmdline())
    return False
