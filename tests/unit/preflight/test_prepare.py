"""`data prepare`: what it writes is a taskset with the same problems, and it writes all of it or nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rftstream.config import loader
from rftstream.config.sections import RunConfig
from rftstream.contracts.tasks import Problem
from rftstream.data.operators.base import KEEP, Change, Draw
from rftstream.data.operators.facts import Facts
from rftstream.data.tasksets.open import open_taskset
from rftstream.errors import ConfigError
from rftstream.preflight import prepare as prepare_module
from rftstream.preflight.new_folder import REPORT
from rftstream.preflight.prepare import prepare
from tests.configs import small_run

OWN = "tests.unit.preflight.test_prepare:"
ROWS: list[dict[str, Any]] = [
    {"prompt": "one", "answer": "1", "level": 3, "extra": {"a": [1, None, "x"]}},
    {"prompt": "a prompt that is longer than the others", "answer": "2"},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "three é"}], "answer": "3",
     "tools": [{"type": "function", "function": {"name": "add"}}], "data_source": "elsewhere"},
    {"prompt": "four", "answer": "skip me"},
]  # fmt: skip
OPERATORS = [
    {"op": "length", "max_characters": 20},
    {"op": "regex", "skip": "skip", "field": "answer"},
    {"op": "regex", "skip": "never"},
]


class Raises:
    """Raises at the third problem."""

    def decide(self, draw: Draw, facts: Facts, seed: int) -> Any:
        if draw.index == 2:
            raise ValueError("no such thing")
        return KEEP


class Bigger:
    """Gives each problem a group of 9."""

    def decide(self, draw: Draw, facts: Facts, seed: int) -> Any:
        return Change(group_size=9)


def config_of(folder: Path, rows: list[dict[str, Any]], *operators: dict[str, Any], **taskset: Any) -> RunConfig:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return small_run(
        base=str(folder), tasksets={"rows": {"source": "jsonl:rows.jsonl", **taskset}}, pipeline=list(operators),
    )  # fmt: skip


def problems(config: RunConfig, source: str | None = None) -> list[Problem]:
    section = config.tasksets["rows"]
    if source is not None:
        section = loader.from_dict({**loader.to_dict(config), "tasksets": {"rows": {"source": source}}}).tasksets[
            "rows"
        ]
    taskset = open_taskset("rows", section, config)
    return [taskset.problem(index) for index in range(len(taskset))]


def test_what_stays_is_a_taskset_with_the_same_problems_in_order(tmp_path: Path) -> None:
    config = config_of(tmp_path, ROWS, *OPERATORS)
    done = prepare(config, tmp_path / "out")
    one = done.report["tasksets"]["rows"]
    all_of_them = problems(config)
    assert problems(config, one["source"]) == [all_of_them[0], all_of_them[2]]
    assert (one["in"], one["out"]) == (4, 2)
    told = [(o["operator"], o["where"], o["in"], o["out"], o["reasons"]) for o in one["operators"]]
    assert told == [
        ("length", "pipeline.0", 4, 3, [{"action": "skip", "reason": "too long", "count": 1}]),
        ("regex", "pipeline.1", 3, 2, [{"action": "skip", "reason": "answer has skip", "count": 1}]),
        ("regex", "pipeline.2", 2, 2, []),
    ]
    assert sorted(os.listdir(tmp_path)) == ["out", "rows.jsonl"]
    assert json.loads((tmp_path / "out" / REPORT).read_text()) == done.report


def test_the_same_again_writes_nothing_and_anything_else_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, ROWS, *OPERATORS)
    prepare(config, tmp_path / "out")
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    again = prepare(config, tmp_path / "out")
    assert not again.is_new
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == written
    with pytest.raises(ConfigError, match="holds something else"):
        prepare(config_of(tmp_path, ROWS, *OPERATORS[:1]), tmp_path / "out")
    with pytest.raises(ConfigError, match="holds something else"):
        prepare(config_of(tmp_path, ROWS[:3], *OPERATORS), tmp_path / "out")
    (tmp_path / "out" / "rows.jsonl").write_text("damaged")
    with pytest.raises(ConfigError, match="holds something else"):
        prepare(config_of(tmp_path, ROWS, *OPERATORS), tmp_path / "out")


@pytest.mark.parametrize("name", ["row_of", "_read_again", "publish"])
def test_killed_anywhere_it_leaves_no_folder_and_does_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    config = config_of(tmp_path, ROWS, *OPERATORS)
    pid = os.fork()
    if not pid:
        monkeypatch.setattr(prepare_module, name, lambda *_: os._exit(9))
        prepare(config, tmp_path / "out")
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.partial").is_dir(), "the kill came in the middle"
    assert prepare(config, tmp_path / "out").report["tasksets"]["rows"]["out"] == 2
    assert sorted(os.listdir(tmp_path)) == ["out", "rows.jsonl"]


def test_parquet_is_the_same_taskset_or_refused(tmp_path: Path) -> None:
    plain = [{**row, "level": number} for number, row in enumerate(ROWS[:2])]
    plain[0].pop("extra")
    config = config_of(tmp_path, plain, OPERATORS[0])
    done = prepare(config, tmp_path / "out", parquet=True)
    assert problems(config, done.report["tasksets"]["rows"]["source"]) == problems(config)[:1]
    mixed = [{"prompt": "a", "extra": {"a": 1}}, {"prompt": "b", "extra": {"b": 2}}]
    with pytest.raises(ConfigError, match=r"problem 0 of those that stay is read otherwise|no common form"):
        prepare(config_of(tmp_path, mixed, OPERATORS[0]), tmp_path / "mixed", parquet=True)
    assert not (tmp_path / "mixed").exists()


@pytest.mark.parametrize(
    ("rows", "operator", "said"),
    [
        (ROWS, {"op": OWN + "Raises"}, r"problem 2: pipeline.0: rows/0/2/0: .* raised ValueError: no such thing"),
        (ROWS, {"op": "regex", "skip": "."}, r"nothing is left of 4 problems: regex \(.*\) 4"),
        (ROWS, {"op": "lenght"}, "did you mean 'length'"),
        (ROWS, {"op": "truncated"}, "found no operators of the task side"),
        ([{"question": "x", "prompt": "y"}], {"op": "length"}, "'prompt' goes on to the reward"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(
    tmp_path: Path, rows: list[dict[str, Any]], operator: dict[str, Any], said: str
) -> None:
    mapped = {"columns": {"prompt": "question"}} if "question" in rows[0] else {}
    with pytest.raises(ConfigError, match=said):
        prepare(config_of(tmp_path, rows, operator, **mapped), tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["rows.jsonl"]


def test_a_changed_group_size_is_said_to_be_lost(tmp_path: Path) -> None:
    done = prepare(config_of(tmp_path, ROWS, {"op": OWN + "Bigger"}), tmp_path / "out")
    assert done.report["tasksets"]["rows"]["not_written"] == 4
    assert "leave these operators in the run file" in done.to_text()
