"""CISPO: clipped importance sampling (MiniMax-M1, arXiv 2506.13585): a token's weight is cut off, its gradient never.

The rare tokens on which a line of thought turns have large ratios after the first steps of a batch, and PPO's clip
leaves them out. Here they stay, with a bounded weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from rftstream.algorithms.base import MicroBatch
from rftstream.algorithms.policy_gradient import CorrectedPolicyGradient, GroupRelative
from rftstream.algorithms.settings import CorrectedConfig, GroupRelativeConfig

if TYPE_CHECKING:
    from torch import Tensor


class Cispo(GroupRelative, CorrectedPolicyGradient):
    """REINFORCE on group-relative advantages, weighted by a ratio that is cut off and carries no gradient."""

    name = "cispo"

    @dataclass(frozen=True, kw_only=True)
    class Config(CorrectedConfig, GroupRelativeConfig):
        """The settings in `[algorithms.cispo]`."""

        max_ratio: Annotated[float, Meta(gt=0)] = 5.0
        """Largest weight of a token: its ratio to the policy before the batch, cut off here. 1 + the paper's upper
        epsilon, which it does not state; 5: TRL's recommendation, after ScaleRL (2510.13786)."""

    def token_losses(self, policy_BT: Tensor, old_BT: Tensor, rows: MicroBatch) -> tuple[Tensor, dict[str, Any]]:
        """Return the losses of `core.losses` with the ratio cut off at `max_ratio`."""
        from rftstream.core.losses import cispo_losses

        return cispo_losses(policy_BT, old_BT, rows.advantages_BT, rows.loss_mask_BT, max_ratio=self.config.max_ratio)
