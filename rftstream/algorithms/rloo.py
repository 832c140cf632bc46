"""RLOO: REINFORCE with the mean of the other siblings as the baseline (arXiv 2402.14740), over whole rows.

An answer is one action: its ratio is that of the whole row, clipped as TRL does where a batch takes more than one
optimizer step. With one step the ratio is 1, and the gradient that of REINFORCE: A times the row's log-probability.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rftstream.algorithms.policy_gradient import Clipped
from rftstream.algorithms.settings import ClippedConfig
from rftstream.core.advantages import compute_leave_one_out_advantages


class Rloo(Clipped):
    """PPO's clip on whole rows, with the mean of the other siblings as the baseline."""

    name = "rloo"
    needs_spread = "group"
    normalise = "sequence"
    clip_level = "sequence"

    @dataclass(frozen=True, kw_only=True)
    class Config(ClippedConfig):
        """The settings in `[algorithms.rloo]`."""

    def advantages(self, rewards_N: np.ndarray, groups_N: np.ndarray) -> np.ndarray:
        """Return each rollout's reward above the mean of its siblings."""
        return compute_leave_one_out_advantages(rewards_N, groups_N)
