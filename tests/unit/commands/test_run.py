"""The command line of what starts processes: help, errors, exit codes, the JSON line."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import IO

import click
import pytest
from click.testing import CliRunner

from rftstream import commands
from rftstream.commands.options import run_files
from rftstream.config import loader
from rftstream.errors import ConfigError, StopRule
from rftstream.runs.folder import RunFolder
from tests.suite.each import each
from tests.unit.tiny_run import write_run_file


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RFTSTREAM_CONFIG", raising=False)
    write_run_file(tmp_path)
    return tmp_path


def call(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(commands.cli, list(arguments))
    return result.exit_code, result.stdout, result.stderr


@each("name", commands.COMMANDS)
def test_every_command_exists_and_its_help_has_an_example(name: str) -> None:
    code, out, _ = call(name, "--help")
    assert code == 0
    assert f"rftstream {name} " in out, "an example"


def test_usage_errors_are_exit_2_and_name_the_nearest() -> None:
    code, _, error = call("runn")
    assert code == 2
    assert "no command 'runn'" in error
    assert "did you mean 'run'?" in error
    code, _, error = call("worker")
    assert code == 2
    assert "One of: feeder, explorer," in error
    assert "One of: transports, policies," in call("list")[2]
    assert call("run", "--nothing")[0] == 2


def test_errors_of_ours_are_one_line_with_their_exit_code(here: Path) -> None:
    code, out, error = call("run", "nothing.toml")
    assert (code, out) == (2, "")
    assert error == "rftstream: nothing.toml: no such file; name a run file, or set RFTSTREAM_CONFIG\n"
    code, _, error = call("run", "tiny.toml", "--set", "trainer.lrr=1")
    assert code == 2
    assert error.startswith("rftstream: --set trainer.lrr: unknown key")
    assert "did you mean 'lr'?" in error
    assert "did you mean trainer.lr?" in call("run", "tiny.toml", "--set", "lr=1")[2]
    (here / "folder" / "run").mkdir(parents=True)
    (here / "folder" / "a.toml").write_text("")
    (here / "folder" / "run" / "run.lock").write_text("")
    assert call("run", "folder")[2].endswith("is a folder, expected a run file; there is folder/a.toml\n")
    assert "`rftstream resume folder/run` goes on" in call("run", "folder/run")[2]
    code, _, error = call("run", "tiny.toml", "--set", "run.steps=0")
    assert code == 2
    assert error.startswith("rftstream: --set run.steps: ")
    code, _, error = call("worker", "tiny.toml", "--role", "explorr")
    assert code == 2
    assert "did you mean 'explorer'?" in error
    code, _, error = call("resume", "tiny.toml")
    assert code == 2
    assert "no run of it yet" in error


@each(
    ("line", "code", "said"),
    [
        ("run tiny.toml", 0, "stopped; nothing is lost: the same command begins anew, or `resume` goes on if workers"),
        ("worker tiny.toml --role explorer", 0, "stopped; nothing is lost"),
        ("check tiny.toml", 1, "stopped by ctrl-C"),
    ],
)
def test_an_early_ctrl_c_is_answered(
    here: Path, monkeypatch: pytest.MonkeyPatch, line: str, code: int, said: str
) -> None:
    def interrupted(*_: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loader, "load", interrupted)
    found, out, error = call(*line.split())
    assert (found, out) == (code, "")
    assert error.startswith(f"rftstream: {said}")


def test_the_help_tells_whole_sentences() -> None:
    code, text, _ = call("--help")
    assert code == 0
    cut = [line for line in text.partition("Options:")[2].splitlines() if "..." in line]
    assert not cut, f"write a shorter first sentence under these commands: {cut}"


def test_the_help_shows_every_command_in_its_group() -> None:
    text = call("--help")[1].partition("Options:")[2]
    titles = re.findall(r"^(\S.*):$", text, re.MULTILINE)
    assert titles == list(commands.GROUPS)
    assert re.findall(r"^  ([a-z]+(?:-[a-z]+)*)  ", text, re.MULTILINE) == list(commands.COMMANDS)
    full = [title for title, names in commands.GROUPS.items() if len(names) > 7]
    assert not full, f"rftstream/commands/__init__.py: GROUPS: {full} has more than 7; take another group, or make one"


@each(
    ("name", "meant"),
    [
        ("train", "'run'?"), ("Start", "'run'?"), ("ls", "'list'?"), ("stats", "'status'?"),
        ("drian", "'drain', which ends the run in order?"), ("stop", "'drain', which ends the run in order?"),
        ("delte", "'delete', which removes a run?"), ("compare", "'diff'?"),
    ],
)  # fmt: skip
def test_a_command_is_understood_by_what_it_means(name: str, meant: str) -> None:
    assert f"no command {name!r}; did you mean {meant}" in call(name)[2]


@each("name", ["brain", "grain", "select", "xyz"])
def test_what_ends_something_is_not_proposed_for_what_is_only_alike(name: str) -> None:
    assert not re.search("drain|delete", call(name)[2])


def test_debug_shows_the_traceback(here: Path) -> None:
    result = CliRunner().invoke(commands.cli, ["--debug", "run", "nothing.toml"])
    assert isinstance(result.exception, ConfigError)
    result = CliRunner().invoke(commands.cli, ["run", "nothing.toml"], env={"RFTSTREAM_DEBUG": "1"})
    assert isinstance(result.exception, ConfigError)


@pytest.mark.parametrize(("error", "code", "says"), [
    (StopRule("no_signal", "buffer: 1000 groups without a batch"), 6, "buffer: 1000 groups without a batch\n"),
    (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/a/plots"), 1, "runs/a/plots: No space left on device"),
], ids=["ours", "the system's"])  # fmt: skip
def test_errors_are_one_line_and_ours_keep_their_code(error: Exception, code: int, says: str) -> None:
    @click.command(cls=commands.Commands)
    def group() -> None:
        raise error

    result = CliRunner().invoke(group, ["list", "policy"])
    assert (result.exit_code, result.stderr.partition(";")[0]) == (code, f"rftstream: {says}")


def written_to(stdout: IO[bytes] | int, arguments: str, *, unbuffered: bool) -> tuple[int, str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-m", "rftstream", *arguments.split()], stdout=stdout, stderr=subprocess.PIPE, text=True,
        env=env | ({"PYTHONUNBUFFERED": "1"} if unbuffered else {}), timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr


def test_a_full_disk_at_resume_names_the_file(here: Path) -> None:
    assert call("run", "tiny.toml", "--no-workers")[0] == 0
    (here / "runs/tiny" / f"config.{os.getpid()}.partial").symlink_to("/dev/full")
    code, _, error = call("resume", "runs/tiny")
    assert code == 1
    assert error == (
        f"rftstream: {here}/runs/tiny/config.toml: No space left on device; make room on its disk, or raise the "
        "limit, and do it again\n"
    )


def test_what_the_system_refuses_under_the_lock_names_the_run(here: Path) -> None:
    folder = RunFolder(here / "runs" / "tiny")
    with pytest.raises(OSError, match="No space left") as refused, folder.held(), open("/dev/full", "wb", 0) as full:
        full.write(b"x")
    assert refused.value.filename == str(folder.path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "unbuffered"), [("--help", False), ("--version", True), ("run --help", False), ("list rewards", True)]
)
def test_a_full_disk_under_the_output_is_one_line(arguments: str, unbuffered: bool) -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        code, error = written_to(full, arguments, unbuffered=unbuffered)
    assert (code, error.count("\n")) == (1, 1)
    assert error.startswith("rftstream: No space left on device; ")


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "unbuffered"), [("--help", True), ("list rewards", False)])
def test_a_reader_that_has_left_hears_nothing(arguments: str, unbuffered: bool) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        assert written_to(write, arguments, unbuffered=unbuffered) == (1, "")
    finally:
        os.close(write)


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "tiny.toml", "--run-dir", ""),
        ("status", ""),
        ("check", ""),
        ("plot", "runs/x", "--out", ""),
        ("replay", "runs/x", "--into", ""),
    ],
)
def test_an_empty_path_is_not_the_folder_one_is_in(here: Path, arguments: tuple[str, ...]) -> None:
    code, _, error = call(*arguments)
    assert (code, "got nothing, expected a path" in error) == (2, True)
    assert sorted(path.name for path in here.iterdir()) == ["tiny.toml"]


def test_file_defaults(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_files([Path("x.toml")]) == (Path("x.toml"),)
    with pytest.raises(ConfigError, match="no run file: none given, RFTSTREAM_CONFIG is not set"):
        run_files([])
    of_runs = ("status", "audit", "logs", "plot", "resume")
    for command in of_runs:
        code, _, error = call(command)
        assert (code, "Missing argument 'RUN'" in error) == (2, True), command
    (here / "rftstream.toml").write_text("")
    assert run_files([]) == (Path("rftstream.toml"),)
    for command in of_runs:
        code, _, error = call(command)
        assert (code, "rftstream.toml: " in error) == (2, True), (command, error)
    monkeypatch.setenv("RFTSTREAM_CONFIG", "elsewhere.toml")
    code, _, error = call("run")
    assert (code, error.split(":")[1].strip()) == (2, "elsewhere.toml")


@pytest.mark.slow
def test_run_with_json_ends_with_one_object(here: Path) -> None:
    (here / "more.toml").write_text("[run]\nsteps = 3\n")
    done = subprocess.run(
        [sys.executable, "-m", "rftstream", "run", "tiny.toml", "more.toml", "--set", "feeder.group_size=3",
         "--run-dir", "mine", "--json"], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    result = json.loads(line)
    assert result["run_dir"] == str(here / "mine")
    assert (result["steps"], result["version"], result["reason"]) == (3, 3, "steps")
    assert {"reward_first", "reward_last", "wall_s"} <= set(result)
    assert "step 3/3" in done.stderr
    code, _, error = call("resume", "mine", "--json")
    assert code == 2
    assert "is finished with 3 of 3 steps" in error
