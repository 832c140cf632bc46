"""The blocks of the README that are marked `<!-- run: NAME -->` run, in order and with few steps, in a fresh folder.

What a block shows has to be what comes out, but for numbers and what follows a colon; `...` stands for anything.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from rftstream.commands import cli
from tests.docs.reading import ROOT, Block, blocks

README = ROOT / "README.md"
STEPS = 5
MORE_STEPS = 8
PATIENCE_S = 900.0
"""For a command that takes seconds, on a machine that has much else to do."""
LOOK_ON = ("status", "audit", "inspect", "trace", "topics", "delete", "doctor", "plot")
"""Commands that start no process, and need none of their own; `check` has one, as a new user's first command."""
BLOCKS = [block for block in blocks(README) if block.kind]
RUNS = sorted({block.name for block in BLOCKS if block.kind == "run"})


def test_what_can_be_run_is_marked() -> None:
    for block in blocks(README, "console"):
        assert block.kind == "run", f"mark it, or let it be no console: {block.commands}"


def test_the_disk_that_the_readme_shows_is_what_check_says() -> None:
    """Numbers are not compared elsewhere, since most of them differ from machine to machine. This one does not."""
    said = subprocess.run(
        [sys.executable, "-m", "rftstream", "check", "examples/arithmetic.toml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout
    estimate = re.compile(r"^disk: up to ([\d.]+ .B) of", re.MULTILINE)
    shown, found = (estimate.search(text) for text in (README.read_text(encoding="utf-8"), said))
    assert shown is not None and found is not None
    assert shown[1] == found[1]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", RUNS)
def test_commands_run(name: str, tmp_path: Path) -> None:
    place = make_place(tmp_path)
    for block in (block for block in BLOCKS if (block.kind, block.name) == ("run", name)):
        if name.endswith(", together"):
            together(block, place)
        else:
            for command in block.commands:
                run(command, place)
            compare(block, place)


def make_place(folder: Path) -> Path:
    """As a fresh checkout, with the files that the README tells to make."""
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("runs"))
    for block in BLOCKS:
        if block.kind == "file":
            (folder / block.name).parent.mkdir(exist_ok=True)
            (folder / block.name).write_text(block.text, encoding="utf-8")
    return folder


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "RFTSTREAM__RUN__STEPS": str(STEPS)}


def short(command: str) -> str:
    """Only a resume's steps are not those of the environment."""
    return re.sub(r"run\.steps=\d+", f"run.steps={MORE_STEPS}", command)


def run(command: str, place: Path) -> None:
    words = shlex.split(short(command))
    if words[0] == "rftstream" and words[1] in LOOK_ON:
        code, out, err = look(words[1:], place)
    else:
        done = subprocess.run(
            short(command), shell=True, cwd=place, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S
        )
        code, out, err = done.returncode, done.stdout, done.stderr
    assert code == 0, f"{command}: exit {code}\n{out}\n{err}"
    (place / "output").write_text(out, encoding="utf-8")


def look(arguments: list[str], place: Path) -> tuple[int, str, str]:
    """In this process, which has everything imported already."""
    with contextlib.chdir(place):
        done = CliRunner().invoke(cli, arguments, env=environment())
    return done.exit_code, done.stdout, done.stderr


def together(block: Block, place: Path) -> None:
    """Each command in a terminal of its own, and all of them come to their end."""
    running = [
        subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=place, env=environment(), stdout=subprocess.DEVNULL)
        for command in block.commands
    ]
    try:
        assert [process.wait(timeout=PATIENCE_S) for process in running] == [0] * len(running)
    finally:
        for process in running:
            process.kill()
    run("rftstream audit examples/arithmetic.toml", place)


def compare(block: Block, place: Path) -> None:
    """Each line that the block shows is one of the last command's output."""
    found = [skeleton(line) for line in (place / "output").read_text(encoding="utf-8").splitlines()]
    for line in block.text.splitlines():
        if line.startswith("$ ") or line == "...":
            continue
        wanted = skeleton(line)
        start = wanted.removesuffix("...")
        fits = any(one == wanted or (start != wanted and one.startswith(start)) for one in found)
        assert fits, f"not in the output: {line}\n{wanted}\n" + "\n".join(found)


def skeleton(line: str) -> str:
    """Without what differs from run to run."""
    line = re.sub(r"(?<=@)\S+|sums/[\d/]+|\b[0-9a-f]{12}\b", "#", line)
    line = re.sub(r"[-+]?\d[\d.,:-]*\d|\d", "#", line)
    line = re.sub(r"# (s|min|h|[kMG]?B)\b", "#", line)
    return " ".join(line.split()).partition(": ")[0].rstrip(":")
