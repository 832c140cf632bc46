"""examples/code.toml: what it is shown and asked is right, and a model learns to write functions by running them."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from rftstream.config import loader
from rftstream.rewards.base import RewardInput
from rftstream.rewards.code import CodeReward
from rftstream.sandbox import layers
from tests.e2e.workplace import EXAMPLES, Workplace

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(layers.missing_text() is not None, reason="this machine has no sandbox"),
]


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (EXAMPLES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def test_what_is_shown_is_right_and_nothing_held_out_is_shown() -> None:
    _, settings = loader.load([EXAMPLES / "code.toml"], env={}).build_part("reward", "code")
    reward = CodeReward(settings)
    tests = {row["prompt"]: row["tests"] for row in rows("functions")}
    held_out = {row["prompt"] for row in rows("functions_held_out")}
    for row in rows("function_demonstrations"):
        asked, said = (message["content"] for message in row["messages"])
        item = RewardInput(
            completion=said, answer=None, prompt=asked, messages=(), info={"tests": tests[asked]}, data_source="",
            num_tokens=1, truncated=False,
        )  # fmt: skip
        assert reward(item).reward == 1.0
    assert held_out
    assert not held_out & set(tests)


def test_a_model_learns_to_write_functions(place: Workplace) -> None:
    for file in EXAMPLES.glob("*function*.jsonl"):
        shutil.copy(file, place.folder)
    text = (EXAMPLES / "code.toml").read_text(encoding="utf-8").replace("steps = 170", "steps = 50")
    place.write("code.toml", text.replace("every = 40", "every = 80"))
    done = place.call("run", "code.toml", "--json", timeout_s=600.0)
    assert done.code == 0, done.err
    view = place.view("runs/code")
    view.assert_nothing_lost()
    tried = [one for one in view.verified() if one.verdict is not None]
    assert {one.verdict.scorer for one in tried if one.verdict is not None} == {"code"}
    before, after = ([one.metrics["mean"] for one in view.messages("evals")][place] for place in (0, -1))  # type: ignore[union-attr]
    assert before < 0.02
    assert after > 0.1
    assert done.result["reward_last"] > 0.4
    place.assert_nobody_left()
