"""Every run file in docs and examples can be loaded; fragments together with what they leave out."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rftstream.config import loader
from rftstream.config.parts.part_names import check_part_names
from rftstream.data.tasksets.open import open_taskset
from rftstream.preflight.checks.advice import find_warnings
from rftstream.preflight.first_file import write
from rftstream.preflight.first_problems import FirstFile
from tests.docs.reading import PAGES, ROOT, Block, blocks, shown
from tests.suite.each import each

BASE: dict[str, dict[str, Any]] = {
    "run": {"name": "base", "steps": 1},
    "model": {"path": "fake"},
    "tasksets": {"base": {"source": "arithmetic"}},
}
BLOCKS = [block for page in PAGES for block in blocks(page, "toml")]
FILES = sorted([*(ROOT / "examples").glob("*.toml"), *(ROOT / "tests" / "docs").rglob("*.toml")])


@each("block", BLOCKS, ids=lambda block: f"{shown(block.page)}-{block.text.split()[0]}")
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


@each("file", FILES, ids=shown)
def test_files_load(file: Path) -> None:
    check_part_names(loader.load([file], env={}))


HELD_OUT = [file for file in FILES if re.search(r"held.?out\b(?! =|_every)", file.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("file", HELD_OUT, ids=shown)
def test_what_is_called_held_out_is_held_out(file: Path) -> None:
    config = loader.load([file], env={})

    def asked(name: str, section: Any) -> set[tuple[str, ...]]:
        taskset = open_taskset(name, section, config)
        return {tuple(one.content for one in taskset.problem(index).messages) for index in range(len(taskset))}

    trained = set[tuple[str, ...]]().union(*(asked(name, one) for name, one in config.tasksets.items()))
    for name, section in config.evaluations.items():
        assert not asked(name, section) & trained, name


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "rloo", "remax"])
def test_what_init_writes_takes_nothing_from_right_answers(tmp_path: Path, algorithm: str) -> None:
    """They are as long as is allowed, where an algorithm takes something for the last tokens by itself."""
    write(FirstFile(folder=tmp_path, algorithm=algorithm))
    config = loader.load([tmp_path / "rftstream.toml"], env={})
    settings = config.build_algorithm("trainer.algorithm")[1]
    assert settings.overlong_share == 0
    assert settings.sequence_mask == (None if algorithm == "remax" else 1e-4)
    assert not [one for one in find_warnings(config, {}, None, None) if "overlong" in one]


@pytest.mark.parametrize(("rows", "held"), [(0, 0), (19, 0), (20, 2), (3000, 100)])
def test_what_init_writes_holds_problems_out_if_there_are_enough(tmp_path: Path, rows: int, held: int) -> None:
    tasks = tmp_path / "mine.jsonl"
    tasks.write_text("".join(f'{{"question": "{n}+0=", "answer": "{n}"}}\n' for n in range(rows)), encoding="utf-8")
    write(FirstFile(folder=tmp_path / "run", tasks=str(tasks) if rows else ""))
    config = loader.load([tmp_path / "run" / "rftstream.toml"], env={})
    sizes = {name: len(open_taskset(name, section, config)) for name, section in config.evaluations.items()}
    assert sizes == ({"held-out": held} if held else {} if rows else {"sums": 25})
    [(name, section)] = config.tasksets.items()
    assert len(open_taskset(name, section, config)) == (rows or 25) - held
    assert config.sampling.max_tokens == {3000: 6}.get(rows, config.sampling.max_tokens), "four digits, the end, room"
