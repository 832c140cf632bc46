"""Settings that algorithms share: each `Config` inherits those that it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta


@dataclass(frozen=True, kw_only=True)
class PolicyGradientConfig:
    """Settings of every policy gradient."""

    entropy_coefficient: Annotated[float, Meta(ge=0)] = 0.0
    """Weight of the mean entropy, which is subtracted from the loss."""
    mask_truncated: bool = False
    """Whether the tokens of completions cut off by a token limit are left out of the loss (DAPO's overlong filtering).
    Their rewards still count in their groups."""
    overlong_share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Last share of a rollout's `max_tokens`, along which its reward falls by up to `overlong_penalty` (DAPO's
    soft overlong punishment). 0: off."""
    overlong_penalty: Annotated[float, Meta(ge=0)] = 1.0
    """Largest reduction of a rollout's reward, at its token limit. 1: DAPO, whose rewards are -1 and 1."""
    kl_coef: Annotated[float, Meta(ge=0)] = 0.0
    """Weight of the KL divergence from the model that the run began with, version 0; usual value: 0.001. 0: no such
    model is held."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the divergence from the sampled tokens. k1 is for the reward, or for `kl_unbiased`."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Place of the divergence: added to the loss, per token; or subtracted from each rollout's reward, summed over its
    tokens, after the division by the group's spread, if there is one."""
    staleness_decay: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Factor of a token's loss for each version between the one that sampled it and the batch's. With 0.9 a token that
    is two versions old has the weight 0.81. 1: all tokens have the same weight. Versions of imported rollouts are
    ignored."""
    kl_unbiased: bool = False
    """Whether the divergence in the loss is multiplied by the ratio to the policy before the batch, with its gradient
    (DeepSeek-V3.2)."""


@dataclass(frozen=True, kw_only=True)
class CorrectedConfig(PolicyGradientConfig):
    """Settings of algorithms with a ratio to the policy before the batch: the correction for another sampling
    policy."""

    correction: Literal["tis", "icepop", "mis", "clamp", "mask", "none"] = "tis"
    """Weight of a token by rho, its probability under the policy before the batch divided by that under the sampling
    policy: rho with an upper limit (tis), rho inside the bounds and 0 outside (icepop, mis), the decoupled loss with
    rho clamped to its bounds or 0 outside (clamp, mask), or 1 (none)."""
    correction_level: Literal["token", "sequence", "geometric"] = "token"
    """Level of rho: of each token, the product over its row, or the geometric mean of its row."""
    correction_low: Annotated[float, Meta(ge=0)] | None = None
    """Lower bound of rho; unset: 0, with icepop and mis 0.5."""
    correction_high: Annotated[float, Meta(gt=0)] | None = None
    """Upper bound of rho; unset: 2 with tis and mis, 5 with icepop, clamp and mask."""
    proximal: Literal["recomputed", "log-linear"] = "recomputed"
    """Logprobs of the policy before the batch: computed if a batch takes more than one step, or interpolated by
    versions between the sampling policy and the current one, which saves that pass (AReaL)."""
    sequence_mask: Annotated[float, Meta(ge=0)] | None = None
    """Limit for rows with a negative advantage: rows whose tokens have become unlikelier by more than this on average,
    in logprobs, are dropped (off-policy sequence masking, DeepSeek-V3.2); usual value: 1e-4. Unset: off."""
    sequence_mask_from: Literal["behavior", "proximal"] = "behavior"
    """Policy to compare with: the sampling one (TRL), or the one before the batch, which with one optimizer step is the
    current one."""


@dataclass(frozen=True, kw_only=True)
class ClippedConfig(CorrectedConfig):
    """Settings of algorithms with PPO's clip."""

    clip_low: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    """Ratios below 1 - this are clipped. 0.2: PPO, GRPO."""
    clip_high: Annotated[float, Meta(gt=0)] = 0.2
    """Ratios above 1 + this are clipped. 0.2: PPO, GRPO; DAPO uses 0.28."""
    ratio_from: Literal["proximal", "behavior"] = "proximal"
    """Ratio that is clipped: to the policy before the batch, or to the sampling policy (PPO before the decoupled loss).
    The latter needs `correction = "none"`, since that ratio already corrects for the sampling policy."""
    dual_clip: Annotated[float, Meta(gt=1)] | None = None
    """Limit of the loss of negative advantages, as a multiple of their size; usual value: 3."""


@dataclass(frozen=True, kw_only=True)
class GroupRelativeConfig:
    """Settings of algorithms that compare siblings in standard deviations."""

    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divisor of a rollout's reward minus its group's mean: the standard deviation of its group, that of all rewards of
    the batch, or none. Those of steps are always divided by their group's."""
    advantage_eps: Annotated[float, Meta(gt=0)] = 1e-6
    """Value added to the standard deviation of rewards."""


@dataclass(frozen=True, kw_only=True)
class RowTokensConfig:
    """Setting of algorithms that can divide the sum over a row by a constant."""

    row_tokens: Annotated[int, Meta(ge=1)] = 256
    """Constant by which the sum over a row is divided, in place of its number of tokens: the largest number of tokens
    in a row, as in `sampling.max_tokens`, whose default this is."""


@dataclass(frozen=True, kw_only=True)
class GrpoConfig(ClippedConfig, GroupRelativeConfig):
    """Settings of GRPO and DAPO."""

    normalise: Literal["token", "sequence"] = "token"
    """Mean over all tokens of the batch (DAPO; used by most today), or mean over rows of the rows' means (GRPO as
    published)."""


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """Settings of a critic, in `[algorithms.NAME.critic]`: a separate network that estimates the return from the
    beginning of a rollout."""

    model: str | None = None
    """Folder of a reward model, relative to the run file: a Hugging Face model for sequence or token classification
    with one output and the policy's tokenizer. Unset: the policy's own model folder, with a head that gives 0."""
    lr: Annotated[float, Meta(ge=0)] = 1e-5
    """Constant learning rate of the critic's own optimizer, whose other settings are the trainer's. 1e-5: verl. If the
    policy learns faster, the critic should learn faster still."""
    max_grad_norm: Annotated[float, Meta(ge=0)] = 1.0
    """Norm to which the critic's gradients are clipped; 0: no clipping."""
    warmup_batches: Annotated[int, Meta(ge=0)] = 0
    """Number of batches at the beginning of a run in which only the critic learns. Versions continue, with the same
    weights."""
    value_clip: Annotated[float, Meta(ge=0)] = 0.2
    """Range around a value before the batch, in units of rewards. A value gains nothing by moving out of it. 0.2: PPO
    in OpenAI Baselines, TRL. 0: no clipping."""
