"""Processes that are killed, stopped and replaced in the middle of a run: nothing is lost, nothing is trained twice.

Rollouts take real time here (`policies.fake.tokens_per_s`), so that whoever is killed has work in hand.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections import Counter

import psutil
import pytest

from tests.e2e.workplace import FAKE, Process, RunView, Workplace, sets

pytestmark = [pytest.mark.slow, pytest.mark.law("lost", "twice", "conservation")]

SINGLES = ("trainer", "buffer", "feeder", "evaluator")

SLOW = (
    FAKE.replace("groups_per_batch = 2\ngroup_size = 3", "groups_per_batch = 4\ngroup_size = 4")
    .replace("max_tokens = 8", "max_tokens = 40")
    .replace("steps = 6", "steps = 100000")
    + """session_timeout_s = 2.0
[policies.fake]
tokens_per_s = 40.0
mean_tokens = 14.0
sigma = 0.6
[evaluations.held-out]
source = "arithmetic"
every = 10
num_tasks = 4
"""
)
"""About two steps a second, with a tail of long rollouts, until the test ends it: so it goes on for as long as a busy
machine takes."""


@pytest.fixture
def place(place: Workplace) -> Workplace:
    place.write("tiny.toml", SLOW)
    return place


def start_run(place: Workplace, *more: str) -> tuple[Process, RunView]:
    run = place.start("run", "tiny.toml", "--json", *sets(*more))
    return run, place.view("runs/tiny")


def reach(place: Workplace, view: RunView, version: int) -> None:
    place.wait_for(lambda: view.curve().version >= version, f"version {version}")


def owned(view: RunView, process: str) -> list[int]:
    """How many partitions a worker has had, one after the other."""
    return [int(count) for count in re.findall(r"owns (\d+) partitions", view.log_of(process))]


def drain(place: Workplace, run: Process, run_dir: str = "runs/tiny") -> int:
    """Let it end in order. Return its version."""
    assert place.look("drain", run_dir).code == 0
    done = run.finish()
    assert done.code == 0, done.err
    assert done.result["reason"] == "drained"
    return int(done.result["version"])


def check_the_laws(view: RunView, steps: int) -> None:
    """Of a run that has come to its end, whatever happened to it. The last batch of a drained one may be short."""
    report = view.assert_nothing_lost()
    assert report.version == steps
    num_groups = sum(one.num_groups for one in view.manifests() if one.batch_sequence < steps)
    assert 4 * (steps - 1) <= num_groups <= 4 * steps
    assert (report.groups.trained, report.rollouts.trained) == (num_groups, 4 * num_groups)
    assert (report.groups.dead, report.groups.expired, report.groups.filtered) == (0, 0, 0)
    trained = Counter(one.ids.rollout_id for one in view.experiences() if one.batch_sequence < steps)
    assert len(trained) == 4 * num_groups
    assert set(trained.values()) == {1}, "none is trained twice"
    for one in view.experiences():
        oldest = min(span.version for segment in one.segments for span in segment.versions)
        assert oldest >= one.ids.min_version
        assert one.batch_sequence - oldest <= 1, "never staler than max_staleness"
    order = [manifest.batch_sequence for manifest in view.manifests()]
    assert order == list(range(len(order)))


@pytest.mark.sampled(2, "roles-killed")
def test_workers_by_hand_are_killed_and_stopped_and_single_roles_are_restarted(place: Workplace) -> None:
    run, view = start_run(place, "explorer.count=0", "verifier.count=0")
    hands = {
        f"{role}-{letter}": place.start(
            "worker", "tiny.toml", "--role", role, "--run-dir", "runs/tiny", "--process", f"{role}-{letter}"
        )
        for role, letters in (("explorer", "abc"), ("verifier", "ab")) for letter in letters
    }  # fmt: skip
    for name in hands:
        place.wait_for(lambda: owned(view, name), f"a share of the work for {name}")  # noqa: B023
    reach(place, view, 2)
    for name in ("explorer-a", "verifier-a"):
        hands[name].send(signal.SIGKILL)
        assert hands[name].finish().code == -signal.SIGKILL
    view.stop(hands["explorer-b"].pid)
    for role in SINGLES:
        before = place.wait_for(lambda: view.control().claims.get(role), f"the first {role}")  # noqa: B023
        assert before is not None
        assert place.kill_worker(f"{role}-0") == before.pid
        place.wait_for(lambda: view.control().claims[role].epoch == before.epoch + 1, f"another {role}")  # noqa: B023
        reach(place, view, view.curve().version + 1)
    for name in ("explorer-c", "verifier-b"):
        place.wait_for(lambda: owned(view, name)[-1] == 4, f"all of the work for {name}")  # noqa: B023
    shares = len(owned(view, "explorer-b"))
    hands["explorer-b"].send(signal.SIGCONT)
    place.wait_for(lambda: 2 in owned(view, "explorer-b")[shares:], "a share for the one that comes back")

    version = drain(place, run)
    check_the_laws(view, version)
    assert {name: claim.epoch for name, claim in view.control().claims.items()} == dict.fromkeys(SINGLES, 2)
    for role in SINGLES:
        assert f"{role}-0 ended (killed by SIGKILL); starting again" in run.err
    for name in ("explorer-b", "explorer-c", "verifier-b"):
        left = hands[name].finish()
        assert left.code == 0, left.err
        assert "left: the run is finished" in left.err
    evaluated = {one.name.version for one in view.messages("evals")}  # type: ignore[union-attr]
    assert evaluated == {*range(0, version, 10), version}
    place.assert_nobody_left()


@pytest.mark.sampled(2, "roles-killed")
def test_everything_is_killed_and_then_the_supervisor_and_its_workers_end_with_it(place: Workplace) -> None:
    run, view = start_run(place)
    for version in (2, 4):
        reach(place, view, version)
        for process in reversed(place.processes()):
            with contextlib.suppress(psutil.NoSuchProcess):  # ended with one that was killed before
                process.kill()
        run.finish()
        place.assert_nobody_left()
        assert view.assert_nothing_lost().version >= version
        run = place.start("resume", "runs/tiny", "--json")
        place.wait_for(view.folder.is_live, "its supervisor")
    by_hand = place.start("worker", "tiny.toml", "--role", "explorer", "--process", "mine")
    place.wait_for(lambda: owned(view, "mine"), "a share of the work")
    reach(place, view, 6)
    assert len(place.processes()) > 6
    run.send(signal.SIGKILL)
    assert run.finish().code == -signal.SIGKILL
    place.wait_for(lambda: [one.pid for one in place.processes()] == [by_hand.pid], "the end of its workers")
    steps = view.assert_nothing_lost().version + 4
    assert steps >= 10
    refused = place.look("run", "tiny.toml")
    assert refused.code == 2
    assert "go on with `rftstream resume runs/tiny`" in refused.err

    resumed = place.call("resume", "runs/tiny", "--json", *sets(f"run.steps={steps}"))
    assert resumed.code == 0, resumed.err
    assert (resumed.result["steps"], resumed.result["reason"]) == (steps, "steps")
    check_the_laws(view, steps)
    assert view.folder.final.is_dir()
    assert by_hand.finish().code == 0, "it went on with the resumed run, and left at its end"
    place.assert_nobody_left()


@pytest.mark.sampled(2, "roles-killed")
@pytest.mark.law("fencing")
def test_other_trainers_take_over_and_the_first_comes_back_when_they_die(place: Workplace) -> None:
    """The first one lives when the second one comes; it stands still when the third one comes, and is fenced."""
    run, view = start_run(place)
    reach(place, view, 2)
    second = take_over(place, view, "second")
    place.wait_for(lambda: "left alone while that one lives" in run.err, "a word of the supervisor")
    assert f"trainer-0: trainer: second, process {second.pid} on " in run.err
    assert "took over with epoch 2" in run.err
    reach(place, view, view.curve().version + 2)
    assert place.worker("trainer-0") is None
    second.send(signal.SIGKILL)
    second.finish()
    place.wait_for(lambda: "who had taken the role over is gone; started again" in run.err, "the return of the first")
    place.wait_for(lambda: view.control().claims["trainer"].epoch == 3, "its claim")

    first = place.worker("trainer-0")
    assert first is not None
    view.stop(first.pid)
    third = take_over(place, view, "third")
    reach(place, view, view.curve().version + 2)
    first.send_signal(signal.SIGCONT)
    place.wait_for(lambda: run.err.count("left alone while that one lives") == 2, "the end of the first")
    version = drain(place, run)
    assert third.finish().code == 0
    check_the_laws(view, version)
    claim = view.control().claims["trainer"]
    assert (claim.process, claim.epoch) == ("third", 4), "nobody else has claimed it"
    epochs = [step.name.trainer_epoch for step in view.steps()]
    assert set(epochs) >= {1, 2, 4}
    assert epochs == sorted(epochs), "whoever was replaced wrote nothing afterwards"
    place.assert_nobody_left()


def take_over(place: Workplace, view: RunView, process: str) -> Process:
    started = place.start("worker", "tiny.toml", "--role", "trainer", "--process", process)
    place.wait_for(lambda: view.control().claims["trainer"].process == process, f"the claim of {process}")
    return started
