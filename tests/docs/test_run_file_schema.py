"""The JSON Schema of run files: two editors' checkers accept every example and refuse typos."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # it has no stubs
import pytest
from click.testing import CliRunner

from rftstream.commands import cli
from rftstream.config import loader
from rftstream.queries.reference import settings
from rftstream.queries.reference.run_file_schema import FILE_NAME, run_file_schema, schema_text
from tests.docs.reading import ROOT, shown
from tests.suite.each import each

SHIPPED = ROOT / "schemas" / "run_file" / FILE_NAME
EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))
FILES = sorted([*EXAMPLES, *(ROOT / "tests" / "docs").rglob("*.toml")])
FIRST_LINE = f"#:schema ../schemas/run_file/{FILE_NAME}"
OWN_PARTS = """
[run]
name = "own"
steps = 3
[model]
path = "fake"
[tasksets."mine"]
source = "my_tasksets:Backwards"
options = { size = 3, anything = true }
reward = [{ name = "my_rewards:closeness", weight = 0.5, scale = 3 }, { name = "math" }]
environment = { name = "my_environments:HigherLower", max_guesses = 3 }
[tasksets.lake]
source = "gymnasium:FrozenLake-v1"
options = { size = 500, python = "venvs/gymnasium/bin/python" }
reward = "environment"
[rewards."my_rewards:closeness"]
scale = 5
[rewards.judge]
url = "http://judge.example.org/v1"
api_key = "env:JUDGE_KEY"
model = "judge"
[trainer]
algorithm = "my_algorithms:Imitate"
[[pipeline]]
op = "my_operators:Spaced"
solved = 0.8
[transport]
kind = "kafka"
servers = "broker:9092"
options = { sasl_plain_password = "env:KAFKA_PASSWORD" }
"""
OVERLAY = '[transport]\nkind = "kafka"\nservers = "broker:9092"\n[run]\nsteps = 5\n'
TYPOS = [
    ("arithmetic", 'algorithm = "grpo"', 'algoritm = "grpo"'),
    ("arithmetic", 'algorithm = "grpo"', 'algorithm = "gpro"'),
    ("arithmetic", "lr = 1.5e-3", "lr = -1.5e-3"),
    ("arithmetic", "lr = 1.5e-3", 'lr = "fast"'),
    ("arithmetic", "max_tokens = 3", "max_tokens = 0"),
    ("arithmetic", "low = 0", "lowest = 0"),
    ("arithmetic", "[feeder]", "[feder]"),
    ("arithmetic", 'reward = "exact"', 'reward = "exct"'),
    ("arithmetic", 'reward = "exact"', 'reward = { name = "exact", casefld = true }'),
    ("arithmetic", 'reward = "exact"', 'reward = [{ name = "exact", use = "gte" }]'),
    ("arithmetic", "[0.9, 0.99]", "[0.9, 0.99, 1]"),
    ("arithmetic", 'lr_schedule = "cosine"', 'lr_schedule = "cosinus"'),
    ("stages", 'algorithm = "sft"', 'algoritm = "sft"'),
    ("mixed", 'op = "solve_rate"', 'op = "solve_rat"'),
    ("attempts", "max_attempts = 3", "max_atempts = 3"),
    ("smollm2-vllm", "[policies.vllm]", "[policies.vlm]"),
]


@pytest.fixture
def errors_of() -> Callable[[str], list[Any]]:
    validator = jsonschema.Draft7Validator(run_file_schema())
    return lambda text: list(validator.iter_errors(tomllib.loads(text)))


def test_the_command_prints_a_schema() -> None:
    """That the shipped file is the same, test_extending.py holds."""
    jsonschema.Draft7Validator.check_schema(run_file_schema())
    printed = CliRunner().invoke(cli, ["schema"])
    assert printed.exit_code == 0
    assert printed.stdout == schema_text()


def test_every_setting_of_a_section_is_in_it_with_its_meaning() -> None:
    schema = run_file_schema()

    def found(key: str) -> dict[str, Any]:
        table: dict[str, Any] = schema
        for word in key.split("."):
            table = table.get("items", table)
            table = table["additionalProperties"] if word == "NAME" else table["properties"][word]
            if reference := table.get("$ref"):
                table = schema["definitions"][reference.rpartition("/")[2]]
        return table

    for section in settings.run_file_sections():
        for setting in section.settings if section.key != settings.PIPELINE else ():
            assert found(setting.key)["description"] == setting.meaning, setting.key


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=shown)
def test_a_file_and_what_it_resolves_to_are_accepted(file: Path, errors_of: Callable[[str], list[Any]]) -> None:
    assert not errors_of(file.read_text(encoding="utf-8"))
    text = loader.to_toml(loader.load([file], env={}))
    assert not errors_of("".join(line for line in text.splitlines(keepends=True) if not line.startswith("base = ")))


def test_no_two_parts_are_described_alike() -> None:
    abouts = [part.about for part in settings.parts()]
    assert len(set(abouts)) == len(abouts)


def test_own_parts_secrets_and_overlays_are_accepted(errors_of: Callable[[str], list[Any]]) -> None:
    assert not errors_of(OWN_PARTS)
    assert not errors_of(OVERLAY)


@each("file", EXAMPLES, ids=shown)
def test_an_example_names_it_first(file: Path) -> None:
    assert file.read_text(encoding="utf-8").startswith(f"{FIRST_LINE}\n")
    assert (file.parent / FIRST_LINE.partition(" ")[2]).resolve() == SHIPPED


def check(checker: str, files: list[Path]) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name(checker)
    arguments = {"taplo": ["check"], "tombi": ["lint", "--offline", "--no-cache", "--error-on-warnings"]}[checker]
    return subprocess.run(
        [program, *arguments, *map(str, files)], capture_output=True, text=True, timeout=1200, cwd=files[0].parent
    )


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["taplo", "tombi"])
def test_checkers_of_editors(checker: str, tmp_path: Path) -> None:
    """By the first line of a file alone, as an editor finds the schema."""
    done = check(checker, EXAMPLES)
    assert done.returncode == 0, done.stderr + done.stdout
    (tmp_path / "schemas" / "run_file").mkdir(parents=True)
    (tmp_path / "schemas" / "run_file" / FILE_NAME).write_text(SHIPPED.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "files").mkdir()
    fine = [tmp_path / "files" / "own.toml", tmp_path / "files" / "overlay.toml"]
    for file, text in zip(fine, (OWN_PARTS, OVERLAY), strict=True):
        file.write_text(f"{FIRST_LINE}\n{text}")
    done = check(checker, fine)
    assert done.returncode == 0, done.stderr + done.stdout
    typos = {}
    for number, (name, right, wrong) in enumerate(TYPOS):
        text = (ROOT / "examples" / f"{name}.toml").read_text(encoding="utf-8")
        assert right in text
        file = tmp_path / "files" / f"typo-{number}.toml"
        file.write_text(text.replace(right, wrong), encoding="utf-8")
        typos[file] = wrong
    done = check(checker, [*fine, *typos])
    assert done.returncode == 1
    said = done.stderr + done.stdout
    accepted = [wrong for file, wrong in typos.items() if file.name not in said]
    assert not accepted, said
    assert not [file for file in fine if file.name in said], said


def test_checkers_are_not_needed_to_refuse_typos(errors_of: Callable[[str], list[Any]]) -> None:
    for name, right, wrong in TYPOS:
        text = (ROOT / "examples" / f"{name}.toml").read_text(encoding="utf-8")
        assert errors_of(text.replace(right, wrong)), wrong


def test_it_is_read_as_json() -> None:
    assert json.loads(SHIPPED.read_text(encoding="utf-8"))["title"] == "Run file of rftstream"
