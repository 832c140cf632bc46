"""The blocks of the first pages that are marked `<!-- run: NAME -->` run in order, in few steps, in a fresh folder."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner

from rftstream.commands import cli
from tests.docs.following import FEW_STEPS, NO_MODEL, Reader, assert_all_are_marked
from tests.docs.reading import ROOT, blocks, shown
from tests.e2e.workplace import Workplace

PAGES = (ROOT / "README.md", ROOT / "docs" / "first-run.md", ROOT / "docs" / "your-task.md")
FIRST_RUN = PAGES[1]
MOST_WORDS = 1_200
BLOCKS = [block for page in PAGES for block in blocks(page) if block.kind]
RUNS = sorted({block.name for block in BLOCKS if block.kind == "run"})


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_what_can_be_run_is_marked(page: Path) -> None:
    assert_all_are_marked(page)


def test_the_readme_is_short() -> None:
    assert len(PAGES[0].read_text(encoding="utf-8").split()) <= MOST_WORDS


def test_the_disk_that_the_page_shows_is_what_check_says() -> None:
    """Numbers are not compared elsewhere, since most of them differ from machine to machine. This one does not."""
    said = CliRunner().invoke(cli, ["check", str(ROOT / "examples" / "arithmetic.toml")]).stdout
    estimate = re.compile(r"^disk: up to ([\d.]+ .B) of", re.MULTILINE)
    told, found = (estimate.search(text) for text in (FIRST_RUN.read_text(encoding="utf-8"), said))
    assert told is not None and found is not None
    assert told[1] == found[1]


@pytest.fixture
def place(place: Workplace) -> Workplace:
    """A fresh checkout, with the files that the pages tell to make."""
    shutil.copytree(ROOT / "examples", place.folder / "examples", ignore=shutil.ignore_patterns("runs"))
    return place


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_commands_run(name: str, place: Workplace) -> None:
    """The first ones with a model, as everybody runs them first, beginning with the command that pip has installed."""
    settings: Mapping[str, str] = FEW_STEPS if name == "first" else {**FEW_STEPS, **NO_MODEL}
    reader = Reader(place, settings)
    reader.write_files(block for block in BLOCKS if block.kind == "file")
    if name == "first":
        reader.run_as_a_new_user("rftstream check examples/arithmetic.toml")
    for block in (block for block in BLOCKS if (block.kind, block.name) == ("run", name)):
        if name.endswith(", together"):
            reader.together(block.commands)
            reader.run("rftstream audit examples/arithmetic.toml")
        else:
            reader.do(block)
