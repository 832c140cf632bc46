"""Kimi k1.5's policy mirror descent (arXiv 2501.12599, section 2.3.2): a squared error per row, off-policy by design.

At the optimum of reward less tau KL, tau log(pi / pi_start) is the reward above the value of the problem; the loss is
how far a row is from that. So nothing needs to be clipped: what has gone far enough is pulled back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from rftstream.algorithms.base import MicroBatch
from rftstream.algorithms.policy_gradient import PolicyGradient
from rftstream.algorithms.settings import PolicyGradientConfig
from rftstream.core.advantages import center_on_group_mean

if TYPE_CHECKING:
    from torch import Tensor


class Kimi(PolicyGradient):
    """A squared error between a row's reward above its group's and its log-ratio to the start."""

    name = "kimi"
    needs_spread = "group"
    normalise = "sequence"

    @dataclass(frozen=True, kw_only=True)
    class Config(PolicyGradientConfig):
        """The settings in `[algorithms.kimi]`."""

        tau: Annotated[float, Meta(gt=0)] = 0.1
        """Cost of a row's log-ratio to the start. The paper gives none; with 0.1 a rollout that is 0.5 better than its
        siblings may become e^5 times likelier."""
        start: Literal["behavior", "proximal"] = "behavior"
        """The policy that the iteration began with: the one that sampled, or the trainer's before the batch, where with
        one optimizer step a batch nothing is pulled back."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.needs |= {"rows_without_advantage"}

    def advantages(self, rewards_N: np.ndarray, groups_N: np.ndarray) -> np.ndarray:
        """Return R - mean_g for each rollout."""
        return center_on_group_mean(rewards_N, groups_N)

    def token_losses(self, policy_BT: Tensor, old_BT: Tensor, rows: MicroBatch) -> tuple[Tensor, dict[str, Any]]:
        """Return the losses of `core.losses.squared_regression_losses`, from the policy of `start`."""
        from rftstream.core.losses import squared_regression_losses

        start_BT = rows.behavior_logprobs_BT if self.config.start == "behavior" else old_BT
        return squared_regression_losses(
            policy_BT, start_BT, rows.advantages_BT, rows.loss_mask_BT, tau=self.config.tau
        )
