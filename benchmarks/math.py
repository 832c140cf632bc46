"""The reward `math`: pairs a second beside math-verify alone, on the labelled pairs of the tests that both can end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rftstream.rewards.base import RewardInput
from rftstream.rewards.math import MathReward

PAIRS = Path(__file__).parents[1] / "tests" / "data" / "math_pairs.txt"
LEFT_OUT = ("costly", "series and integrals", "sentences")
"""Categories that math-verify does not end, or that are about finding the answer."""


def run() -> list[dict[str, Any]]:
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    pairs = _pairs()
    reward = MathReward(MathReward.Config(second_share=0.0))
    ours = _rate(pairs, lambda gold, completion: reward(_item(gold, completion)).reward)
    reference = _rate(pairs, _by_math_verify)
    return [
        {
            "name": "math: labelled pairs of the tests",
            "unit": "pairs/s",
            "ours": ours,
            "reference": reference,
            "reference_name": "math-verify alone",
            "ratio": ours / reference,
        }
    ]


def _pairs() -> list[tuple[str, str]]:
    pairs, category = [], ""
    for line in PAIRS.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            category = line[3:]
        elif line.startswith(("= ", "! ")) and category not in LEFT_OUT and " || > " not in line:
            gold, _, answer = line[2:].partition(" || ")
            pairs.append((gold, f"so it is $\\boxed{{{answer}}}$."))
    return pairs


def _item(gold: str, completion: str) -> RewardInput:
    return RewardInput(completion=completion, answer=gold, prompt="", messages=(), info={}, data_source="",
                       num_tokens=1, truncated=False)  # fmt: skip


def _by_math_verify(gold: str, completion: str) -> float:
    import math_verify  # type: ignore[import-untyped]

    read = math_verify.parse(f"${gold}$", parsing_timeout=None), math_verify.parse(completion, parsing_timeout=None)
    return float(math_verify.verify(*read, timeout_seconds=None))


def _rate(pairs: list[tuple[str, str]], score: Callable[[str, str], float]) -> float:
    score(*pairs[0])
    began = time.perf_counter()
    for gold, completion in pairs:
        score(gold, completion)
    return len(pairs) / (time.perf_counter() - began)
