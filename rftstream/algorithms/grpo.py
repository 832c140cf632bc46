"""GRPO: group-relative policy optimisation (arXiv 2402.03300), with the settings that practice has kept.

Which policy is *old*: the trainer's parameters before the batch. With one optimizer step per batch these are the
parameters themselves, the ratio is 1 and the gradient goes through it; with more (`minibatches`,
`updates_per_batch`) the backend computes proximal logprobs once, before the first step, and passes them in. Who
sampled (an older version, an engine that rounds otherwise) is made up for by TIS, a weight on each token's loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from rftstream.algorithms.base import Denominators, MicroBatch, TrainingRow, training_row
from rftstream.core.advantages import compute_group_advantages, count_groups_without_signal
from rftstream.errors import ConfigError
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
        mask_truncated: bool = False
        """Leaves the tokens of completions that a token limit ended out of the loss (DAPO's overlong filtering); their
        rewards count in their groups all the same."""
        kl_coef: Annotated[float, Meta(ge=0)] = 0.0
        """Weight of the KL divergence from the model that the run began with, version 0; usual where used: 0.001. 0: no
        such model is held."""
        kl_estimator: Literal["k1", "k2", "k3"] = "k3"
        """How the divergence is estimated from the sampled tokens; k1 is for the reward only."""
        kl_in: Literal["loss", "reward"] = "loss"
        """Added to the loss, per token; or taken from each rollout's reward, summed over its tokens."""

    def __init__(self, config: Config) -> None:
        if config.kl_coef and config.kl_in == "loss" and config.kl_estimator == "k1":
            raise ConfigError(
                "algorithms.grpo.kl_estimator: 'k1' in the loss has no gradient on average, expected 'k2' or 'k3'; or "
                'set kl_in = "reward"'
            )
        self.config = config
        kl = {"loss": "reference_logprobs", "reward": "reference_rewards"}[config.kl_in]
        wished = {"entropy": config.entropy_coefficient, kl: config.kl_coef}
        self.needs: frozenset[str] = frozenset(name for name, weight in wished.items() if weight)

    def prepare(
        self, batch: Sequence[Experience], reference_logprobs: Sequence[np.ndarray] | None = None
    ) -> tuple[tuple[TrainingRow, ...], dict[str, float]]:
        """One row per segment; the advantage is the rollout's, for all of its segments."""
        scored = [experience for experience in batch if experience.reward is not None]
        if not scored:
            return (), {"num_groups": 0.0, "num_rollouts": 0.0}
        numbers: dict[str, int] = {}
        groups_N = np.asarray([numbers.setdefault(one.ids.group_id, len(numbers)) for one in scored])
        rewards_N = np.asarray([one.reward for one in scored], dtype=np.float64)
        metrics = {"reward": float(rewards_N.mean()), "reward_std": float(rewards_N.std())}
        if reference_logprobs is not None:
            kl_N, tokens = self._divergences(scored, reference_logprobs)
            rewards_N = rewards_N - self.config.kl_coef * kl_N
            metrics |= {"kl": float(kl_N.sum()) / max(tokens, 1.0), "reward_after_kl": float(rewards_N.mean())}
        advantages_N = compute_group_advantages(rewards_N, groups_N, eps=self.config.advantage_eps)
        rows = tuple(
            training_row(segment, float(advantage), experience.sampling.temperature, int(group))
            for experience, advantage, group in zip(scored, advantages_N, groups_N, strict=True)
            for segment in experience.segments
        )
        if self.config.mask_truncated and not (reference_logprobs is None and "reference_rewards" in self.needs):
            rows, metrics["truncated_masked"] = _leave_out_truncated(rows, scored)
        without_signal = count_groups_without_signal(rewards_N, groups_N)
        return rows, {
            "num_groups": float(len(numbers)),
            "num_rollouts": float(len(scored)),
            **metrics,
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
        from rftstream.core.kl import estimate_kl
        from rftstream.core.masks import weigh

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
        if "reference_logprobs" in self.needs:
            if reference_logprobs_BT is None:
                raise ValueError("grpo: got no reference_logprobs_BT, expected some since kl_coef is set")
            kl_BT = estimate_kl(policy_logprobs_BT, reference_logprobs_BT, mask_BT, estimator=config.kl_estimator)
            loss = loss + config.kl_coef * weigh(kl_BT, mask_BT, config.normalise, **shares)
            metrics["kl"] = kl_BT.detach().sum()
        return loss, metrics

    def summarise(self, means: Mapping[str, float]) -> dict[str, float]:
        from rftstream.core.corrections import effective_sample_size

        metrics = {name: value for name, value in means.items() if name not in ("rho", "rho_square")}
        metrics["ess"] = effective_sample_size(means.get("rho", 0.0), means.get("rho_square", 0.0))
        return metrics

    def _divergences(
        self, scored: Sequence[Experience], reference_logprobs: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, float]:
        """From the reference, summed over the tokens of each rollout, float64 [N]; and how many tokens there are.

        It is the divergence of the policy that sampled: its logprobs are recorded, and the tokens are its own."""
        import torch

        from rftstream.core.kl import estimate_kl

        sums, tokens, found = [], 0.0, iter(reference_logprobs)
        for experience in scored:
            total = 0.0
            for segment in experience.segments:
                row = training_row(segment, 0.0, 1.0, 0)
                behavior, mask = row.behavior_logprobs, row.loss_mask
                one_T = [torch.tensor(array, dtype=torch.float64)[None] for array in (behavior, next(found), mask)]
                total += float(estimate_kl(*one_T, estimator=self.config.kl_estimator).sum())
                tokens += float(mask.sum())
            sums.append(total)
        return np.asarray(sums), tokens


def _leave_out_truncated(
    rows: Sequence[TrainingRow], scored: Sequence[Experience]
) -> tuple[tuple[TrainingRow, ...], float]:
    """Rows of truncated rollouts with an empty loss mask, and how many rollouts that were."""
    truncated = [experience.truncated for experience in scored for _ in experience.segments]
    masked = tuple(
        replace(row, loss_mask=np.zeros_like(row.loss_mask)) if cut else row
        for row, cut in zip(rows, truncated, strict=True)
    )
    return masked, float(sum(experience.truncated for experience in scored))


def _masked_fraction(rows: Sequence[TrainingRow]) -> float:
    num_tokens = sum(len(row.loss_mask) for row in rows)
    return 1.0 - float(sum(row.loss_mask.sum() for row in rows)) / num_tokens if num_tokens else 0.0
