"""`rftstream evaluate FILE --model PATH`: a run file's evaluations on a model folder, without a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from rftstream.config.sections import MakeModel, ModelSection
from rftstream.contracts.versions import EvalResult, VersionName
from rftstream.launch.sessions.model_evaluation import Scored, _Kept
from rftstream.models.folders.folder import prepare_model
from rftstream.roles.evaluator.step import EvaluatorStep
from rftstream.weights.stores.store import ObjectStore
from tests import commands

RUN_FILE = """
[run]
name = "demo"
steps = 4
[model.make]
characters = "0123456789+="
context = 16
width = 32
[explorer]
policy = "fake"
[trainer]
backend = "fake"
keep_best = "easy"
[tasksets.sums]
source = "arithmetic"
[evaluations.easy]
source = "arithmetic"
options = { size = 4 }
[evaluations.more]
source = "arithmetic"
options = { size = 6 }
n = 2
k = [1, 2]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "demo.toml"
    path.write_text(RUN_FILE)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make(tmp_path / "models" / "a", seed=0)


def make(folder: Path, seed: int) -> Path:
    prepare_model(ModelSection(make=MakeModel(characters="0123456789+=", width=32, context=16)), folder, seed)
    return folder


def call(*arguments: object) -> Result:
    return commands.call("evaluate", *arguments)


def results(*arguments: object) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = commands.called("evaluate", *arguments)["results"]
    return found


@pytest.mark.slow
def test_all_evaluations_of_the_file(file: Path, model: Path) -> None:
    before = sorted(file.parent.iterdir())
    found = results(file, "--model", model)
    assert [(one["evaluation"], one["num_tasks"], one["num_samples"], one["new"]) for one in found] == [
        ("easy", 4, 1, True), ("more", 6, 2, True),
    ]  # fmt: skip
    assert set(found[1]["metrics"]) >= {"mean", "std", "pass@1", "pass@2"}
    assert {one["generations"] for one in found} == {None}
    assert sorted(file.parent.iterdir()) == before, "no run, nothing left behind"


@pytest.mark.slow
def test_models_beside_each_other(file: Path, model: Path, tmp_path: Path) -> None:
    other = make(tmp_path / "models" / "b", seed=1)
    text = call(file, "--model", model, "--model", other, "--evaluation", "more", "--set", "evaluations.more.n=3")
    assert text.exit_code == 0, text.output
    head, *rows = [line.split() for line in text.stdout.splitlines()]
    assert head[:3] == ["evaluation", "model", "mean"]
    assert [row[:2] for row in rows] == [["more", str(model)], ["more", str(other)]]
    assert all(row[-3:] == ["6", "x", "3"] for row in rows)


@pytest.mark.slow
def test_results_that_are_kept_are_not_computed_again(file: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "scores"
    (first,) = results(file, "--model", model, "--out", out, "--evaluation", "more")
    lines = [json.loads(line) for line in Path(first["generations"]).read_text().splitlines()]
    assert len(lines) == 12
    assert sum(line["reward"] for line in lines) / 12 == pytest.approx(first["metrics"]["mean"])
    both = results(file, "--model", model, "--out", out)
    assert {one["evaluation"]: one["new"] for one in both} == {"easy": True, "more": False}
    assert next(one for one in both if one["evaluation"] == "more") == {**first, "new": False}
    changed = results(file, "--model", model, "--out", out, "--set", "run.seed=7", "--evaluation", "easy")
    assert [one["new"] for one in changed] == [True], "other settings are another result"
    again = results(file, "--model", model, "--out", out, "--again", "--evaluation", "easy")
    assert [one["new"] for one in again] == [True]
    stored = json.loads((out / "results.json").read_text())["results"]
    assert sorted(one["evaluation"] for one in stored) == ["easy", "easy", "more"]


def test_two_evaluations_into_one_folder_keep_both_rows(tmp_path: Path) -> None:
    store = ObjectStore(f"file://{tmp_path}/store", base=tmp_path)
    store.put("a.jsonl", b"{}\n")
    kept = [_Kept(tmp_path / "out"), _Kept(tmp_path / "out")]
    for number, one in enumerate(kept):
        result = EvalResult(
            evaluation="easy", name=VersionName(trainer_epoch=1, version=0), num_tasks=1, num_samples=1, num_unscored=0,
            metrics={"mean": 0.5}, generations="a.jsonl",
        )  # fmt: skip
        one.keep(Scored(model="a", result=result, settings=f"sha256:{number}", new=True), store)
    assert kept[0].find("sha256:1") is not None and kept[1].find("sha256:0") is not None


@pytest.mark.slow
def test_stopped_it_goes_on(file: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    took = EvaluatorStep._begin
    begun: list[str] = []

    def interrupted(step: EvaluatorStep, due: Any) -> Any:
        begun.append(due.evaluation.name)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return took(step, due)

    with monkeypatch.context() as patch:
        patch.setattr(EvaluatorStep, "_begin", interrupted)
        patch.setattr("rftstream.service.loops.single.TRANSACTIONS_A_TICK", 1)
        stopped = call(file, "--model", model, "--out", tmp_path / "scores")
    assert stopped.exit_code == 1
    assert "stopped; the same command goes on" in stopped.stderr
    assert begun == ["easy", "more"]
    found = results(file, "--model", model, "--out", tmp_path / "scores")
    assert {one["evaluation"]: one["new"] for one in found} == {"easy": False, "more": True}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--model", "nowhere/at/all"), "model.path: nowhere/at/all: no such folder"),
        (("--model", "{folder}"), "has no config.json, expected a Hugging Face model folder"),
        (("--model", "fake"), "--model: 'fake' is no model"),
        (("--model", "{model}", "--evaluation", "esy"), "--evaluation: unknown 'esy'; known: easy, more"),
        (("--model", "{model}", "--versions", "1"), "it goes with neither --versions nor --here"),
        (("--model", "{model}", "--here"), "it goes with neither --versions nor --here"),
        (("--out", "{folder}"), "--out: goes with --model"),
        (("--set", "run.seed=1"), "--set: goes with --model"),
        (("--model", "{model}", "--out", "{model}/config.json"), "'{model}/config.json' is a file"),
        (("--model", "{model}", "--set", "evaluator.policy=openai"), "--model: the policy 'openai' samples from what"),
    ],
)
def test_bad_input(file: Path, model: Path, arguments: tuple[str, ...], text: str) -> None:
    names = {"model": model, "folder": file.parent}
    result = call(file, *(argument.format(**names) for argument in arguments))
    assert result.exit_code == 2, result.output
    assert text.format(**names) in " ".join(result.stderr.split())


def test_a_file_without_evaluations(file: Path, model: Path) -> None:
    file.write_text(RUN_FILE.partition("[evaluations.easy]")[0].replace('keep_best = "easy"\n', ""))
    result = call(file, "--model", model)
    assert result.exit_code == 2
    assert "demo: its run file has no evaluations; add [evaluations.NAME]" in result.stderr
