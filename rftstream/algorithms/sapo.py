"""SAPO: soft adaptive policy optimisation (arXiv 2511.20347): a smooth gate in place of the clip.

The gradient of a token fades as its ratio leaves 1 and never stops at once; it fades faster for what was bad, where a
step pushes many other tokens up.
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


class Sapo(GroupRelative, CorrectedPolicyGradient):
    """Group-relative advantages with a smooth gate on each token's ratio."""

    name = "sapo"
    normalise = "sequence"

    @dataclass(frozen=True, kw_only=True)
    class Config(CorrectedConfig, GroupRelativeConfig):
        """The settings in `[algorithms.sapo]`."""

        tau_positive: Annotated[float, Meta(gt=0)] = 1.0
        """Speed at which the gate closes for tokens with positive advantages. 1.0: the paper."""
        tau_negative: Annotated[float, Meta(gt=0)] = 1.05
        """Speed at which the gate closes for tokens with negative advantages. 1.05: the paper."""

    def token_losses(self, policy_BT: Tensor, old_BT: Tensor, rows: MicroBatch) -> tuple[Tensor, dict[str, Any]]:
        """Return the losses of `core.losses.soft_gate_losses`."""
        from rftstream.core.losses import soft_gate_losses

        return soft_gate_losses(
            policy_BT,
            old_BT,
            rows.advantages_BT,
            rows.loss_mask_BT,
            tau_positive=self.config.tau_positive,
            tau_negative=self.config.tau_negative,
        )
