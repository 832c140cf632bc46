"""Agents at a service elsewhere that is called, in whole runs: both ways to end, and the death of the explorer."""

from __future__ import annotations

import json
import threading
from collections import Counter, defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from rftstream.contracts.rollouts import Rollout, RolloutStatus
from tests.e2e.workplace import FAKE, Workplace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOKEN = "a-token-that-nobody-may-see"
WAYS = ("replay", "anew")
"""What `on_restart` may be; each is a taskset of this name."""
TASKSET = """[tasksets.WAY]
source = "arithmetic"
environment = { name = "agent", on_restart = "WAY" }
reward = "environment"
"""
RUN = (
    FAKE.replace('[tasksets.sums]\nsource = "arithmetic"\n', "".join(TASKSET.replace("WAY", way) for way in WAYS))
    .replace("max_tokens = 8", "max_tokens = 400")
    .replace("steps = 6", "steps = 5")
    .replace("groups_per_batch = 2", "groups_per_batch = 4")
    + """
[environments.agent]
url = "URL"
api_key = "env:SERVICE_TOKEN"
[policies.fake]
mean_tokens = 8.0
sigma = 0.4
"""
)


class Service(ThreadingHTTPServer):
    """Runs an agent of two model calls for each call of its own. It is held until the agent is done if the seed is odd;
    otherwise it is answered with 202, and the agent ends its rollout itself."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        self.ids: dict[str, list[str]] = defaultdict(list)
        """Rollout -> the ids of its calls."""
        self.first: dict[str, set[str]] = defaultdict(set)
        """Rollout -> the bodies of the first answer, in all its launches."""
        self.rewards: dict[str, set[float]] = defaultdict(set)
        self.gate, self.lock = threading.Event(), threading.Lock()
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/run"
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def end(self) -> None:
        self.gate.set()
        self.shutdown()
        self._thread.join()
        self.server_close()

    def work(self, call: dict[str, Any]) -> dict[str, Any]:
        """Be the agent."""
        messages = [call["problem"]["messages"][-1]]
        first = ask(call, "chat/completions", {"model": "m", "messages": messages})
        with self.lock:
            self.first[call["rollout_id"]].add(first)
        self.gate.wait()
        messages += [json.loads(first)["choices"][0]["message"], {"role": "user", "content": "sure?"}]
        last = ask(call, "chat/completions", {"model": "m", "messages": messages})
        reward = len(json.loads(last)["choices"][0]["message"]["content"]) / 8
        with self.lock:
            self.rewards[call["rollout_id"]].add(reward)
        return {"reward": reward, "parts": {"long": reward}, "metrics": {"calls": 2}}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, Service)
        call = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.headers["Authorization"] == f"Bearer {TOKEN}" and self.headers["Idempotency-Key"] == call["id"]
        with server.lock:
            server.ids[call["rollout_id"]].append(call["id"])
        try:
            if call["seed"] % 2:
                self._answer(200, server.work(call))
            else:
                self._answer(202, {})
                ask(call, "rollouts/end", server.work(call))
        except (URLError, ConnectionError):  # the explorer is gone, or calls no more
            self.close_connection = True

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()

    def log_message(self, *arguments: Any) -> None:
        pass


def ask(call: dict[str, Any], path: str, body: dict[str, Any]) -> str:
    request = Request(
        f"{call['base_url']}/{path}",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {call['api_key']}", "Content-Type": "application/json"},
    )
    with urlopen(request, timeout=240) as answer:
        text: str = answer.read().decode()
        return text


@pytest.mark.law("lost", "twice")
def test_an_explorer_is_killed_under_the_agents_that_it_called(place: Workplace) -> None:
    """All agents wait behind their first model call when their explorer dies. The next one calls them again."""
    service = Service()
    place.write("tiny.toml", RUN.replace("URL", service.url))
    run = place.start("run", "tiny.toml", "--json", env={"SERVICE_TOKEN": TOKEN})
    try:
        view = place.view("runs/tiny")
        place.wait_for(lambda: {name.partition("/")[0] for name in service.first} == set(WAYS), "first model calls")
        begun = set(service.first)
        place.kill_worker("explorer-0")
        place.wait_for(lambda: all(len(set(service.ids[one])) >= 2 for one in begun), "second calls")
        service.gate.set()
        done = run.finish()
    finally:
        service.end()
    assert done.code == 0, done.err
    view.assert_nothing_lost()
    rollouts = [one for one in view.rollouts() if one.status is not RolloutStatus.skipped]
    assert max(Counter(one.ids.rollout_id for one in rollouts).values()) == 1
    found = {one.ids.rollout_id: one for one in rollouts}
    verified = {one.ids.rollout_id: one for one in view.verified()}
    assert begun <= found.keys()
    for rollout_id, rollout in found.items():
        assert_complete(rollout)
        assert rollout.posted is not None and rollout.posted.reward in service.rewards[rollout_id]
        verdict = verified[rollout_id].verdict if rollout_id in verified else None
        assert verdict is None or verdict.reward == rollout.posted.reward
        if rollout.ids.taskset == "replay":
            assert len(service.first[rollout_id]) == 1, "a recorded call is answered with the same bytes"
    assert TOKEN not in done.err + done.out
    for path in view.folder.path.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path
    place.assert_nobody_left()


def assert_complete(rollout: Rollout) -> None:
    assert rollout.status is RolloutStatus.completed, rollout.error
    assert [(call.number, call.segment) for call in rollout.calls] == [(0, 0), (1, 0)]
    assert rollout.num_tokens == int(rollout.segments[0].loss_mask.numpy().sum())
    assert rollout.metrics == {"calls": 2.0}


def test_a_service_that_refuses_ends_the_run_with_its_reason(place: Workplace) -> None:
    service = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)  # 501 for every POST
    thread = threading.Thread(target=service.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        url = f"http://127.0.0.1:{service.server_address[1]}/run"
        place.write("tiny.toml", RUN.replace("URL", url))
        done = place.call("run", "tiny.toml", "--json", env={"SERVICE_TOKEN": TOKEN})
    finally:
        service.shutdown()
        thread.join()
        service.server_close()
    assert done.code == 6
    assert "status 501" in done.err + done.out
    assert TOKEN not in done.err + done.out
    place.assert_nobody_left()
