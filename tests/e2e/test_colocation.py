"""Engines and trainer in turns on one device, in processes of their own that are killed."""

from __future__ import annotations

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
step_s = 0.3
[policies.fake]
tokens_per_s = 20.0
mean_tokens = 6.0
"""  # fmt: skip
"""Rollouts and updates that take their time, so that whoever is killed has the device, or is on its way."""

REAL = RUN.replace("[model.lora]\nrank = 2\n", "").replace("lr = 0.01", "lr = 0.01\ncolocate = true") + EVALUATED

KILLED = (
    (2, "trainer-0"), (4, "explorer-0"), (6, "trainer-0"), (8, "evaluator-0"), (9, "explorer-1"), (10, "trainer-0")
)  # fmt: skip
"""At which version who is killed."""


def check(view: RunView, steps: int) -> None:
    report = view.assert_nothing_lost()
    assert report.version == steps
    records = [one for one in view.messages("steps") if isinstance(one, StepRecord) and not one.resumed]
    assert max(one.metrics["device_wait_s"] for one in records) > 0
    evaluated = {one.name.version for one in view.messages("evals") if isinstance(one, EvalResult)}
    assert evaluated == set(range(0, steps + 1, 4))


@pytest.mark.law("lost", "never-waits")
def test_whoever_is_killed_nobody_waits_for_ever(place: Workplace) -> None:
    place.write("tiny.toml", PLAYED)
    run = place.start("run", "tiny.toml", "--json", *sets("run.steps=16"))
    view = place.view("runs/tiny")
    for version, killed in KILLED:
        place.wait_for(lambda: view.curve().version >= version, f"version {version}")  # noqa: B023
        place.kill_worker(killed)
    done = run.finish()
    assert done.code == 0, done.err
    check(view, 16)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["torch", "deepspeed"])
def test_a_real_model_is_sampled_and_trained_in_turns(place: Workplace, backend: str) -> None:
    place.write("lora.toml", REAL)
    place.write("digits.py", DIGITS)
    done = place.call("run", "lora.toml", "--json", *sets(f"trainer.backend='{backend}'"))
    assert done.code == 0, done.err
    check(place.view("runs/lora"), 4)
