"""A run whose tasksets use the same environment with settings of their own."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from rftstream.contracts.rollouts import Rollout, RolloutStatus
from rftstream.contracts.versions import EvalResult
from tests.e2e.workplace import FAKE, Workplace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HERE = '''
import json, os, urllib.request


def once(problem, base_url, api_key, seed, options):
    """Asks once, and returns what it was told to."""
    body = json.dumps({"model": "policy", "messages": problem["messages"]}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)) as response:
        response.read()
    return {"reward": options["reward"], "metrics": {"host": os.getpid(), "once": 1}}


def twice(problem, base_url, api_key, seed, options):
    once(problem, base_url, api_key, seed, options)
    return {**once(problem, base_url, api_key, seed, options), "parts": {"word": len(options["word"])}}


class Says:
    def __init__(self, config, *, problem, seed):
        self.config = config

    def start(self):
        return [self.config["text"]]

    def reply(self, said):
        return {"done": True, "reward": self.config["reward"], "metrics": {"host": os.getpid()}}
'''

RUN = (
    FAKE.replace("[tasksets.sums]", "[tasksets.first]")
    .replace('source = "arithmetic"', 'source = "arithmetic"\nenvironment = "hosted_agent"\nreward = "environment"')
    .replace("steps = 6", "steps = 8")
    + """
[tasksets.second]
source = "arithmetic"
reward = "environment"
[tasksets.second.environment]
name = "hosted_agent"
target = "here:twice"
options = { reward = 0.75, word = "env:OWN_WORD" }
processes = 2

[tasksets.third]
source = "arithmetic"
reward = "environment"
environment = { name = "hosted", options = { text = "left", reward = 0.25 } }

[tasksets.fourth]
source = "arithmetic"
reward = "environment"
environment = { name = "hosted", options = { text = "right", reward = 1.0 } }

[evaluations.held-out]
source = "arithmetic"
reward = "environment"
every = 100
num_tasks = 2
environment = { name = "hosted", options = { text = "at the end", reward = 0.125 } }

[evaluations.agents]
source = "arithmetic"
reward = "environment"
every = 100
num_tasks = 2
environment = { name = "hosted_agent", target = "here:twice", options = { reward = 0.625, word = "two" } }

[environments.hosted_agent]
target = "here:once"
options = { reward = 0.5 }

[environments.hosted]
target = "here:Says"
"""
)


def test_each_taskset_has_its_settings(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN_WORD", "a word")
    place.write("here.py", HERE)
    place.write("tiny.toml", RUN)
    checked = place.look("check", "tiny.toml", "-v")
    assert checked.code == 0, checked.out + checked.err
    assert "environment of tasksets.second" in checked.out
    done = place.call("run", "tiny.toml", "--json")
    assert done.code == 0, done.err
    view = place.view("runs/tiny")
    view.assert_nothing_lost()
    found: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in view.rollouts():
        if rollout.status is not RolloutStatus.skipped:
            assert rollout.status is RolloutStatus.completed, rollout.error
            found[rollout.ids.taskset].append(rollout)
    rewards: dict[str, Any] = {
        name: {one.posted.reward for one in rollouts if one.posted is not None} for name, rollouts in found.items()
    }
    assert rewards == {"first": {0.5}, "second": {0.75}, "third": {0.25}, "fourth": {1.0}}
    assert {len(one.calls) for one in found["first"]} == {1}
    assert {len(one.calls) for one in found["second"]} == {2}
    assert {one.posted.parts["word"] for one in found["second"] if one.posted is not None} == {6.0}
    hosts = {name: {one.metrics["host"] for one in rollouts} for name, rollouts in found.items()}
    assert not hosts["second"] & (hosts["first"] | hosts["third"]), "other settings of processes: hosts of its own"
    assert hosts["first"] == hosts["third"] == hosts["fourth"], "equal settings of processes: the same hosts"
    results = [one for one in view.messages("evals") if isinstance(one, EvalResult)]
    measured = {(one.evaluation, one.metrics["environment_reward"], one.num_unscored) for one in results}
    assert measured == {("held-out", 0.125, 0), ("agents", 0.625, 0)}
    assert "a word" not in (place.folder / "runs/tiny/config.toml").read_text()
