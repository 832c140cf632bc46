"""`rftstream experts load`, and a run file of demonstrations alone, as commands."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from rftstream.commands import cli
from rftstream.config.loader import from_dict, load
from rftstream.config.sections import DemonstrationsSection, ModelSection
from rftstream.contracts.batches import LossKind
from rftstream.contracts.records import NewRecord
from rftstream.errors import ConfigError
from rftstream.launch.supervisor import worker_commands
from rftstream.models.folders.folder import prepare_model
from rftstream.runs.folder import RunFolder, open_run, open_transport
from rftstream.runs.making.create import begin
from rftstream.runs.writes.load_demonstrations import load_demonstrations, look_at_demonstrations
from rftstream.service.role import Log

RUN = """
[run]
name = "alone"
[model]
path = "fake"
[experts]
source = "rows.jsonl"
[trainer]
algorithm = "sft"
backend = "fake"
"""


def write(path: Path, *numbers: int) -> Path:
    rows = [{"q": f"{n}+1=", "a": str(n + 1)} for n in numbers]
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run with two demonstrations."""
    (tmp_path / "run.toml").write_text(RUN, encoding="utf-8")
    write(tmp_path / "rows.jsonl", 1, 2)
    config = load([tmp_path / "run.toml"], sets=["experts.columns={prompt='q',completion='a'}"], env={})
    made = RunFolder(tmp_path / "runs" / "alone")
    made.path.mkdir(parents=True)
    transport = open_transport(config, made, create=True)
    begin(transport, config, made)
    transport.close()
    return made


def call(*arguments: str | Path) -> tuple[int, str, str]:
    done = CliRunner().invoke(cli, [str(one) for one in arguments])
    return done.exit_code, done.stdout, done.stderr


def test_a_run_begins_with_what_its_file_names(folder: RunFolder) -> None:
    opened = open_run(folder.path)
    assert sum(opened.transport.admin.end_offsets("experts").values()) == 2
    opened.transport.close()


def test_load(folder: RunFolder, tmp_path: Path) -> None:
    more = write(tmp_path / "more.jsonl", 2, 3, 4)
    columns = ("--column", "prompt=q", "--column", "completion=a")
    code, out, _ = call("experts", "load", folder.path, "--from", more, *columns, "--dry-run")
    assert (code, "3 rows: 2 chats to be loaded" in out, "1 there already" in out) == (0, True, True)
    code, out, _ = call("experts", "load", folder.path, "--from", more, *columns, "--json")
    assert code == 0
    found = json.loads(out)
    assert {name: found[name] for name in ("rows", "new", "known", "total")} == {
        "rows": 3, "new": 2, "known": 1, "total": 4,
    }  # fmt: skip
    code, out, _ = call("inspect", folder.path, "experts", "--last", "1")
    assert (code, "demonstration.v3" in out) == (0, True)
    code, out, _ = call("trace", folder.path, "experts/0/3/0")
    assert (code, "number 3" in out, "batch  not yet" in out) == (0, True, True)
    code, _, err = call("trace", folder.path, "experts/0/9/0")
    assert (code, "no such demonstration" in err) == (2, True)


def test_a_row_that_stands_there_twice_is_not_one_that_was_loaded_before(folder: RunFolder, tmp_path: Path) -> None:
    more = write(tmp_path / "more.jsonl", 2, 3, 3, 4, 3, 2)
    columns = ("--column", "prompt=q", "--column", "completion=a")
    _, out, _ = call("experts", "load", folder.path, "--from", more, *columns, "--dry-run")
    assert "6 rows: 2 chats to be loaded" in out
    assert "2 there already; 2 the same as a row before, left out" in out
    found = json.loads(call("experts", "load", folder.path, "--from", more, *columns, "--json")[1])
    assert (found["new"], found["known"], found["repeated"], found["total"]) == (2, 2, 2, 4)
    fresh = look_at_demonstrations(
        replace(DemonstrationsSection(), source=f"jsonl:{more}", columns={"prompt": "q", "completion": "a"}),
        prepare_model(ModelSection(path="fake"), folder.model, 0), frozenset({LossKind.sft}),
    )[0]  # fmt: skip
    assert "already" not in fresh.to_text()
    assert "3 the same as a row before, left out" in fresh.to_text()


def test_records_of_others_take_no_number(folder: RunFolder, tmp_path: Path) -> None:
    opened = open_run(folder.path)
    producer = opened.transport.producer("somebody")
    producer.start()
    producer.commit([NewRecord("experts", 0, b"?", b"?")])
    producer.close()
    assert opened.config.experts is not None
    section = replace(opened.config.experts, source=f"jsonl:{write(tmp_path / 'more.jsonl', 3)}")
    loaded = load_demonstrations(opened.transport, opened.config, folder, section, say=print)
    numbers = [record.header("number") for record in Log(opened.transport).read("experts", bodies=False)]
    opened.transport.close()
    assert loaded.total == 3
    assert sorted(one for one in numbers if one is not None) == [b"0", b"1", b"2"]


def test_a_bad_line_is_named(folder: RunFolder, tmp_path: Path) -> None:
    code, _, err = call("experts", "load", folder.path, "--from", write(tmp_path / "more.jsonl", 5))
    assert code == 2
    assert "more.jsonl:1: found the columns q, a, expected messages, or prompt and completion" in err
    code, _, err = call("experts", "load", folder.path, "--from", "nowhere.jsonl")
    assert (code, "nowhere.jsonl: no such file" in err) == (2, True)
    code, _, err = call("experts", "load", folder.path, "--from", tmp_path / "more.jsonl", "--column", "prompt")
    assert (code, "expected OURS=THEIRS" in err) == (2, True)


def test_who_works_on_demonstrations_alone(folder: RunFolder) -> None:
    opened = open_run(folder.path)
    opened.transport.close()
    assert [role for role, _ in worker_commands(opened.config, folder)] == ["feeder", "buffer", "trainer"]


def test_a_run_needs_something_to_learn_from() -> None:
    model = {"path": "fake"}
    with pytest.raises(ConfigError, match=r"one \[tasksets.NAME\], or \[experts\] alone"):
        from_dict({"run": {"name": "a"}, "model": model})
    with pytest.raises(ConfigError, match=r"name demonstrations by experts.source"):
        from_dict({"run": {"name": "a"}, "model": model, "experts": {}})
    with pytest.raises(ConfigError, match=r"tasksets.experts: the name of demonstrations"):
        from_dict({
            "run": {"name": "a", "steps": 1}, "model": model, "experts": {},
            "tasksets": {"experts": {"source": "arithmetic"}},
        })  # fmt: skip


@pytest.mark.parametrize("sets", [(), ("--set", "run.steps=4"), ("--set", "trainer.lr_schedule=constant")])
def test_check_says_that_a_schedule_has_no_end(sets: tuple[str, ...], tmp_path: Path) -> None:
    (file := tmp_path / "run.toml").write_text(f'{RUN}lr_schedule = "cosine"\n', encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n', encoding="utf-8")
    code, out, _ = call("check", file, *sets)
    assert (code, "'cosine' falls until run.steps, which is unset" in out) == (0, not sets), out
    assert "1 chats to be loaded" in out
