"""docs/vision.md: its data are opened, and what it says is refused is refused."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from rftstream.config.loader import from_dict
from rftstream.data.tasksets.open import open_taskset
from rftstream.data.tasksets.squares import draw_png
from rftstream.models.vision.images import digest_of
from rftstream.policies import POLICIES
from rftstream.preflight.checks.check import check
from rftstream.preflight.checks.check_report import CheckReport
from tests.docs.reading import ROOT, blocks
from tests.unit.seeing_families import FAMILIES

PAGE = ROOT / "docs" / "vision.md"
PICTURE = draw_png([(3, 3, (255, 0, 0))])


MODEL: dict[str, object] = {"make": {"vision": True, "characters": "1", "words": ["color?", "red"]}}


def checked(folder: Path, settings: dict[str, dict[str, object]]) -> CheckReport:
    section = {"source": "jsonl:charts/train.jsonl", "columns": {"prompt": "question", "images": "picture"}}
    values = {"run": {"name": "t", "steps": 1}, "model": MODEL, "tasksets": {"charts": section}, "base": str(folder)}
    return check(from_dict({**values, **settings}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "charts" / "pictures").mkdir(parents=True)
    (tmp_path / "charts" / "pictures" / "17.png").write_bytes(PICTURE)
    row = {"question": "color?", "picture": "pictures/17.png", "answer": "red"}
    (tmp_path / "charts" / "train.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path


def test_the_data_of_the_block_are_opened(folder: Path) -> None:
    (block,) = blocks(PAGE, "toml")
    values = {"run": {"name": "t", "steps": 1}, "model": {"path": "fake"}, "base": str(folder)}
    config = from_dict({**values, **tomllib.loads(block.text)})
    problem = open_taskset("charts", config.tasksets["charts"], config).problem(0)
    assert [media.digest for media in problem.messages[0].media] == [digest_of(PICTURE)]


def test_the_models_and_parts_of_the_page_are_those_of_the_code() -> None:
    text = PAGE.read_text()
    assert all(f"`{kind}`" in text for kind in ("llava", *FAMILIES))
    refused = {name for name, spec in POLICIES.items() if not spec.takes_images}
    line = next(line for line in text.splitlines() if line.startswith("| policy |"))
    assert {name for name in POLICIES if f"`{name}`" in line.partition(";")[2]} == refused


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"explorer": {"policy": "fake"}}, "explorer.policy: 'fake': is given no images, but the model is shown them; "
         "use 'hf', 'vllm' or 'openai'"),
        ({"trainer": {"backend": "fake"}}, "trainer.backend: 'fake': is given no images"),
        ({"trainer": {"algorithm": "ppo"}}, "trainer.algorithm: its critic: is given no images"),
        ({"model": {"make": {"characters": "colr?ed"}}}, "got 1 images, which it is not shown: it reads text alone"),
    ],
    ids=["policy", "backend", "critic", "text"],
)  # fmt: skip
def test_check_refuses_what_cannot_be_shown_images(
    folder: Path, settings: dict[str, dict[str, object]], said: str
) -> None:
    report = checked(folder, settings)
    assert any(said in error for error in report.errors), report.errors


@pytest.mark.parametrize(
    "settings",
    [
        {"trainer": {"backend": "deepspeed"}},
        {"model": {**MODEL, "lora": {}}},
        {"explorer": {"policy": "openai"}, "policies": {"openai": {"url": "http://127.0.0.1:9/v1", "model": "it"}}},
    ],
    ids=["deepspeed", "lora", "openai"],
)
def test_check_accepts_what_can_be_shown_images(folder: Path, settings: dict[str, dict[str, object]]) -> None:
    assert not checked(folder, settings).errors
