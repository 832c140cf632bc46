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
    """CISPO: clipped importance sampling (MiniMax-M1, arXiv 2506.13585): a token's weight is limited, but every token
    has a gradient.

    The rare tokens at which a line of thought turns have large ratios after the first steps of a batch, and PPO's clip
    leaves them out. Here they stay, with a limited weight.

    REINFORCE on group-relative advantages, weighted by a limited ratio without gradient."""

    @dataclass(frozen=True, kw_only=True)
    class Config(CorrectedConfig, GroupRelativeConfig):
        """The settings in `[algorithms.cispo]`."""

        max_ratio: Annotated[float, Meta(gt=0)] = 5.0
        """Largest weight of a token, its ratio to the policy before the batch. 1 + the paper's upper epsilon, which the
        paper does not give; 5: TRL's recommendation, after ScaleRL (2510.13786)."""

    def token_losses(self, policy_BT: Tensor, old_BT: Tensor, rows: MicroBatch) -> tuple[Tensor, dict[str, Any]]:
        """Return the losses of `core.losses`, with the ratio limited to `max_ratio`."""
        from rftstream.core.losses import cispo_losses

        return cispo_losses(policy_BT, old_BT, rows.advantages_BT, rows.loss_mask_BT, max_ratio=self.config.max_ratio)


class Sapo(GroupRelative, CorrectedPolicyGradient):
    """SAPO: soft adaptive policy optimisation (arXiv 2511.20347): a smooth gate in place of the clip.

    The gradient of a token fades as its ratio leaves 1, without a sharp end. It fades faster for bad tokens, since a
    step on these raises many other tokens.

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
    """DPPO: divergence PPO, by binary total variation (arXiv 2602.04879), with prime-rl's defaults.

    The limit applies to the change of a token's probability since it was sampled, not to its ratio. So rare tokens,
    whose ratios are mostly noise, stay, and likely tokens are stopped before they have moved far.

    A policy gradient that drops tokens whose probability has moved too far since they were sampled."""

    @dataclass(frozen=True, kw_only=True)
    class Config(PolicyGradientConfig, GroupRelativeConfig):
        """The settings in `[algorithms.dppo]`."""

        max_rise: Annotated[float, Meta(gt=0, le=1)] = 0.2
        """Largest rise in probability of good tokens. Tokens that rose more are dropped. 0.2: prime-rl."""
        max_fall: Annotated[float, Meta(gt=0, le=1)] = 0.2
        """Largest fall in probability of bad tokens. Tokens that fell more are dropped. 0.2: prime-rl."""
        square_coef: Annotated[float, Meta(ge=0)] = 1e-3
        """Weight of the squared log-ratio to the sampling policy, over all tokens. 1e-3: prime-rl."""

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

    Only the tokens of a batch with the most extreme ratios are left out, until the mean square of the other tokens'
    log-ratios to the sampling policy is small. The kept tokens are weighted by their ratio, without a clip. The choice
    is made once, before the first step of a batch, after computing the logprobs.

    A policy gradient that leaves out the tokens with the most extreme ratios of a batch."""

    @dataclass(frozen=True, kw_only=True)
    class Config(PolicyGradientConfig, GroupRelativeConfig):
        """The settings in `[algorithms.m2po]`."""

        threshold: Annotated[float, Meta(gt=0)] = 0.04
        """Largest mean square of the kept tokens' log-ratios. 0.04: the paper, for all of its models."""

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

    Good rollouts are imitated with full weight, however unlikely they are under the current policy. Bad rollouts are
    avoided only as far as the current policy would still sample them. So it also learns where a ratio to the sampling
    policy would make good rollouts count for nothing: from rescored or replayed runs, from demonstrations, from very
    stale rollouts.

    REINFORCE whose bad rollouts count only as far as the policy would still sample them."""

    needs_spread = "none"
    normalise = "sum"

    @dataclass(frozen=True, kw_only=True)
    class Config(PolicyGradientConfig):
        """The settings in `[algorithms.topr]`."""

        baseline: float = 0.5
        """Baseline of rewards. Rewards at or above it are imitated, lower ones avoided, each in proportion to the
        difference. 0.5: for rewards from 0 to 1 (the paper uses 0 for rewards of -1 and 1). Lower values put more
        weight on good rollouts."""
        max_weight: Annotated[float, Meta(gt=0)] = 1.0
        """Largest weight of a bad rollout. Its weight is its probability under the policy divided by that under the
        sampling policy."""

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
    """AsymRE: asymmetric REINFORCE (arXiv 2506.20520): the baseline is a little below the mean, so that good rollouts
    have more weight.

    Off-policy without a ratio: REINFORCE on another policy's samples converges to a good policy if the baseline is
    below their mean reward, and collapses if it is above.

    REINFORCE whose baseline is the group's mean reward plus `shift`."""

    needs_spread = "none"
    normalise = "sum"

    @dataclass(frozen=True, kw_only=True)
    class Config(PolicyGradientConfig):
        """The settings in `[algorithms.asymre]`."""

        shift: float = -0.1
        """Difference between the baseline and the group's mean reward. If negative, good rollouts have more weight than
        bad ones. -0.1: the paper's value for language models."""

    def advantages(self, rewards_N: np.ndarray, groups_N: np.ndarray) -> np.ndarray:
        """Return R - (mean_g + shift). So a group of equal rewards is imitated a little."""
        return np.asarray(center_on_group_mean(rewards_N, groups_N) - self.config.shift)


class Opmd(PolicyGradient):
    """OPMD: online policy mirror descent, in Trinity-RFT's form (arXiv 2505.17826): without ratio and clip, for any
    sampling policy.

    It starts from the same optimum as Kimi k1.5's squared loss, of which it keeps one gradient step: rewards above the
    group's value are imitated, lower ones avoided, whichever policy sampled them.

    REINFORCE with the group's value as baseline, divided by 1 + tau."""

    needs_spread = "group"

    @dataclass(frozen=True, kw_only=True)
    class Config(PolicyGradientConfig):
        """The settings in `[algorithms.opmd]`."""

        tau: Annotated[float, Meta(gt=0)] = 1.0
        """Strength of the pull to the policy before the step: the loss is divided by 1 + this. 1: Trinity-RFT."""
        baseline: Literal["mean", "soft"] = "mean"
        """Value of a group: its mean reward, or tau (logsumexp(R / tau) - log n), which is closer to its best
        reward."""

    def advantages(self, rewards_N: np.ndarray, groups_N: np.ndarray) -> np.ndarray:
        """Return each rollout's reward minus the value of its group."""
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

    At the optimum of reward minus tau KL, tau log(pi / pi_start) equals the reward minus the value of the problem. The
    loss is the squared distance of a row from that. So nothing needs to be clipped: a row that has moved too far is
    pulled back.

    A squared error between a row's reward above its group's and its log-ratio to the start."""

    needs_spread = "group"
    normalise = "sequence"

    @dataclass(frozen=True, kw_only=True)
    class Config(PolicyGradientConfig):
        """The settings in `[algorithms.kimi]`."""

        tau: Annotated[float, Meta(gt=0)] = 0.1
        """Cost of a row's log-ratio to the start. The paper gives no value. With 0.1 a rollout that is 0.5 better than
        its siblings may become e^5 times likelier."""
        start: Literal["behavior", "proximal"] = "behavior"
        """The policy with which the iteration began: the sampling policy, or the trainer's before the batch. In the
        latter case, with one optimizer step a batch, nothing is pulled back."""

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
