"""SFT, then GRPO, then DPO in one run: it ends by itself, replays over the ends of its stages, goes on, audits."""

from __future__ import annotations

import math

import pytest

from tests.e2e.test_resume import PATIENCE_S, digests
from tests.e2e.workplace import EXAMPLES, Workplace, sets

pytestmark = [pytest.mark.slow, pytest.mark.law("replay")]


@pytest.mark.heavy("a model is trained by three algorithms, in two starts of all roles, and replayed")
@pytest.mark.timeout(6 * PATIENCE_S)
def test_the_example_made_shorter(place: Workplace) -> None:
    for name in ("stages.toml", "demonstrations.jsonl", "pairs.jsonl"):
        place.write(name, (EXAMPLES / name).read_text(encoding="utf-8"))
    shorter = sets(
        "stages.0.steps=6", "stages.1.steps=3", "stages.2.steps=2", "feeder.groups_per_batch=2", "feeder.group_size=4",
        "trainer.checkpoint_every=4", "experts.held_out=0.2", "model.make.layers=1", "model.make.width=32",
        "tasksets.sums.algorithm=rloo",
    )  # fmt: skip
    done = place.call("run", "stages.toml", *shorter, "--json", timeout_s=2 * PATIENCE_S)
    assert done.code == 0, done.err
    assert (done.result["reason"], done.result["version"]) == ("steps", 11)
    view = place.view("runs/stages")
    steps = {one.name.version: one.metrics for one in view.steps()}
    assert [steps[version]["stage"] for version in range(1, 12)] == [1.0] * 6 + [2.0] * 3 + [3.0] * 2
    assert steps[6]["loss"] < steps[1]["loss"]
    assert [version for version in steps if "reward" in steps[version]] == [7, 8, 9]
    assert steps[10]["loss"] == pytest.approx(math.log(2), abs=1e-5), "DPO begins with the policy itself as reference"
    assert steps[11]["loss"] < math.log(2)
    assert {version for version in steps if "held_out_loss" in steps[version]} == {6, 11}
    assert [steps[version]["lr"] for version in (9, 10, 11)] == pytest.approx([1e-3, 2e-4, 1e-4])
    report = view.audit()
    assert report.fine, report.to_text()
    assert (report.groups.admitted, report.groups.trained) == (6, 6)
    assert report.demonstrations is not None
    assert (report.demonstrations.trained, report.demonstrations.pending) == (8 * 12, 0)

    before = digests(view)
    more = place.call("resume", "runs/stages", *sets("stages.2.steps=3"), "--json", timeout_s=2 * PATIENCE_S)
    assert more.code == 0, more.err
    assert (more.result["reason"], more.result["version"]) == ("steps", 12)
    assert before.items() <= digests(view).items()
    assert place.look("status", "runs/stages", "--json").result["stage"] == "3 of 3, dpo, versions 9 to 12"

    again = place.look("replay", "runs/stages", "--json")
    assert again.code == 0, again.out
    assert again.result["equal"]
    assert again.result["num_batches"] == 12, "from the model: what was resumed had the reference from its checkpoint"

    staged = place.look("rescore", "runs/stages", "--into", "runs/anew")
    assert "--set run.steps=3 --set trainer.algorithm=NAME --set experts=unset" in staged.err, staged.err
    anew = (
        "--pipeline",
        "stages.toml",
        "--into",
        "runs/anew",
        *sets("stages=[]", "run.steps=2"),
        "--algorithm",
        "topr",
    )
    refused = place.look("replay", "runs/stages", *anew)
    assert refused.code == 2 and "or take them out (--set experts=unset)" in refused.err
    trained = place.call("replay", "runs/stages", *anew, *sets("experts=unset"), "--json", timeout_s=2 * PATIENCE_S)
    assert (trained.code, trained.result["version"]) == (0, 2), trained.err
    place.assert_nobody_left()
