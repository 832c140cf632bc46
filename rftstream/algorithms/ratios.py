"""Policy gradients that use the ratio in another way than PPO's clip, or have no ratio.

Legend: N rollouts of the batch, R rows, B rows of a micro-batch, T padded tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from rftstream.algorithms.base import MicroBatch, TrainingRow
from rftstream.algorithms.policy_gradient import CorrectedPolicyGradient, GroupRelative, PolicyGradient
from rftstream.algorithms.scored import ScoredBatch
from rftstream.algorithms.settings import CorrectedConfig, GroupRelativeConfig, PolicyGradientConfig
from rftstream.core.advantages import center_on_group_mean, compute_soft_baseline_advantages
from rftstream.core.corrections import second_moment_mask

if TYPE_CHECKING:
    from torch import Tensor


class Cispo(GroupRelative, CorrectedPolicyGradient):
    """CISPO: clipped importance sampling (MiniMax-M1, arXiv 2506.13585): a token's weight is cut off, its gradient
    never.

    The rare tokens on which a line of thought turns have large ratios after the first steps of a batch, and PPO's clip
    leaves them out. Here they stay, with a bounded weight.

    REINFORCE on group-relative advantages, weighted by a ratio that is cut off and carries no gradient."""

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


class Sapo(GroupRelative, CorrectedPolicyGradient):
    """SAPO: soft adaptive policy optimisation (arXiv 2511.20347): a smooth gate in place of the clip.

    The gradient of a token fades as its ratio leaves 1 and never stops at once; it fades faster for what was bad, where
    a step pushes many other tokens up.

    Group-relative advantages with a smooth gate on each token's ratio."""

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


class Dppo(GroupRelative, PolicyGradient):
    """DPPO: divergence PPO, by binary total variation (arXiv 2602.04879), as prime-rl has it by default.

    What is bounded is how far a token's probability has moved since it was sampled, not its ratio: rare tokens, whose
    ratios are mostly noise, stay, and likely ones are stopped before they have moved far.

    A policy gradient that drops tokens whose probability has moved too far since they were sampled."""

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
        """Return the losses of `core.losses.binary_divergence_losses`, relative to the probability when sampled."""
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


KEPT = "second_moment_kept"
"""Addition of a row: 1 for each token that is kept."""


class M2po(GroupRelative, PolicyGradient):
    """M2PO: second-moment trust policy optimisation (arXiv 2510.01161): for data that is hundreds of versions old.

    Of a batch only the tokens with the most extreme ratios are left out, until the mean square of the others'
    log-ratios to who sampled is small; what stays is weighted by its ratio, without a clip. Which ones is decided once,
    before the first step of a batch, for which their logprobs are computed.

    A policy gradient that leaves out the tokens with the most extreme ratios of a batch."""

    @dataclass(frozen=True, kw_only=True)
    class Config(PolicyGradientConfig, GroupRelativeConfig):
        """The settings in `[algorithms.m2po]`."""

        threshold: Annotated[float, Meta(gt=0)] = 0.04
        """Largest mean square of the log-ratios of the tokens that stay. 0.04: the paper, for all of its models."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.needs |= {"row_logprobs"}

    def refine(
        self, rows: Sequence[TrainingRow], row_logprobs: Sequence[np.ndarray]
    ) -> tuple[tuple[TrainingRow, ...], dict[str, float]]:
        """Mark the kept tokens with the addition KEPT."""
        trained_R = [row.loss_mask > 0 for row in rows]
        ratios_R = [
            (logprobs.astype(np.float64) - row.behavior_logprobs)[trained]
            for row, logprobs, trained in zip(rows, row_logprobs, trained_R, strict=True)
        ]
        kept_N = second_moment_mask(np.concatenate(ratios_R), self.config.threshold)
        parts_R = np.split(kept_N, np.cumsum([len(one) for one in ratios_R])[:-1])
        refined = []
        for row, trained, part in zip(rows, trained_R, parts_R, strict=True):
            kept_T = np.zeros(len(row.token_ids), dtype=np.float32)
            kept_T[trained] = part
            refined.append(replace(row, additions={**row.additions, KEPT: kept_T}))
        return tuple(refined), {"second_moment_dropped": 1.0 - float(kept_N.mean()) if len(kept_N) else 0.0}

    def token_losses(self, policy_BT: Tensor, old_BT: Tensor, rows: MicroBatch) -> tuple[Tensor, dict[str, Any]]:
        """Return the losses of `core.losses.ratio_losses`, with the ratio to the sampling policy."""
        from rftstream.core.losses import ratio_losses

        return ratio_losses(policy_BT, rows.behavior_logprobs_BT, rows.advantages_BT, rows.loss_mask_BT)

    def weights(self, policy_BT: Tensor, old_BT: Tensor, rows: MicroBatch) -> tuple[Tensor | None, dict[str, Any]]:
        """Return 1 for each kept token, and 0 for the others."""
        return rows.additions[KEPT], {}


class Topr(PolicyGradient):
    """TOPR: tapered off-policy REINFORCE (arXiv 2503.14286), for rollouts that another policy sampled long ago.

    What was good is imitated with full weight, however unlikely the policy finds it by now; what was bad is avoided
    only as far as the policy would still do it. So it learns where a ratio to who sampled would make good rollouts
    count for nothing: from rescored or replayed runs, from demonstrations, from far behind.

    REINFORCE whose bad rollouts count only as far as the policy would still sample them."""

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
        """Return the difference between each rollout's reward and the baseline. Siblings are not compared."""
        return np.asarray(rewards_N - self.config.baseline)

    def describe(self, scored: ScoredBatch, rows: Sequence[TrainingRow], advantages_N: np.ndarray) -> dict[str, float]:
        """Return the share of rollouts that are imitated."""
        return {"imitated_share": float((advantages_N >= 0).mean())}

    def weights(self, policy_BT: Tensor, old_BT: Tensor, rows: MicroBatch) -> tuple[Tensor | None, dict[str, Any]]:
        """Return 1 for good rows, and for bad rows their ratio to the sampling policy, limited to `max_weight`."""
        from rftstream.core.corrections import tapered_sequence_weights

        return tapered_sequence_weights(
            policy_BT, rows.behavior_logprobs_BT, rows.advantages_BT, rows.loss_mask_BT, cap=self.config.max_weight
        )


class AsymRe(PolicyGradient):
    """AsymRE: asymmetric REINFORCE (arXiv 2506.20520): the baseline lies a little below the mean, so that good weighs
    more.

    Off-policy without a ratio: REINFORCE from another's samples comes to an end that is good if the baseline is below
    their mean reward, and takes the policy apart if it is above.

    REINFORCE whose baseline is the group's mean reward plus `shift`."""

    needs_spread = "none"
    normalise = "sum"

    @dataclass(frozen=True, kw_only=True)
    class Config(PolicyGradientConfig):
        """The settings in `[algorithms.asymre]`."""

        shift: float = -0.1
        """The baseline is the mean reward of the group plus this; negative: good weighs more than bad. -0.1: the
        paper's for language models."""

    def advantages(self, rewards_N: np.ndarray, groups_N: np.ndarray) -> np.ndarray:
        """Return R - (mean_g + shift). So a group of equal rewards is imitated a little."""
        return np.asarray(center_on_group_mean(rewards_N, groups_N) - self.config.shift)


class Opmd(PolicyGradient):
    """OPMD: online policy mirror descent, Trinity-RFT's form (arXiv 2505.17826): without ratio and clip, for any
    sampler.

    From the same optimum as Kimi k1.5's squared loss, of which it keeps one gradient step: rewards above the value of
    their group are imitated, those below avoided, whoever sampled them.

    REINFORCE with the group's value as baseline, divided by 1 + tau."""

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


class Kimi(PolicyGradient):
    """Kimi k1.5's policy mirror descent (arXiv 2501.12599, section 2.3.2): a squared error per row, off-policy by
    design.

    At the optimum of reward less tau KL, tau log(pi / pi_start) is the reward above the value of the problem; the loss
    is how far a row is from that. So nothing needs to be clipped: what has gone far enough is pulled back.

    A squared error between a row's reward above its group's and its log-ratio to the start."""

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
