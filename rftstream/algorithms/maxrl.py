"""MaxRL: maximum likelihood by reinforcement (arXiv 2602.02710): a success weighs by how rare it is in its group.

In place of the expected reward it approaches the logarithm of the success rate, so hard problems count for more. For
rewards that are never negative: a share of success.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rftstream.algorithms.policy_gradient import Clipped
from rftstream.algorithms.settings import ClippedConfig
from rftstream.core.advantages import compute_likelihood_advantages
from rftstream.errors import ConfigError


class MaxRl(Clipped):
    """PPO's clip on rewards above the group's mean, divided by that mean."""

    name = "maxrl"
    needs_spread = "group"

    @dataclass(frozen=True, kw_only=True)
    class Config(ClippedConfig):
        """The settings in `[algorithms.maxrl]`."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        odd = [key for key in ("overlong_share", "kl_coef") if getattr(config, key)]
        if odd and not (odd == ["kl_coef"] and config.kl_in == "loss"):
            raise ConfigError(
                f"algorithms.maxrl.{odd[0]}: could make a reward negative, expected 0; maxrl divides by "
                "the mean reward of a group"
            )

    def advantages(self, rewards_N: np.ndarray, groups_N: np.ndarray) -> np.ndarray:
        """Return (R - mean_g) / mean_g for each rollout. ConfigError for a negative reward."""
        if (rewards_N < 0).any():
            raise ConfigError(
                f"trainer.algorithm: maxrl got a reward of {rewards_N.min():g}, expected none below 0; "
                "shift the rewards, or go on with another algorithm"
            )
        return compute_likelihood_advantages(rewards_N, groups_N)
