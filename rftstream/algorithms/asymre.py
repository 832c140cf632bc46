"""AsymRE: asymmetric REINFORCE (arXiv 2506.20520): the baseline lies a little below the mean, so that good weighs more.

Off-policy without a ratio: REINFORCE from another's samples comes to an end that is good if the baseline is below their
mean reward, and takes the policy apart if it is above.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rftstream.algorithms.policy_gradient import PolicyGradient
from rftstream.algorithms.settings import PolicyGradientConfig
from rftstream.core.advantages import center_on_group_mean


class AsymRe(PolicyGradient):
    """REINFORCE whose baseline is the group's mean reward plus `shift`."""

    name = "asymre"
    needs_spread = "none"
    normalise = "sum"

    @dataclass(frozen=True, kw_only=True)
    class Config(PolicyGradientConfig):
        """The settings in `[algorithms.asymre]`."""

        shift: float = -0.1
        """The baseline is the mean reward of the group plus this; negative: good weighs more than bad. -0.1: the
        paper's for language models."""

    def advantages(self, rewards_N: np.ndarray, groups_N: np.ndarray) -> np.ndarray:
        """R - (mean_g + shift): a group of equal rewards is imitated, a little."""
        return np.asarray(center_on_group_mean(rewards_N, groups_N) - self.config.shift)
