"""docs/rewards.md: every reward is in its table, and each example of an answer is judged as the page says."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rftstream.rewards import REWARDS
from rftstream.rewards.anls import AnlsReward
from rftstream.rewards.base import RewardInput
from rftstream.rewards.box_iou import BoxReward
from rftstream.rewards.chart_answer import ChartReward
from rftstream.rewards.k12 import SchoolReward
from rftstream.rewards.math import MathReward
from rftstream.rewards.object_count import CountReward
from tests.docs.reading import ROOT

PAGE = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")


def rows(name: str) -> list[list[str]]:
    """The cells of the table below `<!-- pairs: name -->`, without marks."""
    table = PAGE.split(f"<!-- pairs: {name} -->\n")[1].split("\n\n")[0].splitlines()[2:]
    cells = [re.split(r"(?<!\\)\|", line.strip().strip("|")) for line in table]
    return [[cell.strip().strip("`").replace(r"\|", "|") for cell in row] for row in cells]


def item(completion: str, answer: str) -> RewardInput:
    return RewardInput(
        completion=completion, answer=answer, prompt="p", messages=(), info={}, data_source="d", num_tokens=1,
        truncated=False,
    )  # fmt: skip


def test_every_reward_is_in_the_table() -> None:
    for name in REWARDS:
        assert f"| `{name}` |" in PAGE


@pytest.mark.parametrize("row", rows("math"), ids=lambda row: row[0])
def test_examples_of_math(row: list[str]) -> None:
    gold, right, wrong = row
    reward: Any = MathReward(MathReward.Config())
    assert reward(item(f"\\boxed{{{right}}}", gold)).reward == 1.0
    assert reward(item(f"\\boxed{{{wrong}}}", gold)).reward == 0.0


@pytest.mark.parametrize("row", rows("k12"), ids=lambda row: row[1])
def test_examples_of_k12(row: list[str]) -> None:
    kind, gold, right, wrong = row
    for reward in (SchoolReward(SchoolReward.Config()), SchoolReward(SchoolReward.Config(kind=kind))):
        assert reward(item(right, gold)).reward == 1.0
        assert reward(item(wrong, gold)).reward == 0.0


PICTURES: dict[str, Any] = {
    "box_iou": BoxReward, "object_count": CountReward, "chart_answer": ChartReward, "anls": AnlsReward
}  # fmt: skip


@pytest.mark.parametrize(("name", "row"), [(name, row) for name in PICTURES for row in rows(name)])
def test_examples_of_pictures(name: str, row: list[str]) -> None:
    gold, answer, reward = row
    assert PICTURES[name](PICTURES[name].Config())(item(answer, gold)).reward == pytest.approx(float(reward), abs=5e-4)
