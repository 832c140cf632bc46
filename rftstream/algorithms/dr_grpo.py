"""Dr.GRPO: GRPO done right (arXiv 2503.20783): rewards are only centred, and all tokens weigh the same.

Dividing by a group's spread makes easy and hard problems count for more than those between, and the mean over a row
makes long wrong answers cheap. Here neither is done: the losses of tokens are summed over a row and divided by a
constant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np
from msgspec import Meta

from rftstream.algorithms.base import Denominators, MicroBatch
from rftstream.algorithms.policy_gradient import Clipped
from rftstream.algorithms.settings import ClippedConfig
from rftstream.core.advantages import center_on_group_mean

if TYPE_CHECKING:
    from torch import Tensor


class DrGrpo(Clipped):
    """PPO's clip on rewards that are only centred, summed over rows and divided by a constant."""

    name = "dr_grpo"
    needs_spread = "group"
    normalise = "sum"

    @dataclass(frozen=True, kw_only=True)
    class Config(ClippedConfig):
        """The settings in `[algorithms.dr_grpo]`."""

        row_tokens: Annotated[int, Meta(ge=1)] = 256
        """The sum over a row is divided by this instead of its tokens: the largest number that it may have, as in
        `sampling.max_tokens`, whose default this is."""

    def advantages(self, rewards_N: np.ndarray, groups_N: np.ndarray) -> np.ndarray:
        """Return R - mean_g for each rollout."""
        return center_on_group_mean(rewards_N, groups_N)

    def reduce(self, losses_BT: Tensor, rows: MicroBatch, denominators: Denominators) -> Tensor:
        """Return the sum over tokens and rows / (rows row_tokens)."""
        loss: Tensor = super().reduce(losses_BT, rows, denominators) / self.config.row_tokens
        return loss
