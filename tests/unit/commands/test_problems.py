"""`rftstream problems add` and `list`: rows of a file join a growing taskset, each once."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rftstream.config.loader import load
from rftstream.contracts.problems import NewProblem, ProblemKind, ProblemMaker, RejectedProblem, RejectReason
from rftstream.runs.folder import RunFolder, open_run, open_transport
from rftstream.runs.making.create import begin
from rftstream.service.records.problem_records import read_problems
from rftstream.service.role import Log
from rftstream.testing.played import played_records
from tests.commands import PARTITIONS, call, called, write_run_file

GROWING = '[tasksets.more]\nsource = "log:problems"\n'


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run with a growing taskset beside another one."""
    config = load([write_run_file(tmp_path, GROWING + PARTITIONS)], env={})
    made = RunFolder(tmp_path / "runs" / "demo")
    made.path.mkdir(parents=True)
    transport = open_transport(config, made, create=True)
    begin(transport, config, made)
    transport.close()
    return made


def write(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def new_ones(folder: RunFolder) -> list[NewProblem]:
    opened = open_run(folder.path)
    found = [message for _, message in read_problems(Log(opened.transport)) if isinstance(message, NewProblem)]
    opened.transport.close()
    return found


def test_rows_join_once_however_often_they_are_added(folder: RunFolder, tmp_path: Path) -> None:
    rows = write(
        tmp_path / "rows.jsonl",
        {"q": "1+1=", "answer": "2", "of": "sums/4", "hint": "easy"},
        {"q": "1+1=", "answer": "2", "of": None, "hint": "easy"},
        {"q": "2+2=", "answer": "4", "of": None, "hint": None},
    )
    columns = ("--column", "prompt=q", "--column", "parent=of", "--by", "ada", "--agent")
    tried = called("problems", "add", folder.path, "--from", rows, *columns, "--dry-run")
    assert (tried["new"], tried["repeated"], new_ones(folder)) == (2, 1, [])
    added = call("problems", "add", folder.path, "--from", rows, *columns)
    assert added.exit_code == 0, added.output
    assert "3 rows: 2 added to more; 1 the same as a row before, left out" in added.stdout
    again = called("problems", "add", folder.path, "--from", rows, *columns)
    assert (again["new"], again["known"], again["repeated"]) == (0, 2, 1)
    first, second = new_ones(folder)
    assert (first.parent, first.kind, first.maker, first.made_by) == (
        "sums/4", ProblemKind.varied, ProblemMaker.agent, "ada",
    )  # fmt: skip
    assert first.problem.info == {"hint": "easy"}
    assert (second.parent, second.kind, second.problem.answer) == (None, ProblemKind.given, "4")

    listed = called("problems", "list", folder.path, "--last", "1")
    assert listed["joined"] == {"more": 2}
    assert [one["name"] for one in listed["problems"]] == ["more/1"]
    assert "sums/4" in call("problems", "list", folder.path).stdout


def test_what_a_model_made_in_vain_is_listed_apart(folder: RunFolder) -> None:
    opened = open_run(folder.path)
    rejected = RejectedProblem(
        problem_id="sums/0/3/0/harder/0", taskset="more", kind=ProblemKind.harder, parent="sums/3",
        parent_group="sums/0/3/0", made_by="writer", reason=RejectReason.unreadable, said="Sure! Here is one.",
    )  # fmt: skip
    producer = opened.transport.producer("test")
    producer.start()
    producer.commit(played_records(opened.transport, "demo", [("problems", 0, rejected)]))
    opened.transport.close()
    found = called("problems", "list", folder.path)
    assert (found["joined"], found["rejected"], found["problems"]) == ({"more": 0}, {"more": {"unreadable": 1}}, [])
    shown = call("problems", "list", folder.path, "--rejected").stdout
    assert "rejected: 1 unreadable" in shown
    assert "Sure! Here is one." in shown


@pytest.mark.parametrize(("row", "arguments", "told"), [
    ({"prompt": "1+1="}, (), "row 1 of jsonl:.*answer"),
    ({"prompt": "1+1=", "answer": "2", "of": "4"}, ("--column", "parent=of"), "parent '4', expected TASKSET/INDEX"),
    ({"prompt": "1+1=", "answer": "2", "k": "longer"}, ("--column", "kind=k"), "got the kind 'longer'"),
    ({"answer": "2"}, (), "name it by --column prompt=NAME"),
    ({"prompt": "1+1=", "answer": "2"}, ("--taskset", "sums"), "'sums' is no taskset that grows; .*: more"),
    ({"prompt": "1+1=", "answer": "2"}, ("--column", "prompt"), "expected OURS=THEIRS"),
])  # fmt: skip
def test_one_bad_row_is_told_and_nothing_is_written(
    folder: RunFolder, tmp_path: Path, row: dict[str, object], arguments: tuple[str, ...], told: str
) -> None:
    good = {"prompt": "2+2=", "answer": "4", "of": "sums/1", "k": None}
    rows = write(tmp_path / "rows.jsonl", row, good)
    done = call("problems", "add", folder.path, "--from", rows, *arguments)
    assert done.exit_code == 2
    assert re.search(told, " ".join(done.stderr.split())), done.stderr
    assert new_ones(folder) == []


def test_a_run_without_such_a_taskset(tmp_path: Path) -> None:
    config = load([write_run_file(tmp_path)], env={})
    made = RunFolder(tmp_path / "runs" / "demo")
    made.path.mkdir(parents=True)
    transport = open_transport(config, made, create=True)
    begin(transport, config, made)
    transport.close()
    done = call(
        "problems", "add", made.path, "--from", write(tmp_path / "rows.jsonl", {"prompt": "1+1=", "answer": "2"})
    )
    assert done.exit_code == 2
    assert 'source = "log:problems"' in done.stderr
    assert "no taskset that grows" in call("problems", "list", made.path).stdout
