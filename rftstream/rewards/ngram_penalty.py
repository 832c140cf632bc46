"""A penalty for completions that say the same again and again.

It stands beside a reward for what they say:

    reward = [{ name = "math" }, { name = "ngram_penalty", weight = 0.5 }]

Source: Yeo et al., "Demystifying Long Chain-of-Thought Reasoning in LLMs" (arXiv 2502.03373), its n-gram repetition
penalty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from rftstream.rewards.base import RewardInput
from rftstream.rewards.version import config_version


class NgramPenalty:
    """Minus the share of the completion's token n-grams that were there before: 0 for none, near -1 for a loop."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[rewards.ngram_penalty]`."""

        n: Annotated[int, Meta(ge=1)] = 8
        """Tokens of an n-gram. Fewer: also short phrases count, which honest texts repeat as well."""

    def __init__(self, config: Config) -> None:
        self._n = config.n
        self.version = config_version("1", config)

    def __call__(self, item: RewardInput) -> float:
        ids, n = item.completion_ids, self._n
        total = len(ids) - n + 1
        if total <= 0:
            return 0.0
        return len({tuple(ids[start : start + n]) for start in range(total)}) / total - 1.0
