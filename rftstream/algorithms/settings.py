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
    """Leaves the tokens of completions that a token limit ended out of the loss (DAPO's overlong filtering); their
    rewards count in their groups all the same."""
    overlong_share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Takes up to `overlong_penalty` from the reward of a rollout along this last share of its `max_tokens` (DAPO's
    soft overlong punishment). 0: nothing."""
    overlong_penalty: Annotated[float, Meta(ge=0)] = 1.0
    """Reward that a rollout loses if it used up its tokens. 1: DAPO, whose rewards are -1 and 1."""
    kl_coef: Annotated[float, Meta(ge=0)] = 0.0
    """Weight of the KL divergence from the model that the run began with, version 0; usual where used: 0.001. 0: no
    such model is held."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """How the divergence is estimated from the sampled tokens; k1 is for the reward, or for `kl_unbiased`."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Added to the loss, per token; or taken from each rollout's reward, summed over its tokens, after the division by
    the group's spread where there is one."""
    staleness_decay: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Weight of a token's loss for each version between the one that sampled it and the batch's: with 0.9 a token that
    is two versions old counts 0.81. 1: all count alike. Versions of rollouts that were imported from another run say
    nothing here."""
    kl_unbiased: bool = False
    """In the loss: times the ratio to the policy before the batch, with its gradient (DeepSeek-V3.2)."""


@dataclass(frozen=True, kw_only=True)
class CorrectedConfig(PolicyGradientConfig):
    """Settings of algorithms with a ratio to the policy before the batch: the correction for another policy that
    sampled."""

    correction: Literal["tis", "icepop", "mis", "clamp", "mask", "none"] = "tis"
    """Weight of a token by rho, how much likelier it is to the policy before the batch than to who sampled it: rho cut
    off above (tis), rho inside bounds and else 0 (icepop, mis), the decoupled loss with rho clamped to its bounds or 0
    outside (clamp, mask), or 1 (none)."""
    correction_level: Literal["token", "sequence", "geometric"] = "token"
    """rho of each token, the product over its row, or the geometric mean of its row."""
    correction_low: Annotated[float, Meta(ge=0)] | None = None
    """Lower bound of rho; unset: 0, with icepop and mis 0.5."""
    correction_high: Annotated[float, Meta(gt=0)] | None = None
    """Upper bound of rho; unset: 2 with tis and mis, 5 with icepop, clamp and mask."""
    proximal: Literal["recomputed", "log-linear"] = "recomputed"
    """Logprobs of the policy before the batch: computed where a batch takes more than one step, or interpolated by
    versions between who sampled and the policy now, which spares that pass (AReaL)."""
    sequence_mask: Annotated[float, Meta(ge=0)] | None = None
    """Drops rows with a negative advantage whose tokens have become unlikelier by more than this on average, in
    logprobs (off-policy sequence masking, DeepSeek-V3.2); where used, for example 1e-4. Unset: none."""
    sequence_mask_from: Literal["behavior", "proximal"] = "behavior"
    """Since when: since they were sampled (TRL), or since before the batch (with one optimizer step that is now)."""


@dataclass(frozen=True, kw_only=True)
class ClippedConfig(CorrectedConfig):
    """Settings of algorithms with PPO's clip."""

    clip_low: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    """Ratios below 1 - this are clipped. 0.2: PPO, GRPO."""
    clip_high: Annotated[float, Meta(gt=0)] = 0.2
    """Ratios above 1 + this are clipped. 0.2: PPO, GRPO; DAPO uses 0.28."""
    ratio_from: Literal["proximal", "behavior"] = "proximal"
    """Which ratio is clipped: to the policy before the batch; or to who sampled (PPO as it was before the decoupled
    loss), with `correction = "none"`, since that ratio makes up for who sampled already."""
    dual_clip: Annotated[float, Meta(gt=1)] | None = None
    """Bounds the loss of negative advantages at this times their size; usual where used: 3."""


@dataclass(frozen=True, kw_only=True)
class GroupRelativeConfig:
    """Settings of algorithms that compare siblings in standard deviations."""

    advantage_eps: Annotated[float, Meta(gt=0)] = 1e-6
    """Added to the standard deviation of a group's rewards."""


@dataclass(frozen=True, kw_only=True)
class GrpoConfig(ClippedConfig, GroupRelativeConfig):
    """Settings of GRPO and DAPO."""

    normalise: Literal["token", "sequence"] = "token"
    """Mean over all tokens of the batch (DAPO; what most use now), or over rows of their means (GRPO as published)."""


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """Settings of a critic, in `[algorithms.NAME.critic]`: a network of its own that estimates the return from the
    beginning of a rollout."""

    model: str | None = None
    """Folder of a reward model, relative to the run file: a Hugging Face model for sequence or token classification
    with one output and the policy's tokenizer. Unset: the policy's own model folder, with a head that says 0."""
    lr: Annotated[float, Meta(ge=0)] = 1e-5
    """Constant learning rate of the critic's own optimizer, whose other settings are the trainer's. 1e-5: verl. Where
    the policy learns faster, the critic should learn faster still."""
    max_grad_norm: Annotated[float, Meta(ge=0)] = 1.0
    """Norm to which the critic's gradients are clipped; 0: no clipping."""
    warmup_batches: Annotated[int, Meta(ge=0)] = 0
    """Batches at the beginning of a run in which only the critic learns. Versions go on, with the same weights."""
    value_clip: Annotated[float, Meta(ge=0)] = 0.2
    """A value gains nothing by moving further than this from what it was before the batch; it is in units of rewards.
    0.2: PPO in OpenAI Baselines, TRL. 0: no clipping."""
