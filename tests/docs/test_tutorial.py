"""The blocks of the tutorial run in order in an empty folder, with few steps; those of Kafka on a real broker."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.broker.conftest import run_id, servers  # noqa: F401  the fixtures of a real broker
from tests.docs.reading import ROOT, Block, blocks
from tests.docs.test_readme import PATIENCE_S, compare, environment, run

PAGE = ROOT / "docs" / "tutorial.md"
BLOCKS = [block for block in blocks(PAGE) if block.kind]
ADDRESS, NAME = "127.0.0.1:9092", "letters-kafka"


def test_what_can_be_run_is_marked() -> None:
    for block in blocks(PAGE, "console"):
        assert block.kind == "run", f"mark it, or let it be no console: {block.commands}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_on_this_machine(tmp_path: Path) -> None:
    follow("local", tmp_path)


@pytest.mark.broker
@pytest.mark.timeout(1800)
def test_on_kafka(tmp_path: Path, servers: str, run_id: Callable[[], str]) -> None:  # noqa: F811
    name = run_id()
    follow("kafka", tmp_path, {ADDRESS: servers, NAME: name})


def follow(name: str, folder: Path, instead: dict[str, str] | None = None) -> None:
    """`instead`: what stands in the page for what is there in the test."""
    for block in BLOCKS:
        text = block.text
        for old, new in (instead or {}).items():
            text = text.replace(old, new)
        block = replace(block, text=text)
        if block.kind == "file":
            (folder / block.name).write_text(block.text, encoding="utf-8")
        elif block.name == f"{name}, interrupted":
            interrupt(block, folder)
        elif block.name == name:
            for command, shown in by_command(block):
                run(command, folder)
                compare(shown, folder)


def by_command(block: Block) -> list[tuple[str, Block]]:
    """Each command with what is shown of it."""
    parts = re.split(r"^(?=\$ )", block.text, flags=re.MULTILINE)[1:]
    return [(part.splitlines()[0].removeprefix("$ "), replace(block, text=part)) for part in parts]


def interrupt(block: Block, folder: Path) -> None:
    """Ctrl-C once steps are trained."""
    (command,) = block.commands
    process = subprocess.Popen(
        ["bash", "-c", f"exec {command} --progress plain"], cwd=folder,
        env={**environment(), "RFTSTREAM__RUN__STEPS": "100000"}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    lines: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if re.match(r"step [1-9]", line):
                process.send_signal(signal.SIGINT)
                break
        rest, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, "".join(lines)
    (folder / "output").write_text("".join(lines) + rest, encoding="utf-8")
    compare(block, folder)
