"""The run files of docs/data.md open the data that they were written for."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rftstream.config.loader import from_dict
from rftstream.contracts.tasks import Problem
from rftstream.data.tasksets.open import open_taskset
from tests.docs.reading import ROOT, Block, blocks, read
from tests.suite.each import each

USER = {"role": "user", "content": "1+1?"}
FILES: dict[str, list[dict[str, Any]]] = {
    "gsm8k/train.parquet": [{"question": "1+1?", "answer": "1+1 = <<1+1=2>>2\n#### 2"}],
    "verl/train.parquet": [{
        "data_source": "openai/gsm8k", "prompt": [USER], "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {"split": "train", "index": 0},
    }],
    "chats.jsonl": [{
        "conversation": [USER, {"role": "assistant", "content": "2"}], "meta": {"answer": "2"},
        "functions": '[{"type": "function", "function": {"name": "add"}}]',
    }],
    "openr1/data/train-00000-of-00001.parquet": [
        {"problem": "1+1?", "answer": "2", "level": 1, "generations": ["..."]} for _ in range(101)
    ],
    "plain.jsonl": [{"prompt": "1+1?", "answer": "2"}],
    "openai/gsm8k/README.md": [],
    "openai/gsm8k/main/train.jsonl": [{"question": "1+1?", "answer": "1+1 = <<1+1=2>>2\n#### 2"}],
}  # fmt: skip
CARD = "---\nconfigs:\n- config_name: main\n  data_files: main/*\n---\n"
BLOCKS = blocks(ROOT / "docs" / "data.md", "toml")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name, rows in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        elif rows:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            path.write_text(CARD)
    return folder


@each("block", BLOCKS, ids=lambda block: block.text.splitlines()[1])
def test_the_data_of_a_block_are_opened(block: Block, folder: Path) -> None:
    text = block.text.replace('revision = "main", ', "")  # a folder stands in for the hub
    values = {"model": {"path": "fake"}, "tasksets": {}, **tomllib.loads(text)}
    values |= {"run": {"name": "t", "steps": 1}, "base": str(folder)}
    told = values["tasksets"]
    config = from_dict({**values, "tasksets": told or {"t": {"source": "arithmetic"}}})
    for name, section in {**(config.tasksets if told else {}), **config.evaluations}.items():
        problem = open_taskset(name, section, config).problem(0)
        assert isinstance(problem, Problem)
        assert problem.messages[-1].content == "1+1?"
        assert problem.answer == "2"
        assert set(problem.info) <= {"ability", "reward_model", "extra_info", "level", "conversation", "meta"}
        assert bool(problem.tools) == (name == "chats")


def test_other_columns_come_where_the_pages_say(folder: Path) -> None:
    run = {"run": {"name": "t", "steps": 1}, "model": {"path": "fake"}, "base": str(folder)}
    section = {"source": "hf:openr1", "columns": {"prompt": "problem"}}
    config = from_dict({**run, "tasksets": {"t": section}})
    assert open_taskset("t", config.tasksets["t"], config).problem(0).info["level"] == 1
    page = read(ROOT / "docs" / "data.md")
    assert '`problem.info["level"]`' in page and '`problem["info"]["level"]`' in page
    assert "`info` has the columns of the data under their own names" in read(ROOT / "docs" / "agents.md")
