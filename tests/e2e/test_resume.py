"""Killed as a whole and resumed, on CPU and strictly in turns, a run ends with the weights of one left alone."""

from __future__ import annotations

import contextlib
from pathlib import Path
from random import SystemRandom

import psutil
import pytest

from rftstream.contracts.versions import StepRecord
from rftstream.faults import VARIABLE
from tests.e2e.workplace import RunView, Workplace, sets

pytestmark = [pytest.mark.slow, pytest.mark.law("lost", "order", "replay")]

IN_TURNS = """
[run]
name = "turns"
steps = 7
[model]
dtype = "float32"
[model.make]
characters = "0123456789+-*/= "
layers = 1
width = 16
heads = 2
[tasksets.sums]
source = "arithmetic"
[sampling]
max_tokens = 4
[feeder]
groups_per_batch = 2
group_size = 4
max_staleness = 0
on_stale = "wait"
[explorer]
policy = "fake"
[policies.fake]
answer_depends_on = "task"
[trainer]
lr = 0.01
lr_schedule = "cosine"
updates_per_batch = 2
checkpoint_every = 3
[transport]
partitions = 2
"""

WITHOUT_A_MODEL = IN_TURNS.replace("[trainer]", '[trainer]\nbackend = "fake"').replace(
    IN_TURNS[IN_TURNS.index("[model]") : IN_TURNS.index("[tasksets")], '[model]\npath = "fake"\n'
)

PATIENCE_S = 300.0
"""Each start of a trainer imports torch, while everything else on the machine goes on."""


def digests(view: RunView) -> dict[int, set[str]]:
    """Of the weights, by version, by every trainer that made it."""
    found: dict[int, set[str]] = {}
    for step in view.messages("steps"):
        if isinstance(step, StepRecord) and step.weights_digest is not None:
            found.setdefault(step.name.version, set()).add(step.weights_digest)
    return found


def wait_for_fault(place: Workplace, view: RunView, fault: str) -> None:
    place.wait_for((view.folder.logs / "faults" / fault.replace(":", ".")).exists, fault, PATIENCE_S)


def kill_all(place: Workplace) -> None:
    """The machine loses power, as far as processes can tell."""
    while left := place.processes():
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()


@pytest.mark.timeout(4 * PATIENCE_S)
def test_killed_and_resumed_at_random_points_it_ends_with_the_same_digest(place: Workplace) -> None:
    """The trainer stands still at a point that is drawn anew each time, and then all die. Without a model the
    simulation does the same for many seeds."""
    place.write("turns.toml", IN_TURNS)
    random = SystemRandom()
    where = random.sample(("before_commit", "in_commit", "after_commit", "object_written"), 2)
    points = [f"{where[0]}:{random.randint(2, 6)}", f"{where[1]}:{random.randint(2, 3)}"]
    print(f"killed at {points}")
    calm = place.call("run", "turns.toml", "--json", "--run-dir", "runs/calm", timeout_s=PATIENCE_S)
    assert calm.code == 0, calm.err
    for point in points:
        run = place.start(
            "run", "turns.toml", "--json", *sets("run.resume=auto"), env={VARIABLE: f"trainer:{point}:stop"}
        )
        view = place.view("runs/turns")
        wait_for_fault(place, view, f"trainer:{point}")
        kill_all(place)
        run.finish()
    resumed = place.call("resume", "runs/turns", "--json", timeout_s=PATIENCE_S)
    assert resumed.code == 0, resumed.err
    assert (resumed.result["version"], resumed.result["reason"]) == (7, "steps")
    assert max(step.name.trainer_epoch for step in view.steps()) == 3
    assert digests(view) == digests(place.view("runs/calm"))
    view.assert_nothing_lost()
    final = [place.folder / "runs" / name / "final" / "model.safetensors" for name in ("calm", "turns")]
    assert final[0].read_bytes() == final[1].read_bytes()

    again = place.look("replay", "runs/turns", "--json")
    assert again.code == 0, again.out
    assert again.result["equal"]
    assert again.result["num_batches"] == 7

    complete = place.look("run", "turns.toml", "--json", *sets("run.resume=auto"))
    assert complete.code == 0, complete.err
    assert (complete.result["steps"], complete.result["reason"]) == (7, "steps")
    assert Path(complete.result["run_dir"]).name == "turns"
    back = place.look("run", "turns.toml", "--json", *sets("run.resume=2"))
    assert back.code == 2
    assert "run.resume: version 2 has no good checkpoint, expected one of 0, " in back.err
