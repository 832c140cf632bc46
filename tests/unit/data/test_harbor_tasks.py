"""Tasks of Harbor: what is read, what is refused and why, and how rewards are read."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rftstream.data import harbor_tasks
from rftstream.data.harbor_tasks import digest_task, read_rewards, read_task, resolve_variables
from rftstream.errors import ConfigError, HostedCodeError
from tests.suite.each import each
from tests.surroundings import ROOT
from tests.unit.data.test_tasksets_sources import open_source, user

EXAMPLES = ROOT / "examples" / "harbor"
NAMES = ["broken-slug", "count-errors", "find-token", "fix-median", "sales-report"]


def task_at(folder: Path, **files: str | None) -> Path:
    """Copy a task with other files: their names with _ for what no name of Python has. None: removed."""
    shutil.copytree(EXAMPLES / "find-token", folder)
    names = {"toml": "task.toml", "instruction": "instruction.md", "compose": "environment/docker-compose.yaml"}
    names |= {"dockerfile": "environment/Dockerfile", "test": "tests/test.sh"}
    for name, text in files.items():
        path = folder / names[name]
        path.unlink() if text is None else path.write_text(text)
    return folder


def test_the_examples_are_a_taskset(tmp_path: Path) -> None:
    """In the order of their names, with other digests when any file of theirs is another."""
    taskset = open_source(f"harbor:{EXAMPLES}", system="Be brief.")
    problems = [taskset.problem(index) for index in range(len(taskset))]
    assert [problem.info["task"] for problem in problems] == NAMES
    assert all(problem.messages[0].content == "Be brief." for problem in problems)
    assert user(problems[2]).startswith("Somewhere below /data is the one file")
    assert problems[2].info["folder"] == str(EXAMPLES / "find-token")
    assert read_task(EXAMPLES / "find-token").settings.environment.memory_mb == 512
    one = open_source(f"harbor:{task_at(tmp_path / 'one')}")
    other = open_source(f"harbor:{task_at(tmp_path / 'other', test='#!/bin/sh')}")
    assert len(one) == 1 and one.digest != other.digest
    only = open_source(f"harbor:{EXAMPLES}", options={"only": ["fix-median"]})
    assert [only.problem(0).info["task"], len(only)] == ["fix-median", 1]
    task_at(tmp_path / "a third")
    same = [open_source(f"harbor:{tmp_path}", options={"only": ["other"]}).digest]
    shutil.rmtree(tmp_path / "a third")
    assert same == [open_source(f"harbor:{tmp_path}", options={"only": ["other"]}).digest], "others do not count"


def test_settings_of_older_schemas_and_marks_of_benchmarks(tmp_path: Path) -> None:
    toml = 'version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "500M"\nallow_internet = false\n[metadata]\na = 1'
    text = "<!-- a canary: do not train on this -->\n# canary 123\n\nDo it.\n"
    task = read_task(task_at(tmp_path / "task", toml=toml, instruction=text))
    machine = task.settings.environment
    assert (machine.memory_mb, machine.storage_mb, machine.network_mode) == (2048, 500, "no-network")
    assert task.instruction == "Do it.\n"


REFUSED = {
    "no tests": ({"test": None}, "there is no tests/test.sh, expected one in each task"),
    "no instruction": ({"instruction": None}, "there is no instruction.md"),
    "empty instruction": ({"instruction": "<!-- canary -->\n\n"}, "is empty, expected the agent's prompt"),
    "no machine": ({"dockerfile": None}, "there is no Dockerfile, and .* names no docker_image"),
    "several machines": ({"compose": "services: {}"}, "found a compose file, expected a Dockerfile alone"),
    "no toml": ({"toml": "[agent"}, "task.toml: line 1"),
    "a time below 0": ({"toml": "[agent]\ntimeout_sec = -1.0"}, r"agent.timeout_sec: expected .* > 0"),
    "steps": ({"toml": '[[steps]]\nname = "a"'}, "steps: expected .* not supported here"),
    "windows": ({"toml": '[environment]\nos = "windows"'}, "environment.os: invalid .* not supported here"),
    "a machine for tests": (
        {"toml": '[verifier]\nenvironment_mode = "separate"'},
        "environment_mode: .* not supported",
    ),
    "an option for an image": (
        {"toml": "[environment]\ndocker_image = '--help'"},
        "environment.docker_image: expected",
    ),
    "lines for an image": ({"toml": '[environment]\ndocker_image = "a\\nRUN b"'}, "environment.docker_image: expected"),
    "GPUs": ({"toml": "[environment]\ngpus = 1"}, "environment.gpus: .* not supported here"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_run_is_refused_by_name(tmp_path: Path, case: str) -> None:
    files, error = REFUSED[case]
    folder = task_at(tmp_path / "tasks" / "bad", **files)
    with pytest.raises(ConfigError, match=error):
        read_task(folder)
    if files.get("toml") != "[agent":
        task_at(tmp_path / "tasks" / "good")
        left = open_source(f"harbor:{tmp_path / 'tasks'}", options={"skip_unsupported": True})
        assert [left.problem(index).info["task"] for index in range(len(left))] == ["good"]


@pytest.mark.parametrize(
    ("source", "options", "error"),
    [
        ("nowhere", {}, "there is no folder"),
        ("", {}, "no task in .*, expected folders with a task.toml each"),
        (str(EXAMPLES), {"only": ["find-tokens"]}, "options.only: no task 'find-tokens'; there are broken-slug"),
    ],
)
def test_folders_without_tasks(tmp_path: Path, source: str, options: dict[str, object], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        open_source(f"harbor:{tmp_path / source}", options=options)


@each(
    ("text", "named", "reward", "parts"),
    [
        (b"1\n", None, 1.0, {}),
        (b" 0.25", None, 0.25, {}),
        (b"0", b'{"reward": 1, "style": 0.5}', 1.0, {"style": 0.5}),
        (None, b'{"accuracy": 0.75}', 0.75, {"accuracy": 0.75}),
        (None, b'{"a": 1, "b": 0}', None, {"a": 1.0, "b": 0.0}),
        (None, b'{"reward": true}', 1.0, {}),
    ],
)
def test_rewards(text: bytes | None, named: bytes | None, reward: float | None, parts: dict[str, float]) -> None:
    assert read_rewards(text, named) == (reward, parts)


@each(
    ("text", "named", "error"),
    [
        (None, None, "the tests wrote no reward, expected /logs/verifier/reward.txt or reward.json"),
        (b"", None, "reward.txt: got '', expected finite numbers"),
        (b"nan", None, "reward.txt: got 'nan'"),
        (b"good", None, "reward.txt: got 'good'"),
        (b"1", b"", "reward.json: got ''"),
        (None, b"{}", "expected an object of numbers"),
        (None, b"1", "expected an object of numbers"),
        (None, b'{"reward": "1"}', "found '1'"),
        (None, b'{"reward": Infinity}', "found inf"),
        (b"\xff", None, "expected finite numbers"),
        (None, b'{"reward": 1' + 400 * b"0" + b"}", "expected finite numbers: int too large"),
        (None, 100_000 * b"[", "expected finite numbers: maximum recursion depth"),
    ],
)
def test_bad_rewards(text: bytes | None, named: bytes | None, error: str) -> None:
    with pytest.raises(HostedCodeError, match=error):
        read_rewards(text, named)


def test_variables_of_this_machine() -> None:
    wanted = {"A": "${HERE}", "B": "${NOT:-b}", "C": "plain $HERE", "D": "${NOT:-}"}
    assert resolve_variables(wanted, "x", {"HERE": "1"}) == {"A": "1", "B": "b", "C": "plain $HERE", "D": ""}
    with pytest.raises(HostedCodeError, match="x: A wants the variable NOT, which the explorer does not have"):
        resolve_variables({"A": "${NOT}"}, "x", {})


def test_links_of_a_task_stay_in_it(tmp_path: Path) -> None:
    """Files of this machine never get into a place."""
    folder = task_at(tmp_path / "task")
    (folder / "tests" / "again.sh").symlink_to("test.sh")
    digest_task(folder)
    (tmp_path / "secret").write_text("key")
    (folder / "environment" / "data").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match="environment/data: is a link out of the task"):
        digest_task(folder)
    task_at(tmp_path / "whole")
    assert len(open_source(f"harbor:{tmp_path}", options={"skip_unsupported": True})) == 1


def test_a_task_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = task_at(tmp_path / "task")
    monkeypatch.setattr(harbor_tasks, "MAX_BYTES", sum(path.stat().st_size for path in folder.rglob("*.*")) - 1)
    with pytest.raises(ConfigError, match=r"has more than 0 MB; let the Dockerfile fetch what is large"):
        digest_task(folder)


RACE = """
import sys, threading
from pathlib import Path
from rftstream.data.harbor_tasks import read_task
sys.setswitchinterval(1e-6)
together = threading.Barrier(8)
def read():
    together.wait()
    read_task(Path(sys.argv[1]))
threads = [threading.Thread(target=read) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


@pytest.mark.process
def test_the_first_tasks_are_read_by_many_threads() -> None:
    """An explorer that reads those of a batch died of a segmentation fault in msgspec, in one of three starts."""
    subprocess.run([sys.executable, "-c", RACE, EXAMPLES / "find-token"], check=True, cwd=ROOT)
