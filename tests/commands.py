"""Commands called inside the test's own process, and the run file that most of them are tried with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from rftstream.commands import cli

RUN_FILE = """
[run]
name = "demo"
steps = 4
[model]
path = "fake"
[explorer]
policy = "fake"
[trainer]
backend = "fake"
[tasksets.sums]
source = "arithmetic"
"""
PARTITIONS = "[transport]\npartitions = 2\n"


def write_run_file(folder: Path, more: str = PARTITIONS, *, name: str = "demo") -> Path:
    file = folder / "demo.toml"
    file.write_text(RUN_FILE.replace('"demo"', f'"{name}"') + more)
    return file


def call(*arguments: object, answer: str | None = None) -> Result:
    """`answer`: what stdin has for a question."""
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], input=answer)


def called(*arguments: object, code: int = 0) -> Any:
    """The JSON that the command prints."""
    result = call(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)
