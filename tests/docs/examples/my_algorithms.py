"""RAFT (arXiv 2304.06767): the good ones of each group are imitated, the others count for nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rftstream.algorithms.policy_gradient import CorrectedPolicyGradient
from rftstream.algorithms.settings import CorrectedConfig


class Imitate(CorrectedPolicyGradient):
    """l = -A logp, weighted by who sampled, as a mean over all tokens: that is what it inherits."""

    @dataclass(frozen=True, kw_only=True)
    class Config(CorrectedConfig):
        at_least: float = 1.0
        """Rewards that are imitated."""

    def advantages(self, rewards_N: np.ndarray, groups_N: np.ndarray) -> np.ndarray:
        """Return 1 for each good rollout and 0 for the others."""
        return np.where(rewards_N >= self.config.at_least, 1.0, 0.0)
