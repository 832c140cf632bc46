"""OPMD: online policy mirror descent, Trinity-RFT's form (arXiv 2505.17826): without ratio and clip, for any sampler.

From the same optimum as Kimi k1.5's squared loss, of which it keeps one gradient step: rewards above the value of their
group are imitated, those below avoided, whoever sampled them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from rftstream.algorithms.base import MicroBatch
from rftstream.algorithms.policy_gradient import PolicyGradient
from rftstream.algorithms.settings import PolicyGradientConfig
from rftstream.core.advantages import center_on_group_mean, compute_soft_baseline_advantages

if TYPE_CHECKING:
    from torch import Tensor


class Opmd(PolicyGradient):
    """REINFORCE with the group's value as baseline, divided by 1 + tau."""

    name = "opmd"
    needs_spread = "group"

    @dataclass(frozen=True, kw_only=True)
    class Config(PolicyGradientConfig):
        """The settings in `[algorithms.opmd]`."""

        tau: Annotated[float, Meta(gt=0)] = 1.0
        """Pull to the policy that the step begins with: the loss is divided by 1 + this. 1: Trinity-RFT."""
        baseline: Literal["mean", "soft"] = "mean"
        """Value of a group: its mean reward, or tau (logsumexp(R / tau) - log n), which is nearer to its best."""

    def advantages(self, rewards_N: np.ndarray, groups_N: np.ndarray) -> np.ndarray:
        """Return each rollout's reward above the value of its group."""
        if self.config.baseline == "mean":
            return center_on_group_mean(rewards_N, groups_N)
        return compute_soft_baseline_advantages(rewards_N, groups_N, tau=self.config.tau)

    def token_losses(self, policy_BT: Tensor, old_BT: Tensor, rows: MicroBatch) -> tuple[Tensor, dict[str, Any]]:
        """Return -A logp / (1 + tau) for each token."""
        losses_BT, metrics = super().token_losses(policy_BT, old_BT, rows)
        return losses_BT / (1 + self.config.tau), metrics
