"""Processes that are killed, stopped and replaced in the middle of a run: nothing is lost, nothing is trained twice.

Rollouts take real time here (`policies.fake.tokens_per_s`), so that whoever is killed has work in hand.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections import Counter

import psutil
import pytest

from rftstream.queries.balance import AuditReport
from tests.e2e.workplace import FAKE, Process, RunView, Workplace

pytestmark = pytest.mark.slow

SLOW = (
    FAKE.replace("groups_per_batch = 2\ngroup_size = 3", "groups_per_batch = 4\ngroup_size = 4").replace(
        "max_tokens = 8", "max_tokens = 40"
    )
    + """
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
"""About two steps a second, with a tail of long rollouts."""

STOPPED_S = 20.0


@pytest.fixture
def place(place: Workplace) -> Workplace:
    place.write("tiny.toml", SLOW)
    return place


def start_run(place: Workplace, steps: int, *more: str) -> tuple[Process, RunView]:
    run = place.start("run", "tiny.toml", "--json", "--set", f"run.steps={steps}", *more)
    return run, place.view("runs/tiny")


def reach(place: Workplace, view: RunView, version: int) -> None:
    place.wait_for(lambda: view.curve().version >= version, f"version {version}")


def check_the_laws(view: RunView, steps: int) -> AuditReport:
    """Of a run that has come to its end, whatever happened to it."""
    report = view.assert_nothing_lost()
    assert report.version == steps
    assert report.groups.trained == 4 * steps
    assert report.rollouts.trained == 16 * steps
    assert (report.groups.dead, report.groups.expired, report.groups.filtered) == (0, 0, 0)
    trained = Counter(one.ids.rollout_id for one in view.experiences() if one.batch_sequence < steps)
    assert len(trained) == 16 * steps
    assert set(trained.values()) == {1}, "none is trained twice"
    for one in view.experiences():
        oldest = min(span.version for segment in one.segments for span in segment.versions)
        assert oldest >= one.ids.min_version
        assert one.batch_sequence - oldest <= 1, "never staler than max_staleness"
    order = [manifest.batch_sequence for manifest in view.manifests()]
    assert order == list(range(len(order)))
    return report


def test_workers_by_hand_are_killed_and_stopped_and_single_roles_are_restarted(place: Workplace) -> None:
    steps = 50
    run, view = start_run(place, steps, "--set", "explorer.count=0", "--set", "verifier.count=0")
    hands = {
        f"{role}-{letter}": place.start(
            "worker", "tiny.toml", "--role", role, "--run-dir", "runs/tiny", "--process", f"{role}-{letter}"
        )
        for role, letters in (("explorer", "abc"), ("verifier", "ab")) for letter in letters
    }  # fmt: skip
    for name in hands:
        place.wait_for(lambda: "owns" in view.log_of(name), f"a share of the work for {name}")  # noqa: B023
    reach(place, view, 3)
    for name in ("explorer-a", "verifier-a"):
        hands[name].send(signal.SIGKILL)
        assert hands[name].finish().code == -signal.SIGKILL
    view.stop(hands["explorer-b"].pid)
    stopped_at = time.monotonic()
    kills = 2
    for role in ("trainer", "buffer", "feeder", "evaluator"):
        before = place.wait_for(lambda: view.control().claims.get(role), f"the first {role}")  # noqa: B023
        assert before is not None
        assert place.kill_worker(f"{role}-0") == before.pid
        place.wait_for(lambda: view.control().claims[role].epoch == before.epoch + 1, f"another {role}")  # noqa: B023
        kills += 1
        version = view.curve().version
        reach(place, view, version + 1)
    place.wait_for(lambda: time.monotonic() - stopped_at >= STOPPED_S, "the end of the stop")
    assert run.alive, "the stopped one comes back into a live run"
    hands["explorer-b"].send(signal.SIGCONT)

    done = run.finish()
    assert done.code == 0, done.err
    assert (done.result["steps"], done.result["reason"]) == (steps, "steps")
    check_the_laws(view, steps)
    assert kills == 6
    assert {name: claim.epoch for name, claim in view.control().claims.items()} == dict.fromkeys(
        ("trainer", "buffer", "feeder", "evaluator"), 2
    )
    for role in ("trainer", "buffer", "feeder", "evaluator"):
        assert f"{role}-0 ended (killed by SIGKILL); starting again" in done.err
    for name in ("explorer-b", "explorer-c", "verifier-b"):
        left = hands[name].finish()
        assert left.code == 0, left.err
        assert "left: the run is finished" in left.err
    evaluated = {one.name.version for one in view.messages("evals")}  # type: ignore[union-attr]
    assert evaluated == {0, 10, 20, 30, 40, 50}
    place.assert_nobody_left()


def test_the_supervisor_is_killed_and_its_workers_end_with_it(place: Workplace) -> None:
    run, view = start_run(place, 16)
    by_hand = place.start("worker", "tiny.toml", "--role", "explorer", "--process", "mine")
    place.wait_for(lambda: "owns" in view.log_of("mine"), "a share of the work")
    reach(place, view, 4)
    assert len(place.processes()) > 6
    run.send(signal.SIGKILL)
    assert run.finish().code == -signal.SIGKILL
    place.wait_for(lambda: [one.pid for one in place.processes()] == [by_hand.pid], "the end of its workers", 5.0)
    assert view.assert_nothing_lost().version >= 4
    refused = place.call("run", "tiny.toml")
    assert refused.code == 2
    assert "go on with `rftstream resume runs/tiny`" in refused.err

    resumed = place.call("resume", "runs/tiny", "--json")
    assert resumed.code == 0, resumed.err
    assert (resumed.result["steps"], resumed.result["reason"]) == (16, "steps")
    check_the_laws(view, 16)
    assert by_hand.finish().code == 0, "it went on with the resumed run, and left at its end"
    place.assert_nobody_left()


def test_everything_is_killed_at_once_again_and_again(place: Workplace) -> None:
    _, view = start_run(place, 20)
    kills = 0
    for version in (3, 6, 7, 12):
        reach(place, view, version)
        for process in reversed(place.processes()):
            kills += 1
            with contextlib.suppress(psutil.NoSuchProcess):  # ended with one that was killed before
                process.kill()
        place.assert_nobody_left(5.0)
        assert view.assert_nothing_lost().version >= version
        place.start("resume", "runs/tiny", "--json")
        place.wait_for(view.folder.is_live, "its supervisor")
    assert kills >= 4 * 7
    place.wait_for(lambda: not view.folder.is_live(), "the end of the run")
    check_the_laws(view, 20)
    assert view.folder.final.is_dir()
    place.assert_nobody_left()


def test_a_second_trainer_takes_over_and_the_first_is_not_restarted(place: Workplace) -> None:
    run, view = start_run(place, 16)
    reach(place, view, 3)
    assert place.look("pause", "runs/tiny").code == 0  # or it ends before a process can start on a busy machine
    second = place.start("worker", "tiny.toml", "--role", "trainer", "--process", "second")
    place.wait_for(lambda: view.control().claims["trainer"].process == "second", "its claim")
    assert place.look("unpause", "runs/tiny").code == 0
    place.wait_for(lambda: "left alone while that one lives" in run.err, "a word of the supervisor")
    assert f"trainer-0: trainer: second, process {second.pid} on " in run.err
    assert "took over with epoch 2" in run.err
    version = view.curve().version
    reach(place, view, min(version + 3, 16))  # on a busy machine the run may be near its end by now
    assert place.worker("trainer-0") is None
    done = run.finish()
    assert done.code == 0, done.err
    assert done.result["steps"] == 16
    assert second.finish().code == 0
    check_the_laws(view, 16)
    assert view.control().claims["trainer"].epoch == 2, "nobody else has claimed it"
    assert {step.name.trainer_epoch for step in view.steps()} == {1, 2}
    place.assert_nobody_left()


def test_a_trainer_that_was_away_is_fenced_and_comes_back_when_its_successor_dies(place: Workplace) -> None:
    run, view = start_run(place, 24)
    reach(place, view, 3)
    first = place.worker("trainer-0")
    assert first is not None
    view.stop(first.pid)
    second = place.start("worker", "tiny.toml", "--role", "trainer", "--process", "second")
    place.wait_for(lambda: view.control().claims["trainer"].process == "second", "its claim")
    reach(place, view, view.curve().version + 2)
    first.send_signal(signal.SIGCONT)
    place.wait_for(lambda: "left alone while that one lives" in run.err, "the end of the first")
    second.send(signal.SIGKILL)
    second.finish()
    place.wait_for(lambda: "who had taken the role over is gone; started again" in run.err, "its return")
    done = run.finish()
    assert done.code == 0, done.err
    check_the_laws(view, 24)
    claim = view.control().claims["trainer"]
    assert (claim.process, claim.epoch) == ("trainer-0", 3)
    epochs = [step.name.trainer_epoch for step in view.steps()]
    assert epochs == sorted(epochs), "the first one wrote nothing after it was replaced"
    place.assert_nobody_left()
