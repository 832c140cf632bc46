"""Every run file in docs and examples can be loaded; fragments together with what they leave out."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from rftstream.config import loader
from rftstream.config.part_names import check_part_names
from tests.docs.reading import PAGES, ROOT, Block, blocks, shown

BASE: dict[str, dict[str, Any]] = {
    "run": {"name": "base", "steps": 1},
    "model": {"path": "fake"},
    "tasksets": {"base": {"source": "arithmetic"}},
}
BLOCKS = [block for page in PAGES for block in blocks(page, "toml")]
FILES = sorted([*(ROOT / "examples").glob("*.toml"), *(ROOT / "tests" / "docs").rglob("*.toml")])


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{shown(block.page)}-{block.text.split()[0]}")
def test_blocks_load(block: Block) -> None:
    values = tomllib.loads(block.text)
    run = {**BASE["run"], **values.get("run", {})}
    if "stages" in values:  # which say how long it is
        del run["steps"]
    tasksets = {name: BASE["tasksets"]["base"] | one for name, one in values.get("tasksets", BASE["tasksets"]).items()}
    is_whole = {"run", "model", "tasksets"} <= set(values)
    whole = values if is_whole else {**BASE, **values, "run": run, "tasksets": tasksets}
    loaded = loader.from_dict(whole)
    check_part_names(loaded)


@pytest.mark.parametrize("file", FILES, ids=shown)
def test_files_load(file: Path) -> None:
    check_part_names(loader.load([file], env={}))
