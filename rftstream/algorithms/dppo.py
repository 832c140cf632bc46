"""DPPO: divergence PPO, by binary total variation (arXiv 2602.04879), as prime-rl has it by default.

What is bounded is how far a token's probability has moved since it was sampled, not its ratio: rare tokens, whose
ratios are mostly noise, stay, and likely ones are stopped before they have moved far.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from rftstream.algorithms.base import MicroBatch
from rftstream.algorithms.policy_gradient import GroupRelative, PolicyGradient
from rftstream.algorithms.settings import GroupRelativeConfig, PolicyGradientConfig

if TYPE_CHECKING:
    from torch import Tensor


class Dppo(GroupRelative, PolicyGradient):
    """A policy gradient that drops tokens whose probability has moved too far since they were sampled."""

    name = "dppo"

    @dataclass(frozen=True, kw_only=True)
    class Config(PolicyGradientConfig, GroupRelativeConfig):
        """The settings in `[algorithms.dppo]`."""

        max_rise: Annotated[float, Meta(gt=0, le=1)] = 0.2
        """Good tokens that have become likelier by more than this, as a probability, are dropped. 0.2: prime-rl."""
        max_fall: Annotated[float, Meta(gt=0, le=1)] = 0.2
        """Bad tokens that have become unlikelier by more than this are dropped. 0.2: prime-rl."""
        square_coef: Annotated[float, Meta(ge=0)] = 1e-3
        """Weight of the squared log-ratio to who sampled, of all tokens. 1e-3: prime-rl."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if config.square_coef:
            self.needs |= {"rows_without_advantage"}

    def token_losses(self, policy_BT: Tensor, old_BT: Tensor, rows: MicroBatch) -> tuple[Tensor, dict[str, Any]]:
        """Return the losses of `core.losses.binary_divergence_losses`, by the probability when sampled."""
        from rftstream.core.losses import binary_divergence_losses

        return binary_divergence_losses(
            policy_BT,
            rows.behavior_logprobs_BT,
            rows.advantages_BT,
            rows.loss_mask_BT,
            max_rise=self.config.max_rise,
            max_fall=self.config.max_fall,
            square_coef=self.config.square_coef,
        )
