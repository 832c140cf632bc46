"""Engines and trainer in turns on one device, in processes of their own that are killed."""

from __future__ import annotations

from random import Random

import pytest

from rftstream.contracts.versions import EvalResult, StepRecord
from tests.e2e.test_lora import DIGITS, RUN
from tests.e2e.workplace import FAKE, RunView, Workplace, sets

pytestmark = pytest.mark.slow

EVALUATED = """
[evaluations.held-out]
source = "arithmetic"
every = 4
num_tasks = 4
"""
PLAYED = FAKE.replace('policy = "fake"', 'policy = "fake"\ncount = 2').replace(
    'backend = "fake"', 'backend = "fake"\ncolocate = true'
) + EVALUATED + """
[backends.fake]
step_s = 0.1
[policies.fake]
tokens_per_s = 60.0
mean_tokens = 6.0
"""  # fmt: skip
"""Rollouts and updates that take their time, so that whoever is killed has the device, or is on its way."""

REAL = RUN.replace("[model.lora]\nrank = 2\n", "").replace("lr = 0.01", "lr = 0.01\ncolocate = true") + EVALUATED


def check(view: RunView, steps: int) -> None:
    report = view.assert_nothing_lost()
    assert report.version == steps
    records = [one for one in view.messages("steps") if isinstance(one, StepRecord) and not one.resumed]
    assert max(one.metrics["device_wait_s"] for one in records) > 0
    evaluated = {one.name.version for one in view.messages("evals") if isinstance(one, EvalResult)}
    assert evaluated == {*range(0, steps + 1, 4), steps}


@pytest.mark.sampled(5, "kills")
@pytest.mark.law("lost", "never-waits")
def test_whoever_is_killed_nobody_waits_for_ever(place: Workplace) -> None:
    """Each of them once, in an order that is another one each time."""
    order = ["trainer-0", "explorer-0", "evaluator-0"]
    Random().shuffle(order)
    print(order)
    place.write("tiny.toml", PLAYED)
    run = place.start("run", "tiny.toml", "--json", *sets("run.steps=100000"))
    view = place.view("runs/tiny")

    def wait_for_steps(count: int) -> None:
        version = view.curve().version + count
        place.wait_for(lambda: view.curve().version >= version or not run.alive, f"version {version}")
        assert run.alive, run.err

    wait_for_steps(1)
    for killed in order:
        place.kill_worker(killed)
        wait_for_steps(2)
    assert place.look("drain", "runs/tiny").code == 0
    done = run.finish()
    assert done.code == 0, done.err
    assert done.result["reason"] == "drained"
    check(view, done.result["version"])


@pytest.mark.long
@pytest.mark.parametrize("backend", ["torch", "deepspeed"])
def test_a_real_model_is_sampled_and_trained_in_turns(place: Workplace, backend: str) -> None:
    place.write("lora.toml", REAL)
    place.write("digits.py", DIGITS)
    done = place.call("run", "lora.toml", "--json", *sets(f"trainer.backend='{backend}'"))
    assert done.code == 0, done.err
    check(place.view("runs/lora"), 4)
