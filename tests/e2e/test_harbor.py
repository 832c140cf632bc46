"""Whole runs on tasks of Harbor in a real Docker: kills of explorer and containers, and what `check` and `try` say."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rftstream.contracts.rollouts import Rollout, RolloutStatus
from tests.broker.conftest import run_id, servers  # noqa: F401  the fixtures of a real broker
from tests.docker_engine import docker, places_left, start_engine
from tests.e2e.workplace import Workplace
from tests.surroundings import ROOT
from tests.unit.data.test_harbor_tasks import task_at

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

MOMENTS = 20
LONG_S = 1800.0

RUN = """
[run]
name = "{name}"
steps = 8
[model]
path = "fake"
[tasksets.harbor]
source = "harbor:{tasks}"
environment = "harbor"
reward = "environment"
[environments.harbor]
places = 3
command = '''
cat > /tmp/agent.py <<'PYTHON'
import json, os, time, urllib.error, urllib.request
def ask(*messages):
    body = json.dumps({{"model": "policy", "messages": messages}}).encode()
    headers = {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    while True:
        try:
            return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            time.sleep(0.5)
first = {{"role": "user", "content": os.environ["INSTRUCTION"]}}
answer = ask(first)
time.sleep(1)
last = ask(first, answer, {{"role": "user", "content": "sure?"}})
if len(last["content"]) % 2:
    open("/app/token.txt", "w").write("3f-otter-19")
PYTHON
python3 /tmp/agent.py
'''
[sampling]
max_tokens = 400
[feeder]
groups_per_batch = 1
group_size = 3
[explorer]
policy = "fake"
[policies.fake]
mean_tokens = 8.0
sigma = 0.4
[trainer]
backend = "fake"
[transport]
{transport}
"""


@pytest.fixture(autouse=True)
def engine() -> None:
    start_engine()


def write_run(place: Workplace, tasks: Path, name: str = "harbor", transport: str = "") -> None:
    place.write("harbor.toml", RUN.format(tasks=tasks, name=name, transport=transport))


@pytest.mark.law("lost", "twice")
@pytest.mark.filterwarnings("ignore:unclosed <s:ResourceWarning")  # the client of Kafka leaves sockets to the gc
@pytest.mark.parametrize("log", ["embedded", pytest.param("kafka", marks=pytest.mark.broker)])
def test_explorers_and_containers_are_killed_at_twenty_moments(
    place: Workplace, log: str, request: pytest.FixtureRequest
) -> None:
    """Each rollout that ends well has two calls and is trained once; no container is left."""
    rng, name, transport = random.Random(5), "harbor", ""
    if log == "kafka":
        name = request.getfixturevalue("run_id")()
        broker = request.getfixturevalue("servers")
        transport = f'kind = "kafka"\nservers = "{broker}"\nsession_timeout_s = 6.0'
    write_run(place, task_at(place.folder / "tasks" / "find-token").parent, name, transport)
    run = place.start("run", "harbor.toml", "--json")
    view = place.view(f"runs/{name}")
    for number in range(MOMENTS):
        wanted = rng.choice((1, 2, 4))
        place.wait_for(lambda wanted=wanted: len(places_left()) >= wanted or not run.alive, "places", LONG_S)
        assert run.alive, f"it came to its end after {number} kills"
        if number % 3 == 0:
            place.kill_worker("explorer-0")
        else:
            docker("rm", "--force", rng.choice(places_left() or ["none"]), check=False)  # it may be going by itself
    done = run.finish(LONG_S)
    assert done.code == 0, done.err
    view.assert_nothing_lost()
    rollouts = [one for one in view.messages("rollouts") if isinstance(one, Rollout)]
    ended = [one for one in rollouts if one.status is RolloutStatus.completed]
    assert len(ended) >= 24 and {one.posted.reward for one in ended if one.posted} == {0.0, 1.0}
    for rollout in ended:
        assert [call.segment for call in rollout.calls] == [0, 0]
        assert rollout.num_tokens == sum(int(segment.loss_mask.numpy().sum()) for segment in rollout.segments)
    for rollout in rollouts:
        assert rollout.status is RolloutStatus.completed or "lost" in str(rollout.error), rollout.error
    place.assert_nobody_left()
    place.wait_for(lambda: places_left() == [], "the end of every container")


def test_check_runs_a_solution_and_try_shows_rollouts(place: Workplace) -> None:
    tasks = task_at(place.folder / "tasks" / "find-token").parent
    write_run(place, tasks)
    fine = place.call("check", "harbor.toml", timeout_s=LONG_S)
    assert fine.code == 0 and "ready to run" in fine.out and "the solution of" not in fine.out, fine.out
    tried = place.call("try", "harbor.toml", "--num", "1", timeout_s=LONG_S)
    assert tried.code == 0 and "sure?" in tried.out and "agent_exit_code" in tried.out, tried.out
    (tasks / "find-token" / "solution" / "solve.sh").write_text("#!/bin/sh\necho nothing found; exit 3\n")
    doubtful = place.call("check", "harbor.toml", timeout_s=LONG_S)
    assert (
        "the solution of the task 'find-token' gets the reward 0.0, expected 1; mend it, or its tests" in doubtful.out
    )
    place.write(
        "harbor.toml", (place.folder / "harbor.toml").read_text().replace("places = 3", 'engine = "no-such-engine"')
    )
    missing = place.call("check", "harbor.toml")
    assert missing.code != 0 and "'no-such-engine' cannot be run" in missing.out + missing.err
    assert "install Docker or Podman, or name the command" in missing.out + missing.err
    assert places_left() == []


def test_the_page_leads_from_an_empty_folder_to_a_trained_step(place: Workplace) -> None:
    """docs/harbor.md, with mini-swe-agent: every call of it is on the log, and each sampled token is trained once."""
    task_at(place.folder / "tasks" / "find-token")
    place.write("harbor.toml", (ROOT / "tests" / "docs" / "examples" / "harbor.toml").read_text())
    checked = place.call("check", "harbor.toml", timeout_s=LONG_S)
    assert checked.code == 0 and "the solution of" not in checked.out, checked.out
    done = place.call("run", "harbor.toml", "--json", timeout_s=LONG_S)
    assert done.code == 0 and done.result["steps"] == 1, done.err
    view = place.view("runs/harbor")
    view.assert_nothing_lost()
    trained = {item.ids.rollout_id: item for item in view.verified()}
    assert len(trained) == 2
    for verified in trained.values():
        rollout = verified.rollout
        assert rollout is not None and rollout.status is RolloutStatus.completed and rollout.calls
        assert rollout.num_tokens == sum(int(segment.loss_mask.numpy().sum()) for segment in rollout.segments) > 0
    assert places_left() == []
