"""The answers of a user who makes a first run file, and the problems that they name."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rftstream.config import loader
from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import EnvironmentSpec, TasksetSpec
from rftstream.config.sections import RunConfig
from rftstream.contracts.tasks import ChatMessage, Problem
from rftstream.data.tasksets.columns import OUR_COLUMNS, USUAL_COLUMNS, found_columns
from rftstream.data.tasksets.open import open_taskset
from rftstream.data.tasksets.rows import RowReader, first_rows
from rftstream.errors import ConfigError

SAMPLE = "problems.jsonl"
READ_AS = {"json": "jsonl", "tsv": "csv"}
"""Endings of files that the source of another ending reads."""
ALONE = "put the file alone into a folder, and name that"
MADE = "made"
"""Answer for a small new model."""

MOST_LOOKED_AT = 10_000
"""Most problems that are read for a made model."""
FORMATS = {
    "any": ("as it likes", "", ""),
    "boxed": ("in \\boxed{}", "Put the final answer in \\boxed{}.", r"\\boxed\{(.+)\}"),
    "hashes": ("after ####", "End with the final answer after ####.", r"####\s*(.+)"),
}
"""Form of a completion's answer -> the form in words, the system message that asks for it, and the pattern by which the
reward `exact` finds it."""


@dataclass(frozen=True, kw_only=True)
class FirstFile:
    """The answers of a user who makes a first run file. `init` or its flags give them; `write` makes the files."""

    folder: Path
    name: str = ""
    """Name of the run; empty: the folder's."""
    tasks: str = ""
    """A file of problems, a folder, or a source as in the run file; empty: a sample file is written."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Our name -> the file's, if the file's name is not one of `USUAL_COLUMNS`."""
    model: str = MADE
    """`made`, a model folder, or a name on the hub."""
    environment: str = ""
    """Name of an environment, `module:Class` or `module.py:Class`; empty: one turn, or what the source brings."""
    reward: str = ""
    """Name of a reward; empty: it is the environment's, or chosen by the form of the answers."""
    algorithm: str = "grpo"
    servers: str = ""
    """Addresses of Kafka's servers; empty: the log is a file in the run folder."""
    steps: int | None = None
    """Default: 250 for a made model, 100 for others."""
    device: str = ""
    """Device of trainer, explorer and evaluator; empty: the machine decides."""
    held_out: float | None = None
    """Share of the problems that is evaluated and not trained on; default: a tenth, at most 100."""
    answer_format: str = "any"
    """Form in which the model shall give its answer: one of `FORMATS`."""


def missing_prompt(wanted: FirstFile) -> list[str]:
    """Return the columns of the problems if none is known to be the prompt; else nothing. ConfigError if there are no
    problems."""
    row = _first_row(wanted, find_source(wanted)) if wanted.tasks else None
    return list(row) if row is not None and not _has_prompt(wanted, row) else []


def without_answer(wanted: FirstFile) -> list[str]:
    """Return the columns of the problems if none of them has an answer; else nothing."""
    row = _first_row(wanted, find_source(wanted)) if wanted.tasks else None
    return list(row) if row is not None and all(one.answer is None for one in read_problems(wanted)) else []


def read_problems(wanted: FirstFile) -> list[Problem]:
    """Return the first problems that are named, or those of the sample. ConfigError explains why there are none."""
    if not wanted.tasks:
        rows = map(json.loads, sample_text().splitlines())
        asked = [(ChatMessage(role="user", content=row["question"]), row["answer"]) for row in rows]
        return [Problem(messages=(message,), answer=answer) for message, answer in asked]
    source = find_source(wanted)
    return open_problems(wanted, source, find_columns(wanted, source))


def sample_text() -> str:
    """Return a small file of problems: all sums of two digits up to 4."""
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]
    return "".join(json.dumps(row) + "\n" for row in rows)


def find_source(wanted: FirstFile) -> str:
    """Return the source as the run file has it. Paths become relative to the run file."""
    text = wanted.tasks or SAMPLE
    scheme, colon, place = text.partition(":")
    known = registry.built_in(TasksetSpec)
    if scheme in known:
        is_path = known[scheme].location == "path"
        return f"{scheme}:{relative_to(Path(place), wanted.folder)}" if colon and is_path else text
    if colon:
        return text
    path = wanted.folder / text if not wanted.tasks else Path(text).expanduser()
    ending = READ_AS.get(path.suffix[1:], path.suffix[1:])
    if path.is_dir():
        ending = next(name for name, spec in known.items() if spec.location == "folder or name")
    elif not path.is_file():
        raise ConfigError(
            f"--tasks: {text}: no such file, and no source; expected a file of JSON lines, CSV or Parquet, a "
            f"folder of a data set, or one of {', '.join(known)}{registry.near_file(path)}"
        )
    if ending not in known:
        found = f"a file {path.suffix or 'without an ending'}"
        raise ConfigError(
            f"--tasks: {text}: got {found}, expected .jsonl, .csv or .parquet; say what it is, jsonl:{text}"
        )
    return f"{ending}:{relative_to(path, wanted.folder)}"


def relative_to(path: Path, folder: Path) -> str:
    """Return a path relative to the folder; unchanged if it was given from the root and lies outside of it."""
    is_whole = path.expanduser().is_absolute()
    path, folder = path.expanduser().resolve(), folder.resolve()
    return str(path) if is_whole and not path.is_relative_to(folder) else os.path.relpath(path, folder)


class _AnyColumns(RowReader):
    """Accepts rows with whatever columns."""

    def check_names(self, names: Sequence[str], where: str) -> None:
        """Accept the names."""

    def check(self, row: Mapping[str, Any], where: str, num_bytes: int = 0) -> None:
        """Accept the row."""


def _first_row(wanted: FirstFile, source: str) -> Mapping[str, Any] | None:
    """Return the first row of a file or a data set; None for another source."""
    scheme = source.partition(":")[0]
    spec = registry.built_in(TasksetSpec).get(scheme)
    if spec is None or not spec.has_rows:
        return None
    part = registry.resolve("taskset", scheme, where="--tasks")
    location = _location(wanted, source)
    try:
        with first_rows(1):
            return part.open_rows(part.Config(), location, _AnyColumns()).row(0)  # type: ignore[no-any-return]
    except ConfigError as error:
        way = f"; for a list, {ALONE}" if "found a list" in str(error) else ""
        raise ConfigError(f"--tasks: {error}{way}") from None


def _location(wanted: FirstFile, source: str) -> str:
    """Return the place of a source as seen from anywhere. The folder of the run file need not be there yet."""
    scheme, _, place = source.partition(":")
    spec, path = registry.built_in(TasksetSpec).get(scheme), (wanted.folder / place).resolve()
    if spec is None or spec.location == "name" or not place:
        return place
    return str(path) if spec.location == "path" or path.exists() else place


def _has_prompt(wanted: FirstFile, row: Mapping[str, Any]) -> bool:
    usual = any(name in row for name in USUAL_COLUMNS["prompt"])
    return usual or "prompt" in wanted.columns or "messages" in {*row, *wanted.columns}


def find_columns(wanted: FirstFile, source: str) -> dict[str, str]:
    """Return the columns whose names differ from ours. If none fits, ConfigError names the existing columns."""
    for ours in wanted.columns:
        if ours not in OUR_COLUMNS:
            raise ConfigError(f"--column {ours}: unknown; {registry.suggest(ours, list(OUR_COLUMNS))}; OURS=THEIRS")
    found, row, place = dict(wanted.columns), _first_row(wanted, source), source.partition(":")[2]
    if row is None:
        return found
    for ours, named in wanted.columns.items():
        if named not in row and named.partition(".")[0] not in row:
            raise ConfigError(
                f"--column {ours}={named}: no column {named!r} in {place}; {found_columns(ours, named, list(row))}; "
                f"say which it is, --column {ours}=NAME"
            )
    for ours, names in USUAL_COLUMNS.items():
        if ours in found or ours in row or (ours == "prompt" and "messages" in {*row, *found}):
            continue
        if theirs := next((name for name in names if name in row), None):
            found[ours] = theirs
        elif ours == "prompt":
            raise ConfigError(
                f"--tasks: {place}: found the columns {', '.join(row)}, and none that is called like a prompt; say "
                "which it is, --column prompt=NAME"
            )
    return found


def open_problems(wanted: FirstFile, source: str, columns: Mapping[str, str]) -> list[Problem]:
    """Return the first problems of the source."""
    scheme, colon, _ = source.partition(":")
    section = {"source": f"{scheme}{colon}{_location(wanted, source)}", "columns": dict(columns)}
    values = {"run": {"name": "first", "steps": 1}, "model": {"path": "fake"}, "tasksets": {"first": section}}
    config: RunConfig = loader.from_dict({**values, "base": str(wanted.folder.resolve())})
    taskset = open_taskset("first", config.tasksets["first"], config)
    if not len(taskset):
        raise ConfigError(f"--tasks: {source}: has no problems, expected at least one")
    return [taskset.problem(index) for index in range(min(len(taskset), MOST_LOOKED_AT))]


def as_part_name(named: str) -> str:
    """Return `my_module.py:Class`, as other commands name code, in the form of a run file: `my_module:Class`."""
    place, colon, thing = named.partition(":")
    return f"{'.'.join(Path(place).with_suffix('').parts)}{colon}{thing}" if place.endswith(".py") else named


def reward_of_source(wanted: FirstFile, source: str, problems: Sequence[Problem]) -> str:
    """Return the reward of an environment, save for `tools`, where an answer is what counts; else the source's own
    scorer; for numbers `math`, which finds them in a text; otherwise a reward that compares texts."""
    scheme, name = source.partition(":")[0], as_part_name(wanted.environment)
    if name and name != "tools" and registry.find_spec(EnvironmentSpec, name).gives_reward:
        return "environment"
    if not name and (brought := registry.find_spec(TasksetSpec, scheme).reward):
        return brought
    if scheme in registry.table("reward"):
        return scheme
    are_numbers = all(re.fullmatch(r"-?[\d,]+(\.\d+)?", problem.answer or "") for problem in problems)
    return "math" if are_numbers and wanted.model != MADE else "exact"


def check_given(wanted: FirstFile, source: str, reward: str) -> None:
    """Raise ConfigError if the reward is the environment's, and there is no environment."""
    brings = registry.find_spec(TasksetSpec, source.partition(":")[0]).environment
    if reward == "environment" and not wanted.environment and not brings:
        raise ConfigError(
            "--reward: 'environment' takes the reward that an environment gives, and none is named; name it, "
            "--environment attempts or --environment my_module.py:Class, or leave --reward out"
        )
