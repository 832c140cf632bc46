"""Following a page as its reader does: files are written, commands run in order in one folder, and what a block shows
has to be what comes out, but for numbers and what follows a colon; `...` stands for anything."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from rftstream.commands import cli
from tests.docs.reading import Block, blocks
from tests.e2e.workplace import COMMAND, Finished, Process, RunView, Workplace

STARTS_PROCESSES = ("run", "resume", "worker")
"""Commands that are processes here; all others run in this one, which has everything imported already."""
NO_MODEL = {"RFTSTREAM__EXPLORER__POLICY": "fake", "RFTSTREAM__TRAINER__BACKEND": "fake"}
"""The flow without a model, for pages whose commands are what is tested: tests/e2e does the same with one."""
FEW_STEPS = {"RFTSTREAM__RUN__STEPS": "3", "RFTSTREAM__FEEDER__GROUPS_PER_BATCH": "4"}
MORE_STEPS = 2
"""What `resume --set run.steps=` adds to the steps that a run has."""


def assert_all_are_marked(page: Path) -> None:
    """Hold that no command of a page is left out by whoever follows it."""
    for block in blocks(page, "console"):
        assert block.kind == "run", f"mark it, or let it be no console: {block.commands}"


def by_command(block: Block) -> list[tuple[str, Block]]:
    """Return each command with what is shown of it."""
    parts = re.split(r"^(?=\$ )", block.text, flags=re.MULTILINE)[1:]
    return [(part.splitlines()[0].removeprefix("$ "), replace(block, text=part)) for part in parts]


class Reader:
    """Follows a page. A test makes it with its Workplace, lets it do blocks, and reads `told` and the folder."""

    def __init__(self, place: Workplace, settings: Mapping[str, str] | None = None) -> None:
        self.place = place
        self.settings = settings or {}
        """Variables of all commands, which make them short."""
        self.told: list[tuple[str, str]] = []
        """Each command with what it wrote to stdout."""

    def write_files(self, found: Iterable[Block]) -> None:
        for block in found:
            self.place.write(block.name, block.text)

    def do(self, block: Block) -> None:
        """Run the commands of a block, one after the other, and compare what each shows."""
        for command, shown in by_command(block):
            self.run(command)
            self.compare(shown)

    def run_all(self, found: Iterable[Block]) -> None:
        """Run all commands of these blocks."""
        for block in found:
            for command in block.commands:
                self.run(command)

    def run(self, command: str) -> str:
        """Run a command of a page; it has to end well. Return what it wrote to stdout."""
        words = self._words(command)
        if words[0] in STARTS_PROCESSES:
            done = self.place.call(*words, env=self.settings)
        else:
            done = self._look(words)
        return self.ended_well(command, done)

    def run_as_a_new_user(self, command: str) -> None:
        """As `run`, but in an interpreter of its own, started by the command that pip has put there."""
        done = self.place.call(*self._words(command), command=(COMMAND,), env=self.settings)
        self.ended_well(command, done)

    def together(self, commands: Iterable[str]) -> None:
        """Run each command in a terminal of its own, until all have come to their ends."""
        started = [(one, self.place.start(*self._words(one), env=self.settings)) for one in commands]
        for command, process in started:
            self.ended_well(command, process.finish())

    def start(self, command: str, **more: str) -> Process:
        """Begin a command, with more variables."""
        return self.place.start(*self._words(command), env={**self.settings, **more})

    def compare(self, block: Block) -> None:
        """Hold that each line that the block shows is one of the last command's output."""
        found = [skeleton(line) for line in self.told[-1][1].splitlines()]
        for line in block.text.splitlines():
            if line.startswith("$ ") or line == "...":
                continue
            wanted = skeleton(line)
            start = wanted.removesuffix("...")
            fits = any(one == wanted or (start != wanted and one.startswith(start)) for one in found)
            assert fits, f"not in the output: {line}\n{wanted}\n" + "\n".join(found)

    def _words(self, command: str) -> list[str]:
        program, *words = shlex.split(command)
        assert program == "rftstream", command
        if words[0] != "resume":
            return words
        num_steps = len(self._run(words[1]).steps()) + MORE_STEPS
        return [re.sub(r"^run\.steps=\d+", f"run.steps={num_steps}", word) for word in words]

    def _run(self, name: str) -> RunView:
        """Return the run that a command names by its folder or its run file."""
        path = Path(name)
        return self.place.view(path if path.suffix != ".toml" else path.parent / "runs" / path.stem)

    def _look(self, words: list[str]) -> Finished:
        with chdir(self.place.folder), pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
            for name, value in self.settings.items():
                patch.setenv(name, value)
            done = CliRunner().invoke(cli, words)
        return Finished(done.exit_code, done.stdout, done.stderr)

    def ended_well(self, command: str, done: Finished) -> str:
        """Hold that a command ended with exit code 0, and keep what it wrote to stdout."""
        assert done.code == 0, f"{command}: exit {done.code}\n{done.out}\n{done.err}\n{self.place.report()}"
        self.told.append((command, done.out))
        return done.out


def skeleton(line: str) -> str:
    """Return a line without what differs from run to run."""
    line = re.sub(r"(?<=@)\S+|sums/[\d/]+|\b[0-9a-f]{12}\b", "#", line)
    line = re.sub(r"[-+]?\d[\d.,:-]*\d|\d", "#", line)
    line = re.sub(r"# (s|min|h|[kMG]?B)\b", "#", line)
    return " ".join(line.split()).partition(": ")[0].rstrip(":")
