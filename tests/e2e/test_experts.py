"""Demonstrations without anything to explore: a run is drained, goes on, ends by itself, and is replayed."""

from __future__ import annotations

import pytest

from tests.e2e.test_resume import PATIENCE_S, digests
from tests.e2e.workplace import Workplace, sets

pytestmark = [pytest.mark.slow, pytest.mark.law("replay")]

SFT = """
[run]
name = "sft"
[model]
path = "fake"
[experts]
source = "sums.jsonl"
per_batch = 1
passes = 10000
held_out = 0.2
held_out_every = 4
[trainer]
algorithm = "sft"
backend = "fake"
checkpoint_every = 3
[transport]
partitions = 2
[backends.fake]
step_s = 0.05
"""


@pytest.mark.timeout(3 * PATIENCE_S)
def test_drained_it_goes_on_where_it_was(place: Workplace) -> None:
    """Nothing is taken twice."""
    place.write("sft.toml", SFT)
    place.write_lines("sums.jsonl", [{"prompt": f"{a}+{b}=", "completion": str(a + b)}
                                     for a in range(4) for b in range(5)])  # fmt: skip
    running = place.start("run", "sft.toml", "--json")
    view = place.view("runs/sft")
    place.wait_for(lambda: view.curve().version > 2, "the first steps", PATIENCE_S)
    assert place.look("drain", "runs/sft").code == 0
    drained = running.finish(PATIENCE_S)
    assert drained.code == 0, drained.err
    assert drained.result["reason"] == "drained"
    passes = drained.result["version"] // 16 + 2
    for more in (passes, passes + 1):  # after it was drained, and after it had trained all of them
        done = place.call("resume", "runs/sft", "--json", *sets(f"experts.passes={more}"), timeout_s=PATIENCE_S)
        assert done.code == 0, done.err
        assert (done.result["reason"], done.result["version"]) == ("experts", 16 * more)  # 16 of 20 in each pass
        report = view.audit()
        assert report.fine, report.to_text()
        assert report.demonstrations is not None
        assert (report.demonstrations.trained, report.demonstrations.pending) == (16 * more, 0)
    same = place.look("replay", "runs/sft", "--into", "runs/same", "--json", *sets("backends.fake.step_s=0"))
    assert same.code == 0, same.err
    assert digests(place.view("runs/same")) == digests(view)
    assert place.view("runs/same").audit().fine


@pytest.mark.timeout(3 * PATIENCE_S)
def test_steps_alone_say_how_long_it_is(place: Workplace) -> None:
    """Without `passes` a run takes its demonstrations as often as `run.steps` needs, also when it is given more."""
    place.write("sft.toml", SFT.replace("passes = 10000\n", "").replace("per_batch = 1\n", "per_batch = 3\n"))
    place.write_lines("sums.jsonl", [{"prompt": f"{a}+1=", "completion": str(a + 1)} for a in range(5)])
    done = place.call("run", "sft.toml", "--json", *sets("run.steps=4"), timeout_s=PATIENCE_S)
    assert (done.code, done.result["reason"], done.result["version"]) == (0, "steps", 4), done.err
    more = place.call("resume", "runs/sft", "--json", *sets("run.steps=7"), timeout_s=PATIENCE_S)
    assert (more.code, more.result["reason"], more.result["version"]) == (0, "steps", 7), more.err
    report = place.view("runs/sft").audit()
    assert report.fine, report.to_text()
    assert report.demonstrations is not None
    assert report.demonstrations.trained == 3 * 7  # four in a pass
