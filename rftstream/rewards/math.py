"""Mathematical equality, by math-verify.

math-verify limits its own time with SIGALRM and then says "not equal", which would make a reward of 0 out of what could
not be computed. So its limits are switched off here: the scorer ends a child that takes too long, and says timeout.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from rftstream.errors import MissingChecker, RewardError, importing
from rftstream.rewards.base import RewardInput, Score, needed_answer
from rftstream.rewards.version import config_version


class MathReward:
    """1 if the completion's answer equals the problem's, else 0. Metric `parsed`: an answer was found."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[rewards.math]`."""

        float_rounding: int = 6
        """Decimal places to which floats are compared."""
        strict: bool = True
        """Variables must have the same names, and sets are not tuples."""
        boxed_only: bool = False
        r"""Take the completion's answer from \boxed{} alone."""
        gold_marker: str = "####"
        """Where the problem's answer holds this, what follows its last occurrence is the answer (GSM8K)."""

    def __init__(self, config: Config) -> None:
        with importing("rewards.math", "math-verify", install="math-verify", error_type=MissingChecker):
            import math_verify  # type: ignore[import-untyped]
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the time limits that we switch off
        self._config = config
        self._verify = math_verify.verify
        self._parse = math_verify.parse
        boxed = math_verify.LatexExtractionConfig(boxed_match_priority=0)
        self._targets = [boxed] if config.boxed_only else [boxed, math_verify.ExprExtractionConfig()]
        self._gold_targets = [math_verify.LatexExtractionConfig(), math_verify.ExprExtractionConfig()]
        self.version = config_version("1", config, "math-verify", "sympy", "latex2sympy2_extended")

    def __call__(self, item: RewardInput) -> Score:
        gold_text = needed_answer(item, "math").rpartition(self._config.gold_marker)[2].strip()
        gold = self._read(gold_text, self._gold_targets) or self._read(f"${gold_text}$", self._gold_targets)
        if not gold:
            raise RewardError(
                f"math: the problem's answer {gold_text[:200]!r} is nothing that math-verify reads; "
                "correct it, or use the reward 'exact'"
            )
        if self._config.boxed_only and "\\boxed" not in item.completion:
            return Score(reward=0.0, metrics={"parsed": 0.0})
        found = self._read(item.completion, self._targets)
        equal = bool(found) and self._verify(
            gold,
            found,
            float_rounding=self._config.float_rounding,
            strict=self._config.strict,
            timeout_seconds=None,
        )
        return Score(reward=float(equal), metrics={"parsed": float(bool(found))})

    def check(self, item: RewardInput) -> None:
        """Raise RewardError if the problem has no answer. The answer is not parsed here, since that may take long."""
        needed_answer(item, "math")

    def _read(self, text: str, targets: list[Any]) -> list[Any]:
        return self._parse(text, extraction_config=targets, parsing_timeout=None)  # type: ignore[no-any-return]
