"""Somebody writes into a live run, also on the topics that one role alone writes: it ends as if nothing had been
there."""

from __future__ import annotations

import signal
from random import Random

import pytest

from rftstream.contracts.records import NewRecord
from rftstream.testing.foreign import ForeignWriter
from tests.e2e.workplace import FAKE, RunView, Workplace, sets

pytestmark = pytest.mark.law("fencing", "replay")

NUM_STRAYS = 30
SLOW = sets("backends.fake.step_s=0.05")

TOPICS = ("tasks", "rollouts", "verified", "batches", "weights", "steps", "outcomes", "evals", "control")
CONSUMERS = {"tasks": "explorer", "rollouts": "verifier", "verified": "buffer", "batches": "trainer"}
UNKNOWN, BROKEN = b"not for you", b"\xff\xff broken"


def strays_into_a_live_run(
    place: Workplace, run_file: str, run_dir: str, *more: str, num_strays: int = NUM_STRAYS
) -> RunView:
    """Writes all kinds of them while the run is at work, and once more when it was stopped; then it goes on to its
    end."""
    process = place.start("run", run_file, "--json", *SLOW, *sets("run.steps=100000"), *more)
    view = place.view(run_dir)

    def wait_for_steps(count: int) -> None:
        version = view.curve().version + count
        place.wait_for(lambda: view.curve().version >= version or not process.alive, f"version {version}")
        assert process.alive, process.err

    wait_for_steps(2)
    write_unknown(view)
    writer = ForeignWriter(view.transport, view.folder.run_id, Random(5))
    written = set()
    for number in range(num_strays):
        written.add(writer.write().partition(" ")[0])
        if number % 10 == 9:
            wait_for_steps(1)
    assert len(written) > 7
    place.kill_worker("trainer-0")
    place.kill_worker("buffer-0")
    wait_for_steps(2)
    process.send(signal.SIGINT)
    done = process.finish()
    assert done.code == 0, done.err
    version = view.assert_nothing_lost(is_alone=False).version
    assert "foreign" in {one.reason for one in view.dead()}

    for _ in range(num_strays // 2):
        writer.write()
    again = place.call("resume", run_dir, "--json", *sets(f"run.steps={version + 3}"))
    assert again.code == 0, again.err
    assert (again.result["steps"], again.result["reason"]) == (version + 3, "steps")
    report = view.assert_nothing_lost(is_alone=False)
    assert report.version == version + 3
    check_unknown(view)
    return view


def write_unknown(view: RunView) -> None:
    """Put on each topic what is of no contract, and on one of them what only says that it is of one."""
    unknown = (("contract", b"somebody_elses"), ("contract_version", b"1"), ("id", b"x"))
    for headers in (unknown, ()):
        view.put(*(NewRecord(topic, 0, b"a key", UNKNOWN, headers) for topic in TOPICS))
    view.put(NewRecord("rollouts", 1, b"a key", BROKEN, (("contract", b"rollout"), ("contract_version", b"1"))))


def check_unknown(view: RunView) -> None:
    """Who consumes a topic keeps each of them once, whoever died; who only follows one keeps nothing."""
    letters = [one for one in view.dead() if one.value in (UNKNOWN, BROKEN)]
    kept = [(one.topic, one.role, one.reason, one.offset) for one in letters if one.value == UNKNOWN]
    assert {one[:3] for one in kept} == {(topic, role, "undecodable") for topic, role in CONSUMERS.items()}
    for topic in CONSUMERS:
        assert len({one[3] for one in kept if one[0] == topic}) == 2, topic
    assert {(one.topic, one.role) for one in letters if one.value == BROKEN} == {("rollouts", "verifier")}


@pytest.mark.sampled(1, "strays")
def test_strays_on_an_embedded_log(place: Workplace) -> None:
    place.write("tiny.toml", FAKE)
    view = strays_into_a_live_run(place, "tiny.toml", "runs/tiny")
    for command in (("status",), ("audit",), ("inspect", "rollouts")):
        looked = place.look(command[0], "runs/tiny", *command[1:])
        assert looked.code == 0, looked.err
    same = place.look("replay", "runs/tiny")
    assert same.code == 0, same.out + same.err
    assert view.control().finished is not None
