"""A penalty for long completions.

It stands beside a reward for what they say:

    reward = [{ name = "math" }, { name = "length_penalty", soft = 800, hard = 1000, weight = 0.5 }]

Source: DAPO (arXiv 2503.14476), equation 13, soft overlong punishment. That setting exists in the algorithms, too
(`overlong_share`), relative to `max_tokens`; there the recorded reward stays as it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from rftstream.errors import ConfigError
from rftstream.rewards.base import RewardInput
from rftstream.rewards.version import config_version


class LengthPenalty:
    """0 up to `soft` sampled tokens, then falling evenly to -1 at `hard`, and -1 from there on."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[rewards.length_penalty]`."""

        soft: Annotated[int, Meta(ge=0)]
        """Tokens of all turns that cost nothing."""
        hard: Annotated[int, Meta(ge=1)]
        """Tokens from which on the penalty is whole."""

    def __init__(self, config: Config) -> None:
        if not config.soft < config.hard:
            raise ConfigError(
                f"rewards.length_penalty.soft: got {config.soft}, expected less than hard = {config.hard}"
            )
        self._config = config
        self.version = config_version("1", config)

    def __call__(self, item: RewardInput) -> float:
        soft, hard = self._config.soft, self._config.hard
        return -min(max((item.num_tokens - soft) / (hard - soft), 0.0), 1.0)
