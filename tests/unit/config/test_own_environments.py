"""An environment may have settings of its own in each taskset and evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rftstream.config import loader
from rftstream.config.parts.part_names import check_known
from rftstream.config.sections import RunConfig
from rftstream.errors import ConfigError
from rftstream.runs.manifest import changed_settings
from tests.configs import small_run
from tests.suite.each import each

FILE = """
[run]
name = "r"
steps = 1
[model]
path = "fake"
[tasksets.plain]
source = "arithmetic"
environment = "tools"
[tasksets.searches]
source = "arithmetic"
environment = { name = "tools", tools = ["search"], options.search.corpus = "wiki/corpus.jsonl" }
[tasksets.served]
source = "arithmetic"
[tasksets.served.environment]
name = "served"
url = "http://127.0.0.1:9"
api_key = "env:OWN_KEY"
[evaluations.short]
source = "arithmetic"
environment = { name = "tools", max_turns = 2 }
[environments.tools]
tools = ["calculator"]
max_turns = 5
"""


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    (tmp_path / "run.toml").write_text(FILE)
    return loader.load([tmp_path / "run.toml"], env={})


def test_they_are_differences_from_the_section(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN_KEY", "hush")
    check_known(config)
    plain, own, short = (
        config.build_environment(f"{place}.environment")[1]
        for place in ("tasksets.plain", "tasksets.searches", "evaluations.short")
    )
    assert (plain.tools, plain.max_turns) == (("calculator",), 5)
    assert (own.tools, own.max_turns) == (("search",), 5)
    assert (short.tools, short.max_turns) == (("calculator",), 2)
    assert config.build_environment("tasksets.served.environment")[1].api_key == "hush"
    assert "hush" not in loader.to_toml(config)
    assert loader.from_toml(loader.to_toml(config)) == config


def test_paths_are_relative_to_the_run_file(config: RunConfig, tmp_path: Path) -> None:
    _, own = config.build_environment("tasksets.searches.environment")
    assert own.options == {"search": {"corpus": str(tmp_path / "wiki" / "corpus.jsonl")}}


def test_a_task_of_another_environment_has_the_section_alone(config: RunConfig) -> None:
    """It was made before its taskset was changed, or before there was none of its name."""
    where = "tasksets.served.environment"
    assert config.build_environment(where, "tools")[1].max_turns == 5
    assert config.build_environment("tasksets.gone.environment", "tools")[1].max_turns == 5
    assert config.build_environment("evaluations.short.environment", "tools")[1].max_turns == 2


@pytest.mark.parametrize(
    ("error", "written"),
    [
        ("environments.tools.max_turns: got 0", "here.max_turns: got 0"),
        ("environments.tools.options.search: no", "here.options.search: no"),
        ("environments.tools: tools has 'x' twice", "here: tools has 'x' twice"),
        ("environments: python: got 'x'", "here.python: got 'x'"),
        ("environments.tools.tools: got 3", "environments.tools.tools: got 3"),
        ("environments.toolset.max_turns: got 0", "environments.toolset.max_turns: got 0"),
        ("something else", "something else"),
    ],
)
def test_where_a_setting_is_written(config: RunConfig, error: str, written: str) -> None:
    assert config.as_written(error, "environment", {"name": "tools", "max_turns": 0}, "here") == written
    assert config.as_written(error, "environment", "tools", "here") == error


def test_they_can_be_set_and_hidden_as_all_others(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(FILE)
    sets = ["tasksets.served.environment.api_key=hush", "evaluations.short.environment.max_turns=3"]
    config = loader.load([tmp_path / "run.toml"], sets=sets, env={})
    assert "hush" not in loader.to_toml(config)
    assert config.build_environment("evaluations.short.environment")[1].max_turns == 3
    before = loader.load([tmp_path / "run.toml"], env={})
    assert "evaluations.short.environment.max_turns 2 -> 3" in changed_settings(before, config)


@each(
    ("own", "usual", "said"),
    [
        ({"max_turns": 3}, {}, r"^tasksets.sums.environment: found no name, expected one beside its settings"),
        ({"name": "tool"}, {}, r"^tasksets.sums.environment: unknown 'tool'; .*did you mean 'tools'"),
        ({"name": "tools", "max_turn": 3}, {}, r"^tasksets.sums.environment.max_turn: unknown key; .*'max_turns'"),
        ({"name": "tools", "max_turns": 0}, {}, r"^tasksets.sums.environment.max_turns: got 0, expected"),
        ({"name": "tools", "max_turns": 3}, {"tools": 3}, r"^environments.tools.tools: got 3, expected a list"),
        ({"name": "tools", "max_turns": 3}, {"max_turns": "x", "tools": 1}, r"^environments.tools.tools: got 1"),
        ({"name": "served", "api_key": "env:NOT_SET"}, {}, r"^tasksets.sums.environment.api_key: NOT_SET is not set"),
        ({"name": "served"}, {"api_key": "env:NOT_SET"}, r"^environments.served.api_key: NOT_SET is not set"),
        ("served", {"api_key": "env:NOT_SET"}, r"^environments.served.api_key: NOT_SET is not set"),
    ],
)
def test_errors_name_the_place(own: Any, usual: dict[str, Any], said: str) -> None:
    name = own if isinstance(own, str) else own.get("name", "tools")
    config = small_run(
        run={"name": "r", "steps": 1}, tasksets={"sums": {"source": "arithmetic", "environment": own}},
        environments={name: usual} if usual else {},
    )  # fmt: skip

    def build() -> None:
        check_known(config)
        config.build_environment("tasksets.sums.environment")

    with pytest.raises(ConfigError, match=said):
        build()
