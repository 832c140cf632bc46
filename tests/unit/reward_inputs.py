"""Inputs of rewards, of which a test says what matters to it."""

from __future__ import annotations

from typing import Any

from rftstream.rewards.base import RewardInput


def reward_input(completion: str = "5", answer: str | None = None, **given: Any) -> RewardInput:
    return RewardInput(**{
        "completion": completion, "answer": answer, "prompt": "p", "messages": (), "info": {}, "data_source": "d",
        "num_tokens": 1, "truncated": False, **given,
    })  # fmt: skip
