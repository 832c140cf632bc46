"""Commands, topics, metrics and keys that the docs name exist, and those that exist are named."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rftstream.commands import COMMANDS
from rftstream.config.loader import load
from rftstream.contracts.messages import MESSAGES
from rftstream.contracts.topics import TOPICS
from rftstream.contracts.versions import StepRecord
from rftstream.launch.result import RunResult
from rftstream.metrics import REGISTRY
from rftstream.queries.curves.exported import EXPORTED
from rftstream.queries.state.workers import FIELD_TEXTS, SHOWN_ELSEWHERE, UNUSUAL_TEXTS
from rftstream.runs.folder import OpenRun
from rftstream.testing import MemoryRun, Simulation
from tests.docs.reading import PAGES, ROOT, blocks, code, read, shown
from tests.source import sources
from tests.suite.each import each

OPERATIONS = read(ROOT / "docs" / "operations.md")


def commands(text: str) -> Iterator[str]:
    yield from re.findall(r"\brftstream ([a-z]+(?:-[a-z]+)*)\b", text)


@each("page", PAGES, ids=shown)
def test_commands_exist(page: Path) -> None:
    shell = [line for block in blocks(page, "console", "sh") for line in block.commands or block.text.splitlines()]
    named = [name for text in (*code(page), *shell) for name in commands(text)]
    unknown = sorted(set(named) - set(COMMANDS))
    assert not unknown, f"{shown(page)}: no command {unknown}; correct it, or add it to GROUPS in rftstream/commands"


def test_commands_that_messages_name_exist() -> None:
    named = {(name, str(source.path)) for source in sources("rftstream") for _, text in source.strings for name in
             re.findall(r"`rftstream ([a-z]+(?:-[a-z]+)*)\b", text)}  # fmt: skip
    assert len(named) > 100
    assert not [one for one in named if one[0] not in COMMANDS]


def test_targets_of_make_exist() -> None:
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    texts = [text for page in PAGES for text in (*code(page), *(line for one in blocks(page) for line in one.commands))]
    texts.append((ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    named = {name for text in texts for name in re.findall(r"^make ([a-z-]+)|\bphase make ([a-z][a-z-]+)", text)}
    assert {one or other for one, other in named} <= known


@each("page", PAGES, ids=shown)
def test_nothing_is_left_to_be_filled_in(page: Path) -> None:
    """A word like TURNS_FIGURES in a sentence, where a figure was to come."""
    prose = re.sub(r"```.*?```|`[^`]*`", "", read(page), flags=re.DOTALL)
    assert not re.findall(r"\b[A-Z]+_FIGURES\b|\bTODO\b|\bTBD\b|never (?:built|started)\b", prose)


MOST_WORDS = 90_000
"""Of all pages, without what docs/generate.py fills in: a new page takes the place of words elsewhere."""


def test_pages_written_by_hand_stay_small() -> None:
    others = (ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "schemas/README.md"))
    words = {shown(page): len(read(page, by_hand=True).split()) for page in (*PAGES, *others)}
    longest = sorted(words.items(), key=lambda item: -item[1])[:8]
    assert sum(words.values()) <= MOST_WORDS, f"{sum(words.values()):,} words; cut repetition, first in {longest}"


def test_topics_and_contracts_are_told() -> None:
    text = read(ROOT / "docs" / "contracts.md")
    table = text.partition("<!-- generated: topics -->")[2].partition("<!-- end -->")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(TOPICS)
    for contract in MESSAGES:
        assert f"\n### {contract}\n" in text


@each("page", PAGES, ids=shown)
def test_prometheus_metrics_exist(page: Path) -> None:
    known = {f"{one.name}_total" if one.type == "counter" else one.name for one in REGISTRY.collect()}
    known |= {one.name for one in EXPORTED}
    modules = {"rftstream_version"}
    named = {text for text in code(page) if re.fullmatch(r"rftstream_\w+", text)}
    assert named - modules <= known


def test_exit_codes_are_those_of_the_table() -> None:
    codes = set(re.findall(r"^\| (\d) \|", OPERATIONS, re.MULTILINE))
    for page in PAGES:
        assert set(re.findall(r"\bexit (?:code )?(\d)\b", read(page))) <= codes, shown(page)


# ------------------------------------------------------------------------------------------------ of a small run


@pytest.fixture(scope="module")
def simulation(tmp_path_factory: pytest.TempPathFactory) -> Simulation:
    simulation = Simulation(load([ROOT / "tests/docs/examples/own_parts.toml"]), folder=tmp_path_factory.mktemp("run"))
    simulation.run()
    return simulation


def keys_told(command: str) -> set[str]:
    section = OPERATIONS.partition("## For scripts")[2]
    row = re.search(rf"^\| `{command}`.*?\| (.+) \|$", section, re.MULTILINE)
    assert row is not None
    return set(re.findall(r"`(\w+)`", row[1]))


def test_json_of_run() -> None:
    assert keys_told("run") == {item.name for item in dataclasses.fields(RunResult)}


def test_json_of_views(simulation: MemoryRun) -> None:
    from rftstream.preflight.checks.check import check
    from rftstream.queries.records.inspect import record_to_json
    from rftstream.queries.state.status_reading import read_status

    assert keys_told("audit") == set(simulation.audit().to_json())
    assert keys_told("inspect") == set(record_to_json(simulation.records("steps")[-1]))
    assert keys_told("check") == set(check(simulation.config).to_json())
    run = OpenRun(simulation.folder, simulation.config, simulation.transport())
    assert keys_told("status") == set(read_status(run).to_json())


def test_audit_counts(simulation: MemoryRun) -> None:
    for key in simulation.audit().to_json()["rollouts"]:
        assert f"`{key}`" in OPERATIONS


def metrics_told() -> set[str]:
    table = OPERATIONS.partition("## Metrics of a step")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.+?) \|", table, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([\w/]+)`", cell)}


def named(metric: str) -> str:
    """As the docs call it: `part/exact` is one of `part/NAME`."""
    kind, slash, _ = metric.partition("/")
    return f"{kind}/{'TASKSET' if kind == 'reward' else 'NAME'}" if slash else metric


def test_metrics_of_a_step_are_told(simulation: MemoryRun) -> None:
    steps = [message for message in simulation.messages("steps") if isinstance(message, StepRecord)]
    of_the_example = {"batches"}  # of its own backend
    assert {named(metric) for step in steps for metric in step.metrics} - of_the_example <= metrics_told()


def test_every_field_of_health_has_its_words(tmp_path: Path) -> None:
    simulation = Simulation(load([ROOT / "tests/docs/examples/own_parts.toml"]), folder=tmp_path)
    asked: dict[str, set[str]] = {}

    def ask() -> bool:
        asked.update({one.service.role: set(one.service.health()) for one in simulation.processes if one.service})
        return False

    simulation.run(until=ask)
    assert set(asked) >= {"feeder", "explorer", "verifier", "buffer", "trainer"}
    assert set().union(*asked.values()) <= {*FIELD_TEXTS, *UNUSUAL_TEXTS, *SHOWN_ELSEWHERE}
