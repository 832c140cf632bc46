"""Whole runs on tasks of Harbor in a real Docker: kills of whoever holds a place, and what `check` and `try` say."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections import Counter
from pathlib import Path

import psutil
import pytest

from rftstream.contracts.rollouts import RolloutStatus
from tests.broker.conftest import run_id, servers  # noqa: F401  the fixtures of a real broker
from tests.docker_engine import docker, places_left, start_engine
from tests.e2e.workplace import Workplace
from tests.surroundings import ROOT
from tests.unit.data.test_harbor_tasks import task_at

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

LONG_S = 1800.0

RUN = """
[run]
name = "{name}"
steps = 100000
[model]
path = "fake"
[tasksets.harbor]
source = "harbor:tasks"
environment = "harbor"
reward = "environment"
[environments.harbor]
harness = "mini-swe-agent"
places = 3
[sampling]
max_tokens = 2000
[feeder]
groups_per_batch = 1
group_size = 3
[explorer]
policy = "scripted:Scripted"
[trainer]
backend = "fake"
[transport]
{transport}
"""
TESTS = "#!/bin/bash\nsleep 1\ncat /app/token.txt | grep -c 3f-otter-19 > /logs/verifier/reward.txt\n"
PHASES = {"made": "", "agent": "mini-swe-agent", "tests": "/tests/test.sh"}
"""Phase of a place -> words of the command that runs in it."""
VICTIMS = ("explorer", "container", "relay", "keeper", "command")
"""Processes that hold a place, and its containers. `keeper` and `command`: the engine's `run` and `exec`."""
MOMENTS = [(victim, phase) for victim in VICTIMS for phase in PHASES] + [(victim, "agent") for victim in VICTIMS]


@pytest.fixture(autouse=True)
def engine() -> None:
    start_engine()


def write_run(place: Workplace, name: str = "harbor", transport: str = "") -> Path:
    """Return the folder of its task."""
    place.write("harbor.toml", RUN.format(name=name, transport=transport))
    shutil.copy(Path(__file__).with_name("scripted.py"), place.folder)
    return task_at(place.folder / "tasks" / "find-token", test=TESTS)


class Clients:
    """The engine's commands of an explorer."""

    def __init__(self, place: Workplace) -> None:
        explorer = place.worker("explorer-0")
        self.found: list[tuple[psutil.Process, list[str]]] = []
        with contextlib.suppress(psutil.Error):
            for one in explorer.children() if explorer is not None else ():
                with contextlib.suppress(psutil.Error):
                    self.found.append((one, one.cmdline()))

    def of(self, word: str, name: str) -> list[psutil.Process]:
        """Return the commands that begin with a word and are about a container, or one with such a label."""
        return [one for one, words in self.found if words[1:2] == [word] and {name, f"--name={name}"} & set(words)]

    def in_phase(self, phase: str) -> list[str]:
        """Return the names of the places that are in a phase."""
        names = {word.removeprefix("--name=") for _, words in self.found for word in words if "--name=" in word}
        ran = {name: words[-1] for _, words in self.found for name in names if words[1:2] == ["exec"] and name in words}
        return sorted(
            name for name in names if not name.endswith("-relay")
            and (PHASES[phase] in ran.get(name, "") if PHASES[phase] else name not in ran)
        )  # fmt: skip


def kill(place: Workplace, victim: str, name: str) -> None:
    """Kill what holds this place. While no command runs in it, its relay stands for one."""
    relay, clients = f"{name}-relay", Clients(place)
    match victim:
        case "explorer":
            place.kill_worker("explorer-0")
        case "container" | "relay":
            docker("kill", name if victim == "container" else relay, check=False)  # it may not be there yet
        case "keeper" | "command":
            held = clients.of("run", name) if victim == "keeper" else clients.of("exec", name)
            for one in held or clients.of("run", relay):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()


@pytest.mark.law("lost", "twice")
@pytest.mark.filterwarnings("ignore:unclosed <s:ResourceWarning")  # the client of Kafka leaves sockets to the gc
@pytest.mark.parametrize("log", ["embedded", pytest.param("kafka", marks=pytest.mark.broker)])
def test_whoever_holds_a_place_is_killed_at_twenty_moments(
    place: Workplace, log: str, request: pytest.FixtureRequest
) -> None:
    """Under mini-swe-agent. Each rollout that ends well has its two calls, is judged by all that its agent did, and is
    trained once; no container is left."""
    rng, name, transport = random.Random(5), "harbor", ""
    if log == "kafka":
        name = request.getfixturevalue("run_id")()
        broker = request.getfixturevalue("servers")
        transport = f'kind = "kafka"\nservers = "{broker}"\nsession_timeout_s = 6.0'
    write_run(place, name, transport)
    run = place.start("run", "harbor.toml", "--json")
    view = place.view(f"runs/{name}")
    moments = rng.sample(MOMENTS, len(MOMENTS))
    for victim, phase in moments:
        found = place.wait_for(lambda phase=phase: Clients(place).in_phase(phase) or not run.alive, phase, LONG_S)
        assert run.alive, f"it came to its end before {victim} in {phase}"
        kill(place, victim, rng.choice(found))
    place.wait_for(lambda: len(view.verified()) >= 24, "rollouts", LONG_S)
    assert place.look("drain", f"runs/{name}").code == 0
    done = run.finish(LONG_S)
    assert done.code == 0, done.err
    view = place.view(f"runs/{name}")
    view.assert_nothing_lost()
    rollouts = [one for one in view.rollouts() if one.status is not RolloutStatus.skipped]
    ended = {one.ids.rollout_id: one for one in rollouts if one.status is RolloutStatus.completed}
    for rollout in ended.values():
        assert [call.segment for call in rollout.calls] == [0, 0]
        assert rollout.num_tokens == sum(call.count for call in rollout.calls)
        said = b"".join(bytes(one.token_ids.numpy()[one.loss_mask.numpy() > 0].tolist()) for one in rollout.segments)
        assert rollout.posted is not None and rollout.posted.reward == float(b"3f-otter-19" in said)
    for rollout in rollouts:
        assert rollout.status is RolloutStatus.completed or "lost" in str(rollout.error), rollout.error
    trained = Counter(one.ids.rollout_id for one in view.experiences())
    assert trained and set(trained.values()) == {1} and set(trained) <= set(ended)
    for experience in view.experiences():
        tokens = sum(int(segment.loss_mask.numpy().sum()) for segment in experience.segments)
        assert tokens == ended[experience.ids.rollout_id].num_tokens
    place.assert_nobody_left()
    place.wait_for(lambda: places_left() == [], "the end of every container")


def test_check_runs_a_solution_and_try_shows_rollouts(place: Workplace) -> None:
    task = write_run(place)
    fine = place.call("check", "harbor.toml", timeout_s=LONG_S)
    assert fine.code == 0 and "ready to run" in fine.out and "the solution of" not in fine.out, fine.out
    tried = place.call("try", "harbor.toml", "--num", "1", timeout_s=LONG_S)
    assert tried.code == 0 and "bash(command=" in tried.out and "agent_exit_code 0" in tried.out, tried.out
    (task / "solution" / "solve.sh").write_text("#!/bin/sh\necho nothing found; exit 3\n")
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
