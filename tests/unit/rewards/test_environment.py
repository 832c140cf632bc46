"""The reward `environment`: what the environment gave, alone and beside others, inline and in children."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rftstream.rewards.scorer import InlineScorer, ProcessScorer
from tests.configs import small_run
from tests.unit.rewards import scoring
from tests.unit.rewards.test_scorer import item

SEEN = """
def calls(messages):
    return float(sum(len(message.get("tool_calls", ())) for message in messages))

def doubled(environment_reward, environment_parts):
    return 2 * environment_reward + environment_parts.get("polite", 0.0)
"""
BESIDE = [{"name": "environment", "weight": 2.0}, {"name": "exact", "weight": 0.5}]


def replies_of(
    scorer_class: type[Any], base: Path, reward: Any, *given: Mapping[str, Any]
) -> dict[str, tuple[float | None, Mapping[str, float], str | None, str, int]]:
    config = small_run(tasksets={"train": {"source": "arithmetic", "reward": reward}}, base=str(base))
    replies = scoring.replies_of(scorer_class(config), [replace(item("7"), **fields) for fields in given])
    return {
        one.request_id: (
            one.score.reward if one.score else None,
            one.score.parts if one.score else {},
            one.reason,
            one.detail,
            one.tries,
        )
        for one in replies
    }


@pytest.fixture(params=[InlineScorer, ProcessScorer])
def scorer_class(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.slow
def test_it_is_what_the_environment_gave(scorer_class: Any, tmp_path: Path) -> None:
    replies = replies_of(
        scorer_class,
        tmp_path,
        "environment",
        {"environment_reward": 1.5, "environment_parts": {"right": 1.0, "polite": 0.5}},
        {"environment_reward": 0.0},
        {"environment_reward": None, "environment_parts": {"polite": 0.5}},
        {"environment_error": "the reward of turn 2 is nan, expected a finite number"},
        {"environment_reward": None, "truncated": True},
    )
    assert replies["0"][:3] == (1.5, {"right": 1.0, "polite": 0.5}, None)
    assert replies["1"][:3] == (0.0, {"environment": 0.0}, None)
    assert replies["2"][:3] == (None, {}, "no_reward")
    assert "neither environment nor agent gave a reward" in replies["2"][3]
    assert replies["2"][4] == 1, "another try would not change it"
    assert replies["3"][:3] == (None, {}, "error")
    assert "environment: the reward of turn 2 is nan" in replies["3"][3]
    assert replies["4"][2] == "no_reward"
    assert "cut off at its limit of tokens before" in replies["4"][3]


@pytest.mark.slow
def test_it_is_one_part_of_a_list(scorer_class: Any, tmp_path: Path) -> None:
    replies = replies_of(
        scorer_class,
        tmp_path,
        BESIDE,
        {"environment_reward": 1.5, "environment_parts": {"polite": 0.5}},
        {},
        {"environment_reward": 1e308},
    )
    assert replies["0"][:3] == (3.5, {"environment": 1.5, "environment.polite": 0.5, "exact": 1.0}, None)
    assert replies["1"][:3] == (None, {}, "no_reward")
    assert replies["2"][2] == "error"


@pytest.mark.slow
def test_functions_see_calls_and_the_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "seen_rewards.py").write_text(SEEN)
    monkeypatch.syspath_prepend(tmp_path)
    calls = [{"id": "call_0_0", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    fields = {
        "environment_reward": 1.5,
        "environment_parts": {"polite": 0.25},
        "messages": ({"role": "assistant", "content": "", "tool_calls": calls * 2},),
    }
    reward = [{"name": "seen_rewards:calls"}, {"name": "seen_rewards:doubled"}]
    (reply,) = replies_of(ProcessScorer, tmp_path, reward, fields).values()
    assert reply[:2] == (5.25, {"calls": 2.0, "doubled": 3.25})
