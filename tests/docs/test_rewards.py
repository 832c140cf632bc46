"""docs/rewards.md: every reward is in its table, and each example of an answer is judged as the page says."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rftstream.config import loader
from rftstream.config.parts import registry
from rftstream.rewards.anls import AnlsReward
from rftstream.rewards.base import RewardInput
from rftstream.rewards.box_iou import BoxReward
from rftstream.rewards.chart_answer import ChartReward
from rftstream.rewards.judge import JudgeReward
from rftstream.rewards.k12 import SchoolReward
from rftstream.rewards.math import MathReward
from rftstream.rewards.object_count import CountReward
from rftstream.rewards.resolve import build_reward
from tests.docs.reading import ROOT, blocks
from tests.suite.each import each
from tests.unit.reward_inputs import reward_input
from tests.unit.rewards.test_judge_forms import says
from tests.unit.served import Server

PAGE = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")


def rows(name: str) -> list[list[str]]:
    """The cells of the table below `<!-- pairs: name -->`, without marks."""
    table = PAGE.split(f"<!-- pairs: {name} -->\n")[1].split("\n\n")[0].splitlines()[2:]
    cells = [re.split(r"(?<!\\)\|", line.strip().strip("|")) for line in table]
    return [[cell.strip().strip("`").replace(r"\|", "|") for cell in row] for row in cells]


def item(completion: str, answer: str, **info: Any) -> RewardInput:
    return reward_input(completion, answer, info=info)


@each("row", rows("math"), ids=lambda row: row[0])
def test_examples_of_math(row: list[str]) -> None:
    gold, right, wrong = row
    reward: Any = MathReward(MathReward.Config())
    assert reward(item(f"\\boxed{{{right}}}", gold)).reward == 1.0
    assert reward(item(f"\\boxed{{{wrong}}}", gold)).reward == 0.0


@each("row", rows("k12"), ids=lambda row: row[1])
def test_examples_of_k12(row: list[str]) -> None:
    kind, gold, right, wrong = row
    for reward in (SchoolReward(SchoolReward.Config()), SchoolReward(SchoolReward.Config(kind=kind))):
        assert reward(item(right, gold)).reward == 1.0
        assert reward(item(wrong, gold)).reward == 0.0


PICTURES: dict[str, Any] = {
    "box_iou": BoxReward, "object_count": CountReward, "chart_answer": ChartReward, "anls": AnlsReward
}  # fmt: skip


@each(("name", "row"), [(name, row) for name in PICTURES for row in rows(name)])
def test_examples_of_pictures(name: str, row: list[str]) -> None:
    gold, answer, reward = row
    assert PICTURES[name](PICTURES[name].Config())(item(answer, gold)).reward == pytest.approx(float(reward), abs=5e-4)


@pytest.fixture
def server() -> Iterator[Any]:
    opened: Any = Server()  # type: ignore[no-untyped-call]
    yield opened
    opened.close()


JUDGED = {
    "rubric": (['{"correct": 8, "polite": 5}'], (3 * 0.8 + 1.0) / 4, {"correct": 0.8, "polite": 1.0}),
    "comparison": (['{"better": "A"}', '{"better": "B"}'], 1.0, {}),
    "score": (["Friendly. Score: 7"], 0.7, {}),
}
"""Form of judgement -> what the judge says, the reward, and its parts."""


@pytest.mark.parametrize("name", JUDGED)
def test_examples_of_judges(name: str, server: Any, tmp_path: Path) -> None:
    (block,) = (one for one in blocks(ROOT / "docs" / "rewards.md", "toml") if (one.kind, one.name) == ("judge", name))
    settings = tomllib.loads(block.text)["rewards"]["judge"]
    settings |= {"url": server.url, "cache_folder": str(tmp_path)}
    said, reward, parts = JUDGED[name]
    server.answers += [(200, says(text)) for text in said]
    score = JudgeReward(registry.build_config(JudgeReward, settings, where="rewards.judge"))(
        item("Dear Sir", "", baseline="Hey")
    )
    assert (score.reward, dict(score.parts)) == (pytest.approx(reward), parts)
    assert ("spent_money" in score.metrics) == ("price_prompt" in settings)


def _taskset(values: dict[str, Any]) -> dict[str, Any]:
    return next(iter(values.get("tasksets", {}).values()), {})


def built(reward: str, **more: Any) -> Any:
    """Return the reward of the page's run file for it, with all its settings."""
    found = [tomllib.loads(block.text) for block in blocks(ROOT / "docs" / "rewards.md", "toml")]
    (values,) = (
        one for one in found if {"reward": reward}.items() <= _taskset(one).items() and reward in one["rewards"]
    )
    run = {"run": {"name": "page", "steps": 1}, "model": {"path": "fake"}, "rewards": values["rewards"]}
    config = loader.from_dict({**run, "tasksets": {"page": {"source": "arithmetic", "reward": reward}}, **more})
    return build_reward(reward, config)


def test_the_run_file_of_math() -> None:
    reward = built("math")
    assert reward(item(r"It is \boxed{7}.", "6+1=7 #### 7")).reward == 1.0
    assert reward(item("The answer is 7.", "6+1=7 #### 7")).reward == 0.0  # boxed_only


def test_the_run_file_of_boxes() -> None:
    """A row of COCO's kind: corner and size in pixels, labels beside; the answer is in thousandths."""
    gold = '{"bbox": [[20, 10, 40, 60], [100, 50, 60, 50]], "category": ["cat", "dog"]}'
    answer = '[{"bbox_2d": [500, 500, 800, 1000], "label": "Dog"}, {"bbox_2d": [100, 100, 300, 700], "label": "cat"}]'
    reward = built("box_iou")
    assert reward(item(answer, gold, width=200, height=100)).reward == pytest.approx(1.0)
    swapped = answer.replace("Dog", "x").replace("cat", "dog").replace("x", "cat")
    assert reward(item(swapped, gold, width=200, height=100)).reward == 0.0


def test_the_example_of_pairs_prefers_what_the_page_says() -> None:
    """640 pairs to learn from, of which the better answer has more even digits."""
    lines = (ROOT / "examples" / "preferences.jsonl").read_text(encoding="utf-8").splitlines()
    pairs = [json.loads(line) for line in lines]

    def worth(answer: str) -> int:
        return sum(1 if digit in "02468" else -1 for digit in answer)

    assert all(worth(pair["chosen"]) > worth(pair["rejected"]) for pair in pairs)
    held_out = loader.load([ROOT / "examples" / "reward_model.toml"], env={}).experts
    assert held_out is not None
    assert round(len(pairs) * (1 - held_out.held_out)) == 640
