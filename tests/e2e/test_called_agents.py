"""Agents at a service elsewhere that is called, in whole runs: both ways to end, and the death of the explorer."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter, defaultdict
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from rftstream.contracts.rollouts import Rollout, RolloutStatus
from tests.e2e.workplace import FAKE, Workplace
from tests.loopback import Asked, HttpServer

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


class Service(HttpServer):
    """Runs an agent of two model calls for each call of its own. It is held until the agent is done if the seed is odd;
    otherwise it is answered with 202, and the agent ends its rollout itself."""

    def __init__(self) -> None:
        self.ids: dict[str, list[str]] = defaultdict(list)
        """Rollout -> the ids of its calls."""
        self.first: dict[str, set[str]] = defaultdict(set)
        """Rollout -> the bodies of the first answer, in all its launches."""
        self.rewards: dict[str, set[float]] = defaultdict(set)
        self.gate, self.lock = threading.Event(), threading.Lock()
        super().__init__(self.told)
        self.url += "/run"

    def close(self) -> None:
        self.gate.set()
        super().close()

    def told(self, asked: Asked) -> object:
        call = asked.value
        assert asked.key == f"Bearer {TOKEN}" and asked.headers["idempotency-key"] == call["id"]
        with self.lock:
            self.ids[call["rollout_id"]].append(call["id"])
        if call["seed"] % 2 == 0:
            threading.Thread(target=self.end_it_itself, args=(call,), daemon=True).start()
            return 202, {}
        try:
            return self.work(call)
        except (URLError, ConnectionError):  # the explorer is gone, or calls no more
            return None

    def end_it_itself(self, call: dict[str, Any]) -> None:
        with contextlib.suppress(URLError, ConnectionError):  # likewise
            ask(call, "rollouts/end", self.work(call))

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


def ask(call: dict[str, Any], path: str, body: dict[str, Any]) -> str:
    request = Request(
        f"{call['base_url']}/{path}",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {call['api_key']}", "Content-Type": "application/json"},
    )
    with urlopen(request, timeout=240) as answer:
        text: str = answer.read().decode()
        return text


@pytest.mark.sampled(5, "kills")
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
        service.close()
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
    with HttpServer(lambda _: (501, "")) as service:
        place.write("tiny.toml", RUN.replace("URL", f"{service.url}/run"))
        done = place.call("run", "tiny.toml", "--json", env={"SERVICE_TOKEN": TOKEN})
    assert done.code == 6
    assert "status 501" in done.err + done.out
    assert TOKEN not in done.err + done.out
    place.assert_nobody_left()
