"""Tasksets by the name of an environment: what the source brings, and the tasks that real packages list."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rftstream.config import loader
from rftstream.config.sections import RunConfig
from rftstream.data.tasksets.open import open_taskset
from rftstream.environments.hosts import pool
from rftstream.errors import ConfigError
from tests.unit.environments.hosts.test_other_adapters import SUMS
from tests.unit.environments.hosts.venvs import interpreter


@pytest.fixture(scope="module", autouse=True)
def no_hosts() -> Iterator[None]:
    yield
    pool.close_pools()


def config_of(folder: Path, source: str, **section: Any) -> RunConfig:
    run = {"name": "named", "steps": 1}
    tasksets = {"one": {"source": source, **section}}
    return loader.from_dict({"run": run, "model": {"path": "fake"}, "tasksets": tasksets, "base": str(folder)})


AGENT = {"name": "hosted_agent", "target": "verifiers"}
NEMO = {"id": "nemo_gym", "dataset": "{here}/rows.jsonl"}
BROUGHT: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "reasoning_gym:chain_sum": ({}, "single_turn", "reasoning_gym"),
    "harbor:tasks": ({}, "harbor", "environment"),
    "arithmetic": ({}, "single_turn", "exact"),
    "verifiers:own/sums": (
        {"python": "p", "size": 7, "options": {"env": {"agent": {"max_turns": 3}}}},
        {**AGENT, "python": "p", "options": {"env": {"agent": {"max_turns": 3}, "taskset": {"id": "own/sums"}}}},
        "environment",
    ),
    "nemo_gym:rows.jsonl": ({}, {**AGENT, "options": {"env": {"taskset": NEMO}}}, "environment"),
    "openenv:http://127.0.0.1:8000": (
        {"options": {"action": "json"}},
        {"name": "hosted", "target": "openenv", "options": {"action": "json", "url": "http://127.0.0.1:8000"}},
        "environment",
    ),
    "ors:own/sums": ({}, {"name": "hosted", "target": "ors", "options": {"url": "own/sums"}}, "environment"),
}
"""Source -> its options, and the environment and the reward that it brings."""


@pytest.mark.parametrize("source", BROUGHT)
def test_a_source_brings_its_environment_and_its_reward(source: str, tmp_path: Path) -> None:
    options, environment, reward = BROUGHT[source]
    section = config_of(tmp_path, source, options=options).tasksets["one"]
    found = json.loads(json.dumps(section.environment).replace(str(tmp_path), "{here}"))
    assert found == environment
    assert section.reward == reward
    own = config_of(tmp_path, source, options=options, environment="attempts", reward="math").tasksets["one"]
    assert (own.environment, own.reward) == ("attempts", "math")


def test_an_interpreter_beside_the_run_file_is_found(tmp_path: Path) -> None:
    python = tmp_path / "venvs" / "gymnasium" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    section = config_of(tmp_path, "gymnasium:FrozenLake-v1").tasksets["one"]
    assert section.options["python"] == str(python)
    assert isinstance(section.environment, dict)
    assert section.environment["python"] == str(python)


PACKAGES = {
    "verifiers:sums_taskset": ("verifiers==0.4.0", 5, "3+1?", {"idx": 3}),
    "gymnasium:FrozenLake-v1": ("gymnasium==1.4.0 numpy==2.4.6", 700, "", {"options": {"seed": 3}}),
    "textarena:GuessTheNumber-v0": ("textarena==0.7.4", 700, "", {"options": {"seed": 3}}),
    "openenv:http://127.0.0.1:1": ("openenv==0.10.0", 700, "", {"options": {"reset": {"seed": 3}}}),
}
"""Source -> its package, and how many tasks there are of 700, prompt and info of the fourth."""


@pytest.mark.slow
@pytest.mark.parametrize("source", PACKAGES)
def test_tasks_that_real_packages_list(source: str, tmp_path: Path) -> None:
    package, count, prompt, info = PACKAGES[source]
    (tmp_path / "sums_taskset.py").write_text(SUMS)
    options = {"python": interpreter(*package.split()), "size": 700, "path": [str(tmp_path)]}
    config = config_of(tmp_path, source, options=options, system="Be brief.")
    opened, again = (open_taskset("one", config.tasksets["one"], config) for _ in range(2))
    assert (len(opened), opened.digest) == (count, again.digest)
    problem = opened.problem(3)
    assert [(one.role, one.content) for one in problem.messages] == [("system", "Be brief."), ("user", prompt)]
    assert problem.info == info
    fewer = config_of(tmp_path, source, options={**options, "size": 4})
    assert len(open_taskset("one", fewer.tasksets["one"], fewer)) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        (
            "gymnasium:FrozenLake-v1",
            {},
            "gymnasium comes by: python -m venv venvs/gymnasium && venvs",
        ),
        ("verifiers:", {}, "names no environment, expected verifiers:NAME"),
        ("verifiers:x", {"python": "nowhere/python"}, "got 'nowhere/python', expected an interpreter"),
        ("verifiers:x", {"pyhton": "p"}, "pyhton"),
        ("verifiers:no_such", {"python": "verifiers==0.4.0"}, "taskset 'no_such' not found"),
    ],
)
def test_what_is_missing_is_said(source: str, options: dict[str, Any], said: str, tmp_path: Path) -> None:
    if "==" in options.get("python", ""):
        options = {"python": interpreter(options["python"])}
    config = config_of(tmp_path, source, options=options)
    with pytest.raises(ConfigError) as refused:
        open_taskset("one", config.tasksets["one"], config)
    assert said in str(refused.value)


SLOW = """
import time

if {importing}:
    time.sleep(600)

def make(options):
    while True:
        {work}
        yield {{"messages": "x" * 1000}}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "importing", "limits", "said"),
    [
        ("time.sleep(600)", False, {"timeout_s": 0.5}, "0.5 s"),
        ("pass", True, {"start_timeout_s": 0.5}, "not imported within 0.5 s"),
        ("pass", False, {}, "expected at most 0; take fewer by options.size"),
        ("raise ValueError('no data')", False, {}, "ValueError: no data"),
        ("yield {'messages': [{'role': 1}]}", False, {}, "task 0: messages"),
    ],
)
def test_what_takes_too_long_or_too_much(
    work: str, importing: bool, limits: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter of one's own stands in for gymnasium's: the limits are those of every adapter."""
    (tmp_path / "slow.py").write_text(SLOW.format(work=work, importing=importing).replace("def make", "def tasks"))
    monkeypatch.setitem(pool.ADAPTERS, "gymnasium", f"{tmp_path}/slow.py:tasks")
    if said.startswith("expected at most"):
        monkeypatch.setattr(pool, "MAX_TASKS_BYTES", 100_000)
    config = config_of(tmp_path, f"gymnasium:{tmp_path.name}", options={"python": sys.executable, **limits})
    with pytest.raises(ConfigError) as refused:
        open_taskset("one", config.tasksets["one"], config).problem(0)
    assert said in str(refused.value)
