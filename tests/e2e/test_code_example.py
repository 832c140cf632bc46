"""examples/code.toml: what it is shown and asked is right, and a model learns to write functions by running them."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from rftstream.config import loader
from rftstream.contracts.versions import EvalResult
from rftstream.rewards.code import CodeReward
from rftstream.sandbox import layers
from tests.e2e.workplace import EXAMPLES, Finished, Workplace, sets
from tests.unit.reward_inputs import reward_input

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
        item = reward_input(said, prompt=asked, info={"tests": tests[asked]}, data_source="")
        assert reward(item).reward == 1.0
    assert held_out
    assert not held_out & set(tests)


def run_example(place: Workplace, num_explored: int, *settings: str) -> tuple[Finished, float, float]:
    """Run the example with so many steps that explore. Return its result and the share of right values of held out
    functions, before and after."""
    for file in EXAMPLES.glob("*function*.jsonl"):
        shutil.copy(file, place.folder)
    text = (EXAMPLES / "code.toml").read_text(encoding="utf-8")
    assert "steps = 170" in text
    place.write("code.toml", text.replace("steps = 170", f"steps = {num_explored}").replace("every = 40", "every = 80"))
    done = place.call("run", "code.toml", "--json", *sets(*settings), timeout_s=600.0)
    assert done.code == 0, done.err
    view = place.view("runs/code")
    view.assert_nothing_lost()
    verdicts = [one.verdict for one in view.verified() if one.verdict is not None]
    assert {verdict.scorer for verdict in verdicts} == {"code"}
    assert any(verdict.reward > 0 for verdict in verdicts)
    shares = [one.metrics["mean"] for one in view.messages("evals") if isinstance(one, EvalResult)]
    place.assert_nobody_left()
    return done, shares[0], shares[-1]


@pytest.mark.sampled(3, "examples")
def test_a_model_that_was_shown_functions_writes_others_and_explores(place: Workplace) -> None:
    small = ("feeder.groups_per_batch=4", "feeder.group_size=4", "feeder.max_staleness=0", "verifier.processes=1",
             "evaluations.held-out.n=2")  # fmt: skip
    done, before, after = run_example(place, 2, *small)
    assert done.result["steps"] == 32
    assert before < 0.02
    assert after > 0.1


@pytest.mark.long
def test_a_model_learns_to_write_functions(place: Workplace) -> None:
    done, before, after = run_example(place, 50)
    assert before < 0.02
    assert after > 0.1
    assert done.result["reward_last"] > 0.4
