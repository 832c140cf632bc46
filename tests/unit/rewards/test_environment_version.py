"""The version of an environment changes with its settings and its code, and with nothing else."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rftstream.config import loader
from rftstream.environments.attempts import Attempts
from rftstream.rewards import scorer
from rftstream.rewards import version as version_module
from rftstream.rewards.base import ScoreRequest
from rftstream.rewards.version import environment_version
from tests.configs import small_run
from tests.suite.each import each
from tests.unit.reward_inputs import reward_input

WHERE = "tasksets.sums.environment"
GAME = "from secrets_of import SECRET\nclass Game:\n    pass\n"


def version(folder: Path, environment: Any, environments: dict[str, Any]) -> str:
    section = {"source": "arithmetic", "environment": environment, "reward": "environment"}
    config = small_run(tasksets={"sums": section}, environments=environments)
    return environment_version(loader.replace(config, base=str(folder)), WHERE)


@pytest.fixture
def of_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return the version of an environment in a folder of its own with these files, as a new process reads it."""

    def read(files: dict[str, str], environment: Any, **environments: Any) -> str:
        shutil.rmtree(tmp_path, ignore_errors=True)
        (folder := tmp_path / str(len(sys.path))).mkdir(parents=True)
        monkeypatch.syspath_prepend(folder)
        for module in ("own_game", "secrets_of"):
            monkeypatch.delitem(sys.modules, module, raising=False)
        for name, text in files.items():
            (folder / name).write_text(text)
        return version(folder, environment, environments)

    return read


def test_it_holds_the_code_of_a_users_environment_and_its_settings(of_file: Callable[..., str]) -> None:
    files = {"own_game.py": GAME, "secrets_of.py": "SECRET = 1\n", "other.py": "1\n"}
    first = of_file(files, "own_game:Game")
    assert of_file({**files, "other.py": "2\n"}, "own_game:Game") == first, "another folder, and a file that it ignores"
    assert of_file({**files, "secrets_of.py": "SECRET = 2\n"}, "own_game:Game") != first, "what it imports"
    assert of_file({**files, "own_game.py": GAME + "# more\n"}, "own_game:Game") != first
    three = of_file(files, "own_game:Game", **{"own_game:Game": {"guesses": 3}})
    assert of_file(files, {"name": "own_game:Game", "guesses": 3}) == three != first, "wherever its settings stand"


def test_it_holds_code_that_a_built_in_one_is_given(of_file: Callable[..., str]) -> None:
    check = {"own_game.py": "def check(answer, problem):\n    return 1.0\n"}
    other = {"own_game.py": "def check(answer, problem):\n    return 0.5\n"}
    for settings in (
        {"name": "attempts", "check": "own_game:check"},
        {"name": "tools", "tools": ["calculator", "own_game:check"]},
        {"name": "hosted", "target": "own_game.py:check", "python": "/usr/bin/python9"},
    ):
        assert of_file(check, settings) == of_file(dict(check), settings) != of_file(other, settings)


@each(
    "one, other, is_same",
    [
        ({"name": "attempts"}, {"name": "attempts", "max_attempts": 3}, True),  # which is the default
        ({"name": "attempts"}, {"name": "attempts", "max_attempts": 4}, False),
        ({"name": "attempts", "discount": 1}, {"name": "attempts", "discount": 1.0}, True),
        ({"name": "attempts"}, "tools", False),
        ({"name": "hosted", "target": "textarena"}, {"name": "hosted", "target": "textarena", "python": "p"}, True),
        ({"name": "served", "url": "http://a:1/go"}, {"name": "served", "url": "http://b:2/go"}, True),
        ({"name": "served", "url": "http://a:1/go"}, {"name": "served", "url": "http://a:1/chess"}, False),
        ({"name": "served", "url": "http://a:1/go?n=1"}, {"name": "served", "url": "http://a:1/go?n=2"}, False),
        (*({"name": "tools", "tools": ["search"], "options": {"search": {"corpus": f"/{x}/a.jsonl"}}} for x in "ab"),
         True),
    ],
)  # fmt: skip
def test_of_a_built_in_one_count_the_settings_that_change_what_it_does(
    one: Any, other: Any, is_same: bool, tmp_path: Path
) -> None:
    assert (version(tmp_path, one, {}) == version(tmp_path, other, {})) is is_same


def test_a_new_setting_of_a_new_release_changes_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"name": "attempts", "max_attempts": 2}
    before = version(tmp_path, settings, {})
    fields: list[Any] = [("late", bool, dataclasses.field(default=False))]
    monkeypatch.setattr(
        Attempts, "Config", dataclasses.make_dataclass("Config", fields, bases=(Attempts.Config,), frozen=True)
    )
    assert version(tmp_path, settings, {}) == before


@each("reward, suffix", [("environment", "+env-0abc"), ("exact", "")])
def test_a_verdict_by_the_environment_carries_the_version_that_was_played(reward: str, suffix: str) -> None:
    config = small_run(tasksets={"sums": {"source": "arithmetic", "environment": "attempts", "reward": reward}})
    for made in (scorer.InlineScorer, lambda config: scorer.ProcessScorer(config, processes=1)):
        found = made(config)
        for digest in ("0abc", ""):
            item = dataclasses.replace(reward_input(""), environment_reward=1.0, environment_version=digest)
            found.submit(ScoreRequest(request_id=digest, taskset="sums", item=item))
        replies = {}
        while len(replies) < 2:
            replies |= {reply.request_id: reply.scorer_version for reply in found.poll(60.0)}
        found.close()
        assert replies["0abc"] == replies[""] + suffix


@each(
    "one, other, is_same",
    [
        ("http://a:1/go?n=1", "https://b/go?n=1", True),
        ("http://a", "http://b", True),
        ("http://a/go#x", "http://a/go#y", False),
        ("Look at https://a.org/x. Is it 1?", "Look at https://a.org/x. Is it 1? Say why.", False),
        ("http://[a text, and no address", "http://[a text, and no address", True),
        ("http://[a text, and no address", "http://[another text", False),
    ],
)
def test_of_an_address_counts_what_follows_the_host_and_a_text_counts_whole(
    one: str, other: str, is_same: bool
) -> None:
    assert (version_module._without_places(one, set()) == version_module._without_places(other, set())) is is_same
