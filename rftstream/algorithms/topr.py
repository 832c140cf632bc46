"""TOPR: tapered off-policy REINFORCE (arXiv 2503.14286), for rollouts that another policy sampled long ago.

What was good is imitated with full weight, however unlikely the policy finds it by now; what was bad is avoided only
as far as the policy would still do it. So it learns where a ratio to who sampled would make good rollouts count for
nothing: from rescored or replayed runs, from demonstrations, from far behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from msgspec import Meta

from rftstream.algorithms.base import Denominators, MicroBatch, TrainingRow, training_row
from rftstream.core.advantages import count_groups_without_signal
from rftstream.messages import Experience

if TYPE_CHECKING:
    import torch


class Topr:
    @dataclass(frozen=True, kw_only=True)
    class Config:
        baseline: float = 0.5
        """Rewards at or above it are imitated, those below avoided, each by how far they are from it. 0.5: rewards from
        0 to 1 (the paper's are -1 and 1, with 0). Lower: more weight on what was good."""
        max_weight: Annotated[float, Meta(gt=0)] = 1.0
        """Largest weight of a bad rollout: how much likelier it is to the policy than it was to who sampled it."""

    needs: frozenset[str] = frozenset()

    def __init__(self, config: Config) -> None:
        self.config = config

    def prepare(
        self, batch: Sequence[Experience], reference_logprobs: Sequence[np.ndarray] | None = None
    ) -> tuple[tuple[TrainingRow, ...], dict[str, float]]:
        """One row per segment; the advantage is the rollout's reward above the baseline, for all of its segments."""
        scored = [experience for experience in batch if experience.reward is not None]
        if not scored:
            return (), {"num_groups": 0.0, "num_rollouts": 0.0}
        numbers: dict[str, int] = {}
        groups_N = np.asarray([numbers.setdefault(one.ids.group_id, len(numbers)) for one in scored])
        rewards_N = np.asarray([one.reward for one in scored], dtype=np.float64)
        advantages_N = rewards_N - self.config.baseline
        rows = tuple(
            training_row(segment, float(advantage), experience.sampling.temperature, int(group))
            for experience, advantage, group in zip(scored, advantages_N, groups_N, strict=True)
            for segment in experience.segments
        )
        return rows, {
            "num_groups": float(len(numbers)),
            "num_rollouts": float(len(scored)),
            "reward": float(rewards_N.mean()),
            "reward_std": float(rewards_N.std()),
            "advantage": float(advantages_N.mean()),
            "advantage_std": float(advantages_N.std()),
            "advantage_max": float(np.abs(advantages_N).max()),
            "groups_without_signal": float(count_groups_without_signal(rewards_N, groups_N)),
            "imitated_share": float((advantages_N >= 0).mean()),
        }

    def loss(
        self,
        policy_logprobs_BT: torch.Tensor,
        rows: MicroBatch,
        denominators: Denominators,
        *,
        entropy_BT: torch.Tensor | None = None,
        proximal_logprobs_BT: torch.Tensor | None = None,
        reference_logprobs_BT: torch.Tensor | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        from rftstream.core import corrections, losses

        mask_BT = rows.loss_mask_BT
        old_BT = policy_logprobs_BT.detach() if proximal_logprobs_BT is None else proximal_logprobs_BT
        metrics = corrections.mismatch_sums(old_BT, rows.behavior_logprobs_BT, mask_BT)
        weights_BT, more = corrections.tapered_sequence_weights(
            policy_logprobs_BT, rows.behavior_logprobs_BT, rows.advantages_BT, mask_BT, cap=self.config.max_weight
        )
        loss = losses.policy_gradient_loss(
            policy_logprobs_BT, rows.advantages_BT, mask_BT, num_rows=denominators.num_rows, weights_BT=weights_BT
        )
        return loss, metrics | more

    def summarise(self, means: Mapping[str, float]) -> dict[str, float]:
        from rftstream.core.corrections import effective_sample_size

        metrics = {name: value for name, value in means.items() if name not in ("rho", "rho_square")}
        metrics["ess"] = effective_sample_size(means.get("rho", 0.0), means.get("rho_square", 0.0))
        return metrics
