"""Engines and trainer in turns on one device, in processes of their own that are killed."""

from __future__ import annotations

import pytest

from rftstream.contracts.versions import EvalResult, StepRecord
from tests.e2e.test_lora import DIGITS, RUN
from tests.e2e.workplace import Workplace, sets

pytestmark = pytest.mark.slow

STEPS = 8
COLOCATED = RUN.replace("steps = 4", f"steps = {STEPS}").replace("[model.lora]\nrank = 2\n", "").replace(
    'policy = "hf"', 'policy = "hf"\ncount = 2'
).replace("lr = 0.01", "lr = 0.01\ncolocate = true") + """
[evaluations.held-out]
source = "arithmetic"
reward = "digits:share"
every = 4
num_tasks = 4
"""  # fmt: skip


def test_whoever_is_killed_nobody_waits_for_ever(place: Workplace) -> None:
    place.write("one.toml", COLOCATED)
    place.write("digits.py", DIGITS)
    run = place.start("run", "one.toml", "--json", *sets('run.name="one"'))
    view = place.view("runs/one")
    for version, killed in ((2, "trainer-0"), (4, "explorer-0"), (5, "trainer-0")):
        place.wait_for(lambda: view.curve().version >= version, f"version {version}")  # noqa: B023
        place.kill_worker(killed)
    done = run.finish()
    assert done.code == 0, done.err
    assert (done.result["steps"], done.result["reason"]) == (STEPS, "steps")
    view.assert_nothing_lost()
    steps = [one for one in view.messages("steps") if isinstance(one, StepRecord) and not one.resumed]
    assert max(one.metrics["device_wait_s"] for one in steps) > 0
    evaluated = {one.name.version for one in view.messages("evals") if isinstance(one, EvalResult)}
    assert evaluated == {0, 4, 8}
