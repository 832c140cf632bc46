"""Own samplers and training loops as processes, which are killed in the middle: nothing is lost, nothing twice."""

from __future__ import annotations

import signal
import sys
from random import SystemRandom

import pytest

import rftstream
from rftstream.contracts.topics import TOPICS
from rftstream.errors import ConfigError
from tests.e2e.test_kills import SLOW, drain, reach
from tests.e2e.workplace import Process, Workplace, sets

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.law("lost", "twice", "conservation", "replay")]

SAMPLER = """
import rftstream, sys, time

with rftstream.join(sys.argv[1], role="explorer") as me:
    for task in me.tasks():
        if me.new_version:
            me.weights_folder()
        tokens = [*str(eval(bytes(task.prompt_ids).decode().strip("= "))).encode(), 0]
        me.save(task, tokens=tokens[:1], logprobs=[-0.1], version=me.version)
        time.sleep(0.02)
        me.finish(task, tokens=tokens, logprobs=[-0.1] * len(tokens), version=me.version)
"""
TRAINER = """
import rftstream, sys

with rftstream.join(sys.argv[1], role="trainer") as me:
    weights, done = me.state(), me.kept["done"] if me.kept else 0
    assert done <= (me.kept["version"] if me.kept else 0)
    for batch in me.batches():
        weights = {name: one + 0.01 for name, one in weights.items()}
        done += 1
        me.step(batch, weights=weights, metrics={"done": done})
        me.checkpoint({"model": weights, "done": done, "version": batch.version + 1})
"""
RAISES = """
import rftstream, sys

me = rftstream.join(sys.argv[1], role="trainer")
me.state()
next(me.batches())
raise KeyError("with a batch in hand, and outside of a `with` block")
"""
NUM_KILLS = 8


@pytest.mark.sampled(5, "kills")
@pytest.mark.heavy("eight kills, each of a process that loads what a sampler or trainer needs")
def test_joined_loops_are_killed_in_the_middle(place: Workplace) -> None:
    place.write("tiny.toml", SLOW)
    kill_in_the_middle(place, "runs/tiny", NUM_KILLS)


@pytest.mark.long
def test_joined_loops_are_killed_at_twenty_moments_beside_our_own_explorer(place: Workplace) -> None:
    place.write("tiny.toml", SLOW)
    kill_in_the_middle(place, "runs/tiny", 20, "explorer-0")


def kill_in_the_middle(place: Workplace, run_dir: str, num_kills: int, *own: str) -> None:
    """Kill a joined trainer, a joined sampler and workers of the run in turn, each time when the log has grown by a
    random number of records, and hold the laws at the end."""
    for name, text in (("sampler", SAMPLER), ("trainer", TRAINER), ("raises", RAISES)):
        place.write(f"{name}.py", text)
    joined = sets("trainer.backend=joined", "trainer.checkpoint_every=3")
    run = place.start("run", "tiny.toml", "--json", *joined)
    view = place.view(run_dir)
    place.wait_for(lambda: view.control().manifest, "the manifest")

    def start(name: str) -> Process:
        return place.start(place.folder / f"{name}.py", run_dir, command=[sys.executable])

    def length() -> int:
        return sum(sum(view.transport.admin.end_offsets(topic).values()) for topic in TOPICS)

    loops = {name: start(name) for name in ("trainer", "sampler")}
    victims = [*loops, *own]
    for number in range(num_kills):
        reach(place, view, view.curve().version + 1)
        moment = length() + SystemRandom().randrange(200)
        place.wait_for(lambda: length() >= moment, "a moment to kill")  # noqa: B023
        name = victims[number % len(victims)]
        if name in own:
            place.kill_worker(name)
            continue
        loops[name].send(signal.SIGKILL)
        loops[name].finish()
        loops[name] = start(name)
    loops["trainer"].send(signal.SIGKILL)
    loops["trainer"].finish()
    assert start("raises").finish().code == 1
    loops["trainer"] = start("trainer")
    reach(place, view, view.curve().version + 2)
    assert "a loop of its user's own (rftstream.join)" in place.look("status", run_dir).out
    version = drain(place, run, run_dir)
    assert all(loop.finish().code == 0 for loop in loops.values()), place.report()
    view.assert_nothing_lost()
    steps = {step.name.version: step for step in view.steps() if not step.resumed}
    assert sorted(steps) == list(range(1, version + 1))
    if not steps[version].metrics["trained_rollouts"]:  # the last batch of a drained run may have none
        del steps[version]
    assert all(step.metrics["done"] == number for number, step in steps.items())  # each of them once, in order
    replayed = place.look("replay", run_dir)
    assert (replayed.code, "made by a joined loop" in replayed.err) == (2, True)
    with pytest.raises(ConfigError, match=r"the run has ended \(drained\) with version \d+"):
        rftstream.join(place.folder / run_dir, role="explorer")


@pytest.mark.parametrize(
    ("run", "role", "text"),
    [
        ("nowhere", "explorer", "no such file, expected a run folder or a run file"),
        (".", "explorer", "no config.toml in it, so it is not a run folder"),
        ("runs/tiny", "gardener", "role: got 'gardener', expected one of explorer, trainer, verifier"),
        ("runs/tiny", "trainer", "is trained by 'fake', expected 'joined' for a loop of your own"),
    ],
)
def test_where_nobody_can_join(place: Workplace, run: str, role: str, text: str) -> None:
    place.write("tiny.toml", SLOW)
    assert place.call("run", "tiny.toml", "--no-workers").code == 0
    with pytest.raises(ConfigError, match=text) as error:
        rftstream.join(place.folder / run, role=role)  # type: ignore[call-overload]
    assert "\n" not in str(error.value)
