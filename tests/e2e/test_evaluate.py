"""`rftstream evaluate` by the command: of a live run, of a finished one, of a model folder; with a real model."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from rftstream.contracts.versions import EvalResult
from tests.e2e.workplace import FAKE, RunView, Workplace, sets

pytestmark = pytest.mark.slow

HELD_OUT = """
[evaluations.sums]
source = "arithmetic"
options = { size = 12 }
every = 1000
n = 2
k = [1, 2]
"""
REAL = """
[run]
name = "real"
steps = 4
[model.make]
characters = "0123456789+="
context = 16
width = 32
[tasksets.sums]
source = "arithmetic"
[sampling]
max_tokens = 3
[feeder]
groups_per_batch = 4
group_size = 4
[trainer]
lr = 1e-2
checkpoint_every = 2
[weights]
anchor_every = 2
[transport]
partitions = 4
"""


def evaluated(run: RunView) -> list[tuple[int, str | None]]:
    return [(one.name.version, one.request_id) for one in results(run)]


def results(run: RunView) -> list[EvalResult]:
    return [one for one in run.messages("evals") if isinstance(one, EvalResult)]


def completions(path: Path) -> dict[str, Any]:
    return {one["sample"]: one["completion"] for one in map(json.loads, path.read_text().splitlines())}


@pytest.mark.timeout(600)
def test_versions_of_a_real_model_and_the_folder_that_the_run_left(place: Workplace) -> None:
    place.write("real.toml", REAL + HELD_OUT)
    assert place.call("run", "real.toml", timeout_s=300).code == 0
    run = place.view("runs/real")
    assert evaluated(run) == [(0, None), (4, None)], "what was due"
    asked = place.look("evaluate", "runs/real", "--versions", "0,1,3,4", "--json")
    assert asked.code == 0, asked.err
    found = asked.result["results"]
    assert [(one["version"], one["new"]) for one in found] == [(0, False), (1, True), (3, True), (4, False)]
    assert [version for version, _ in evaluated(run)] == [0, 4, 1, 3]

    scored = place.look("evaluate", "real.toml", "--model", "runs/real/final", "--out", "scores", "--json")
    assert scored.code == 0, scored.err
    (of_folder,), of_version = scored.result["results"], found[-1]
    timeless = [{key: value for key, value in one["metrics"].items() if key != "seconds"}
                for one in (of_folder, of_version)]  # fmt: skip
    assert timeless[0] == timeless[1]
    stored = run.folder.path / "weights" / of_version["generations"]
    said = completions(place.folder / of_folder["generations"])
    assert said == completions(stored)
    assert len(said) == 24
    assert place.view("runs/real").control().claims["trainer"].epoch == 1, "nobody trained"
    run.assert_nothing_lost()
    place.assert_nobody_left()


@pytest.mark.law("never-waits")
def test_a_live_run_answers_and_is_not_held_up(place: Workplace) -> None:
    place.write("tiny.toml", FAKE + HELD_OUT)
    live = place.start("run", "tiny.toml", *sets("run.steps=100000", "backends.fake.step_s=0.05", "weights.keep=1000"))
    run = place.view("runs/tiny")
    place.wait_for(lambda: run.curve().version >= 5, "some steps")
    before = run.control().claims
    asked = place.look("evaluate", "runs/tiny", "--versions", "1,3", "--json")
    assert asked.code == 0, asked.err + place.report()
    assert "asked the run's evaluator for sums of version 1, sums of version 3" in asked.err
    assert [one["version"] for one in asked.result["results"]] == [1, 3]
    assert [version for version, request in evaluated(run) if request] == [1, 3]
    refused = place.look("evaluate", "runs/tiny", "--versions", "1,99999999")
    assert refused.code == 2
    assert "--versions 99999999: no such version; with weights in the store: 0 to " in refused.err
    version = run.curve().version
    place.wait_for(lambda: run.curve().version > version, "another step")
    assert run.control().claims == before, "nobody took anything over"
    live.send(signal.SIGINT)
    live.finish()
    run.assert_nothing_lost()


def test_ctrl_c_in_the_middle_of_an_evaluation(place: Workplace, finished_run: Path) -> None:
    run, config = place.view(finished_run), finished_run / "config.toml"
    quick = config.read_text() + HELD_OUT
    config.write_text(quick + "[policies.fake]\ntokens_per_s = 0.01\n")
    began = place.start("evaluate", "runs/tiny", "--versions", "2,4")
    place.wait_for(lambda: "evaluator" in run.control().claims, "its claim")
    began.send(signal.SIGINT)
    stopped = began.finish()
    assert stopped.code == 1, stopped.err
    assert "stopped; what has its result keeps it, and the same command does the rest" in stopped.err
    assert evaluated(run) == []
    config.write_text(quick)
    again = place.look("evaluate", "runs/tiny", "--versions", "2,4", "--json")
    assert again.code == 0, again.err
    assert [one["version"] for one in again.result["results"]] == [2, 4]
    assert evaluated(run) == [(2, "sums-1-2"), (4, "sums-1-4")]
    run.assert_nothing_lost()
    place.assert_nobody_left()
