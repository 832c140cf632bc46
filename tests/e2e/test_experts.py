"""Demonstrations, then preferences, without anything to explore: runs that end by themselves, replay, go on, audit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.test_resume import PATIENCE_S, digests
from tests.e2e.workplace import RunView, Workplace, sets

pytestmark = [pytest.mark.slow, pytest.mark.law("replay")]

SFT = """
[run]
name = "sft"
[model]
dtype = "float32"
[model.make]
characters = "0123456789+-*/= "
layers = 1
width = 16
heads = 2
[experts]
source = "sums.jsonl"
per_batch = 8
passes = 2
held_out = 0.2
held_out_every = 4
[trainer]
algorithm = "sft"
lr = 0.02
lr_schedule = "linear"
checkpoint_every = 3
[transport]
partitions = 2
"""

DPO = """
[run]
name = "dpo"
[model]
init_from = "runs/sft"
dtype = "float32"
[experts]
source = "pairs.jsonl"
per_batch = 4
passes = 12
held_out = 0.25
[trainer]
algorithm = "dpo"
lr = 0.01
[algorithms.dpo]
beta = 0.5
[transport]
partitions = 2
"""


def run_sft(folder: Path) -> None:
    """Run SFT to its end with real processes."""
    place = Workplace(folder)
    try:
        place.write("sft.toml", SFT)
        place.write_lines("sums.jsonl", [{"prompt": f"{a}+{b}=", "completion": str(a + b)}
                                         for a in range(4) for b in range(5)])  # fmt: skip
        done = place.call("run", "sft.toml", "--json", timeout_s=PATIENCE_S)
        assert done.code == 0, f"{done.err}\n{place.report()}"
        assert (done.result["reason"], done.result["version"]) == ("experts", 4)  # 16 of 20, twice, in eights
    finally:
        place.end()


@pytest.fixture
def sft_run(place: Workplace, made: Callable[[str, Callable[[Path], None]], Path]) -> RunView:
    """A copy of a run of SFT that is made once."""
    folder = made("sft-run", run_sft)
    shutil.copy(folder / "sums.jsonl", place.folder)
    shutil.copytree(folder / "runs" / "sft", place.folder / "runs" / "sft")
    return place.view("runs/sft")


@pytest.mark.timeout(6 * PATIENCE_S)
def test_demonstrations_are_learned_and_replayed(place: Workplace, sft_run: RunView) -> None:
    view = sft_run
    steps = {one.name.version: one.metrics for one in view.steps()}
    assert steps[4]["loss"] < steps[1]["loss"]
    assert {version for version, metrics in steps.items() if "held_out_loss" in metrics} == {4}
    assert [steps[version]["lr"] for version in (1, 2, 3, 4)] == pytest.approx([0.02, 0.015, 0.01, 0.005])
    report = view.audit()
    assert report.fine, report.to_text()
    assert report.demonstrations is not None
    assert (report.demonstrations.trained, report.demonstrations.pending) == (32, 0)

    again = place.look("replay", "runs/sft", "--json")
    assert again.code == 0, again.out
    assert again.result["equal"]
    same = place.look("replay", "runs/sft", "--into", "runs/same", "--json")
    assert same.code == 0, same.err
    assert digests(place.view("runs/same")) == digests(view)
    assert place.view("runs/same").audit().fine


@pytest.mark.timeout(3 * PATIENCE_S)
def test_dpo_goes_on_from_what_was_learned(place: Workplace, sft_run: RunView) -> None:
    place.write("dpo.toml", DPO)
    place.write_lines("pairs.jsonl", [{"prompt": f"{a}+1=", "chosen": str(a + 1), "rejected": "0"} for a in range(8)])
    preferred = place.call("run", "dpo.toml", "--json", timeout_s=PATIENCE_S)
    assert preferred.code == 0, preferred.err
    assert (preferred.result["reason"], preferred.result["version"]) == ("experts", 18)  # 6 of 8, 12 times, in fours
    steps = [one.metrics for one in place.view("runs/dpo").steps()]
    last = steps[-1]
    assert last["loss"] < 0.5 * steps[0]["loss"]
    assert {"accuracy", "margin", "held_out_loss", "held_out_accuracy"} <= last.keys()
    assert place.view("runs/dpo").audit().fine
    place.assert_nobody_left()


@pytest.mark.timeout(3 * PATIENCE_S)
def test_drained_it_goes_on_where_it_was(place: Workplace) -> None:
    """Without a model; nothing is taken twice."""
    model = SFT[SFT.index("[model]") : SFT.index("[experts]")]
    text = SFT.replace(model, '[model]\npath = "fake"\n').replace("[trainer]", '[trainer]\nbackend = "fake"')
    text = text.replace("per_batch = 8", "per_batch = 1").replace("passes = 2", "passes = 10000")
    place.write("sft.toml", text + "[backends.fake]\nstep_s = 0.05\n")
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
