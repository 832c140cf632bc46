"""GRPO: group-relative policy optimisation (arXiv 2402.03300), with the settings that practice has kept.

Which policy is *old*: the trainer's parameters before the batch. With one optimizer step per batch these are the
parameters themselves, the ratio is 1 and the gradient goes through it; with more (`minibatches`,
`updates_per_batch`) the backend computes proximal logprobs once, before the first step, and passes them in. Who
sampled (an older version, an engine that rounds otherwise) is made up for by TIS, a weight on each token's loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from rftstream.algorithms.base import Denominators, MicroBatch, TrainingRow, training_row
from rftstream.core.advantages import compute_group_advantages, count_groups_without_signal
from rftstream.messages import Experience

if TYPE_CHECKING:
    import torch


class Grpo:
    @dataclass(frozen=True, kw_only=True)
    class Config:
        clip_low: Annotated[float, Meta(gt=0, lt=1)] = 0.2
        """Ratios below 1 - this are clipped. 0.2: PPO, GRPO."""
        clip_high: Annotated[float, Meta(gt=0)] = 0.2
        """Ratios above 1 + this are clipped. 0.2: PPO, GRPO; DAPO uses 0.28."""
        dual_clip: Annotated[float, Meta(gt=1)] | None = None
        """Bounds the loss of negative advantages at this times their size; usual where used: 3."""
        normalise: Literal["token", "sequence"] = "token"
        """Mean over all tokens of the batch (DAPO; what most use now), or over rows of their means (as published)."""
        advantage_eps: Annotated[float, Meta(gt=0)] = 1e-6
        """Added to the standard deviation of a group's rewards."""
        correction: Literal["tis", "none"] = "tis"
        """Off-policy correction: truncated importance sampling, or none."""
        tis_cap: Annotated[float, Meta(gt=0)] = 2.0
        """Largest weight of a token."""
        entropy_coefficient: Annotated[float, Meta(ge=0)] = 0.0
        """Weight of the mean entropy, which is subtracted from the loss."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.needs: frozenset[str] = frozenset({"entropy"} if config.entropy_coefficient else ())

    def prepare(self, batch: Sequence[Experience]) -> tuple[tuple[TrainingRow, ...], dict[str, float]]:
        """One row per segment; the advantage is the rollout's, for all of its segments."""
        scored = [experience for experience in batch if experience.reward is not None]
        if not scored:
            return (), {"num_groups": 0.0, "num_rollouts": 0.0}
        numbers: dict[str, int] = {}
        groups_N = np.asarray([numbers.setdefault(one.ids.group_id, len(numbers)) for one in scored])
        rewards_N = np.asarray([one.reward for one in scored], dtype=np.float64)
        advantages_N = compute_group_advantages(rewards_N, groups_N, eps=self.config.advantage_eps)
        rows = tuple(
            training_row(segment, float(advantage), experience.sampling.temperature, int(group))
            for experience, advantage, group in zip(scored, advantages_N, groups_N, strict=True)
            for segment in experience.segments
        )
        without_signal = count_groups_without_signal(rewards_N, groups_N)
        return rows, {
            "num_groups": float(len(numbers)),
            "num_rollouts": float(len(scored)),
            "reward": float(rewards_N.mean()),
            "reward_std": float(rewards_N.std()),
            "advantage": float(advantages_N.mean()),
            "advantage_std": float(advantages_N.std()),
            "advantage_max": float(np.abs(advantages_N).max()),
            "groups_without_signal": float(without_signal),
            "groups_without_signal_share": without_signal / len(numbers),
            "masked_fraction": _masked_fraction(rows),
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

        config, mask_BT = self.config, rows.loss_mask_BT
        shares = {"num_tokens": denominators.num_tokens, "num_rows": denominators.num_rows}
        old_BT = policy_logprobs_BT.detach() if proximal_logprobs_BT is None else proximal_logprobs_BT
        metrics = corrections.mismatch_sums(old_BT, rows.behavior_logprobs_BT, mask_BT)
        weights_BT = None
        if config.correction == "tis":
            weights_BT, more = corrections.truncated_importance_weights(
                old_BT, rows.behavior_logprobs_BT, mask_BT, cap=config.tis_cap
            )
            metrics |= more
        loss, more = losses.ppo_clip_loss(
            policy_logprobs_BT, old_BT, rows.advantages_BT, mask_BT, clip_low=config.clip_low,
            clip_high=config.clip_high, dual_clip=config.dual_clip, normalise=config.normalise,
            weights_BT=weights_BT, **shares,
        )  # fmt: skip
        metrics |= more
        if config.entropy_coefficient:
            if entropy_BT is None:
                raise ValueError("grpo: got no entropy_BT, expected one since entropy_coefficient is set")
            bonus = losses.entropy_bonus(entropy_BT, mask_BT, normalise=config.normalise, **shares)
            loss = loss - config.entropy_coefficient * bonus
        return loss, metrics

    def summarise(self, means: Mapping[str, float]) -> dict[str, float]:
        from rftstream.core.corrections import effective_sample_size

        metrics = {name: value for name, value in means.items() if name not in ("rho", "rho_square")}
        metrics["ess"] = effective_sample_size(means.get("rho", 0.0), means.get("rho_square", 0.0))
        return metrics


def _masked_fraction(rows: Sequence[TrainingRow]) -> float:
    num_tokens = sum(len(row.loss_mask) for row in rows)
    return 1.0 - float(sum(row.loss_mask.sum() for row in rows)) / num_tokens if num_tokens else 0.0
