"""The questions of `rftstream init`. Each answer is checked when it is given."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from rftstream.errors import RftError
from rftstream.preflight.first_file import check_model, held_out_count, usual_reward
from rftstream.preflight.first_problems import (
    FORMATS,
    MADE,
    FirstFile,
    as_part_name,
    missing_prompt,
    read_problems,
    without_answer,
)
from rftstream.preflight.plan import add_import_paths

SERVERS = re.compile(r"[\w.-]+:\d+(,\s*[\w.-]+:\d+)*")


def ask(wanted: FirstFile, given: set[str]) -> FirstFile:
    """Return `wanted` with the answers of a person on the terminal. `given` names the fields that the command line
    has."""

    def answer(name: str, question: str, default: str, check: Callable[[str], Any] = str) -> None:
        nonlocal wanted
        if name not in given:
            changed: dict[str, Any] = {name: _answer(question, default, check)}
            wanted = replace(wanted, **changed)

    def with_answer(look: Callable[[FirstFile], object], name: str) -> Callable[[str], str]:
        """Return a check that looks at the file with this answer in it."""

        def check(text: str) -> str:
            changed: dict[str, Any] = {name: text}
            look(replace(wanted, **changed))
            return text

        return check

    answer("tasks", "problems: a file, or a source like arithmetic (empty: a sample)", "", with_answer(_look, "tasks"))
    wanted = _with_answer_column(_with_prompt_column(wanted))
    model = "model: made (small, on the spot), a folder, or a name on the hub"
    answer("model", model, MADE, with_answer(check_model, "model"))
    if wanted.model != MADE and "device" not in given and (gpus := _gpus()):
        on_gpu = click.confirm(f"train and sample on {gpus}?", default=True, err=True)
        wanted = wanted if on_gpu else replace(wanted, device="cpu")
    environment = "environment of several turns (empty: one turn): attempts, tools, or module:Class of your own"
    answer("environment", environment, "", _known("environment", wanted.folder))
    usual = usual_reward(wanted)
    answer("reward", f"reward (empty: {usual})", "", _known("reward", wanted.folder))
    if wanted.model != MADE and (wanted.reward or usual) in ("math", "exact"):
        forms = "; ".join(f"{name} ({about})" for name, (about, *_) in FORMATS.items())
        answer("answer_format", f"how the model ends its answer: {forms}", next(iter(FORMATS)), _format)
    if count := held_out_count(wanted):
        answer("held_out", f"share of the problems held out for the evaluation (0.1: {count})", "0.1", _share)
    answer("algorithm", "algorithm", "grpo", _known("algorithm", wanted.folder))
    answer("servers", "Kafka, host:port (empty: the log is a file in the run folder)", "", _servers)
    return wanted


def as_command(wanted: FirstFile) -> str:
    """Return the command that gives these answers."""
    words = ["rftstream", "init", str(wanted.folder)]
    for field in fields(wanted):
        value, option = getattr(wanted, field.name), field.name.replace("_", "-").replace("servers", "kafka")
        if field.name == "columns":
            words += [word for pair in value.items() for word in ("--column", "=".join(pair))]
        elif field.name != "folder" and value != field.default:
            words += [f"--{option}", str(value)]
    return shlex.join(words)


def _answer(question: str, default: str, check: Callable[[str], Any]) -> Any:
    """Return the answer to a question on stderr, which is repeated until `check` accepts the answer."""

    def checked(text: str) -> Any:
        try:
            return check(text)
        except RftError as error:
            raise click.UsageError(str(error)) from None

    return click.prompt(question, default=default, show_default=bool(default), value_proc=checked, err=True)


def _look(wanted: FirstFile) -> None:
    if not missing_prompt(wanted):
        read_problems(wanted)


def _with_prompt_column(wanted: FirstFile) -> FirstFile:
    """Ask which column has the prompt, if none of the usual names is there."""
    if not (there := missing_prompt(wanted)):
        return wanted
    question = f"column with the prompt ({', '.join(there)})"
    columns = {**wanted.columns, "prompt": click.prompt(question, value_proc=_one_of(there), err=True)}
    return _with_prompt_column(replace(wanted, columns=columns))


def _with_answer_column(wanted: FirstFile) -> FirstFile:
    """Ask which column has the answer, if none of the usual names is there. Some rewards need none."""
    there = [name for name in without_answer(wanted) if name not in wanted.columns.values()]
    if not there or "answer" in wanted.columns:
        return wanted
    named = _answer(f"column with the answer ({', '.join(there)}; empty: none)", "", _one_of(["", *there]))
    return replace(wanted, columns={**wanted.columns, "answer": named}) if named else wanted


def _one_of(there: Sequence[str]) -> Callable[[str], str]:
    def check(name: str) -> str:
        if name not in there:
            raise click.UsageError(f"found no column {name!r}; there are {', '.join(filter(None, there))}")
        return name

    return check


def _gpus() -> str:
    from rftstream.models.machine import read_machine

    return ", ".join(gpu.name for gpu in read_machine().gpus)


def _known(kind: str, folder: Path) -> Callable[[str], str]:
    def check(name: str) -> str:
        from rftstream.config.parts import registry

        name = as_part_name(name)
        known = registry.table(kind)
        if name and name not in known and ":" not in name:
            raise click.UsageError(f"unknown {name!r}; {registry.suggest(name, known)} (or 'module:Name' of your own)")
        if name and name not in known:
            with _importable(folder):
                registry.resolve(kind, name)
        return name

    return check


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Let the user's modules be found in the current folder and in that of the run file, as a run finds them."""
    before = list(sys.path)
    add_import_paths(folder)
    try:
        yield
    finally:
        sys.path[:] = before


def _format(name: str) -> str:
    if name not in FORMATS:
        raise click.UsageError(f"got {name!r}, expected one of {', '.join(FORMATS)}")
    return name


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 0.5:
        raise click.UsageError(f"got {text!r}, expected a number from 0 to 0.5")
    return share


def _servers(text: str) -> str:
    if text and not SERVERS.fullmatch(text.strip()):
        raise click.UsageError(f"got {text!r}, expected host:port, or several with commas between them")
    return text.strip()
