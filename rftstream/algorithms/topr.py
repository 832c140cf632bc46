"""TOPR: tapered off-policy REINFORCE (arXiv 2503.14286), for rollouts that another policy sampled long ago.

What was good is imitated with full weight, however unlikely the policy finds it by now; what was bad is avoided only
as far as the policy would still do it. So it learns where a ratio to who sampled would make good rollouts count for
nothing: from rescored or replayed runs, from demonstrations, from far behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from msgspec import Meta

from rftstream.algorithms.base import MicroBatch, TrainingRow
from rftstream.algorithms.policy_gradient import PolicyGradient
from rftstream.algorithms.scored import ScoredBatch
from rftstream.algorithms.settings import PolicyGradientConfig

if TYPE_CHECKING:
    from torch import Tensor


class Topr(PolicyGradient):
    """REINFORCE whose bad rollouts count only as far as the policy would still sample them."""

    name = "topr"
    needs_spread = "none"
    normalise = "sum"

    @dataclass(frozen=True, kw_only=True)
    class Config(PolicyGradientConfig):
        """The settings in `[algorithms.topr]`."""

        baseline: float = 0.5
        """Rewards at or above it are imitated, those below avoided, each by how far they are from it. 0.5: rewards from
        0 to 1 (the paper's are -1 and 1, with 0). Lower: more weight on what was good."""
        max_weight: Annotated[float, Meta(gt=0)] = 1.0
        """Largest weight of a bad rollout: how much likelier it is to the policy than it was to who sampled it."""

    def advantages(self, rewards_N: np.ndarray, groups_N: np.ndarray) -> np.ndarray:
        """Return how far each rollout's reward is above the baseline; nothing is compared inside a group."""
        return np.asarray(rewards_N - self.config.baseline)

    def describe(self, scored: ScoredBatch, rows: Sequence[TrainingRow], advantages_N: np.ndarray) -> dict[str, float]:
        """Return the share of rollouts that are imitated."""
        return {"imitated_share": float((advantages_N >= 0).mean())}

    def weights(self, policy_BT: Tensor, old_BT: Tensor, rows: MicroBatch) -> tuple[Tensor | None, dict[str, Any]]:
        """Return 1 for good rows, and for bad ones their ratio to who sampled, cut off at `max_weight`."""
        from rftstream.core.corrections import tapered_sequence_weights

        return tapered_sequence_weights(
            policy_BT, rows.behavior_logprobs_BT, rows.advantages_BT, rows.loss_mask_BT, cap=self.config.max_weight
        )
