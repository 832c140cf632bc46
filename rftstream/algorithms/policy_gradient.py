"""The common part of policy gradients: rows with advantages from rewards, and the reduction of token losses to one
number.

An algorithm inherits from `PolicyGradient`, or from `CorrectedPolicyGradient` if it has a ratio to the policy before
the batch (`Clipped` for PPO's). It defines `advantages` and `token_losses`. Everything else is the same for all
algorithms and is done here: penalties and divergence in the reward, weights, divergence and entropy in the loss, means,
metrics.

    loss = reduce(v w d l + kl_coef k - entropy_coefficient H)

with d = staleness_decay ** (versions since the token was sampled), and v the weight of the experience: 1, except for
reused groups, whose weight the operator `replay` sets.

Legend: N rollouts of the batch, B rows of a micro-batch, T padded tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from rftstream.algorithms import ALGORITHMS
from rftstream.algorithms.base import Denominators, MicroBatch, Spread, TrainingRow
from rftstream.algorithms.scored import NOTHING, ScoredBatch, collect_scored, of_trained_tokens
from rftstream.algorithms.settings import ClippedConfig, CorrectedConfig, PolicyGradientConfig
from rftstream.contracts.batches import Experience
from rftstream.contracts.rollouts import Segment
from rftstream.core.advantages import center_on_group_mean, compute_group_advantages, scale_by_batch
from rftstream.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from rftstream.core.ratios import Level

CORRECTIONS = {
    "tis": ("clamp", 0.0, 2.0),
    "icepop": ("drop", 0.5, 5.0),
    "mis": ("drop", 0.5, 2.0),
    "clamp": ("clamp", 0.0, 5.0),
    "mask": ("drop", 0.0, 5.0),
}
"""Name -> treatment of ratios outside of the bounds, and the bounds. TIS: fengyao.notion.site/off-policy-rl; IcePop:
ringtech.notion.site/icepop; MIS: rejection in verl and TRL; clamp and mask: the decoupled loss as in AReaL."""
PROXIMAL_SHARE = "proximal_share"
"""Addition of a row: for each token the position of the proximal policy between the sampling policy (0) and the current
one (1)."""
AGE_WEIGHT = "age_weight"
"""Addition of a row: weight of each token by its age."""
DISCOUNT = "discount"
"""Addition of a row: 1 minus the weight of its experience. Present if some weight in the batch is not 1. A row without
it, such as one of another algorithm, has full weight."""


class BatchAdvantages(NamedTuple):
    """A batch from which an algorithm computes the advantages of tokens."""

    scored: ScoredBatch
    rows: Sequence[TrainingRow]
    advantages_N: np.ndarray
    """Advantage of each rollout. The divergence is already subtracted unless `takes_kl_by_token`."""
    rewards_N: np.ndarray
    """Reward of each rollout, without the divergence."""
    kl_R: Sequence[np.ndarray] | None
    """Divergence at each token of a row; None if it is not subtracted from the reward."""


class PolicyGradient:
    """REINFORCE, unless a subclass overrides it: A = R, l = -A logp."""

    Config: ClassVar[Any] = PolicyGradientConfig
    name: ClassVar[str]
    """The algorithm's name in errors, as `algorithms.NAME`: its name in the table, else `module:Class`."""
    normalise: str = "token"
    """How `core.masks.reduce_loss` reduces the losses of tokens to one number."""
    needs_spread: Spread = "batch"
    takes_kl_by_token: ClassVar[bool] = False
    """Whether `token_advantages` itself subtracts the divergence from the reward."""

    def __init_subclass__(cls) -> None:
        where = f"{cls.__module__}:{cls.__qualname__}"
        cls.name = next((name for name, record in ALGORITHMS.items() if record.path == where), where)

    def __init__(self, config: Any) -> None:
        self.config = config
        _check_kl(config, self.name)
        kl = {"loss": "reference_logprobs", "reward": "reference_rewards"}[config.kl_in]
        wished = {"entropy": config.entropy_coefficient, kl: config.kl_coef}
        self.needs: frozenset[str] = frozenset(name for name, weight in wished.items() if weight)
        self.added: frozenset[str] = frozenset({AGE_WEIGHT} if config.staleness_decay < 1 else ())
        """Additions that `loss` expects of every row."""

    # ----------------------------------------------------------------------------- what an algorithm says

    def advantages(self, rewards_N: np.ndarray, groups_N: np.ndarray) -> np.ndarray:
        """Return the advantage of each rollout, float64 [N]."""
        return rewards_N

    def rollout_advantages(self, scored: ScoredBatch, rewards_N: np.ndarray) -> np.ndarray:
        """Return the same for algorithms that need more of a rollout than its group."""
        return self.advantages(rewards_N, scored.groups_N)

    def penalised_advantages(self, scored: ScoredBatch, rewards_N: np.ndarray, penalties_N: np.ndarray) -> np.ndarray:
        """Return the same for rewards from which the divergence, `penalties_N` of each rollout, is subtracted."""
        return self.rollout_advantages(scored, rewards_N - penalties_N)

    def rows(self, scored: ScoredBatch) -> tuple[TrainingRow, ...]:
        """Return a row for each segment, without advantages. The loss mask is empty if there is nothing to train on."""
        return scored.rows()

    def token_losses(self, policy_BT: Tensor, old_BT: Tensor, rows: MicroBatch) -> tuple[Tensor, dict[str, Any]]:
        """Return losses [B, T] before weights, 0 at masked positions; and metrics as sums over unmasked tokens."""
        from rftstream.core.losses import policy_gradient_losses

        return policy_gradient_losses(policy_BT, rows.advantages_BT, rows.loss_mask_BT), {}

    def weights(self, policy_BT: Tensor, old_BT: Tensor, rows: MicroBatch) -> tuple[Tensor | None, dict[str, Any]]:
        """Return the factors of these losses [B, T], as constants; None for 1."""
        return None, {}

    def reduce(self, losses_BT: Tensor, rows: MicroBatch, denominators: Denominators) -> Tensor:
        """Return the micro-batch's share of the loss."""
        from rftstream.core.masks import reduce_loss

        return reduce_loss(
            losses_BT,
            rows.loss_mask_BT,
            self.normalise,
            num_tokens=denominators.num_tokens,
            num_rows=denominators.num_rows,
        )

    def token_advantages(self, batch: BatchAdvantages) -> list[np.ndarray]:
        """Return the advantages of each row's tokens, [T]."""
        return [
            np.full(len(row.token_ids), batch.advantages_N[owner], dtype=np.float32)
            for row, owner in zip(batch.rows, batch.scored.owners_R, strict=True)
        ]

    def additions(self, experience: Experience, segment: Segment) -> dict[str, np.ndarray]:
        """Return further arrays [T] of a row for `loss`, at least those in `added`."""
        if AGE_WEIGHT not in self.added:
            return {}
        ages_T = _ages(segment, experience.batch_sequence)
        return {AGE_WEIGHT: (self.config.staleness_decay**ages_T).astype(np.float32)}

    def describe(self, scored: ScoredBatch, rows: Sequence[TrainingRow], advantages_N: np.ndarray) -> dict[str, float]:
        """Return more metrics of a batch. Its rows have their advantages already."""
        return {}

    # ----------------------------------------------------------------------------- what follows from it

    def prepare(
        self, batch: Sequence[Experience], reference_logprobs: Sequence[np.ndarray] | None = None
    ) -> tuple[tuple[TrainingRow, ...], dict[str, float]]:
        """Return one row per segment. All segments of a rollout have the rollout's advantage."""
        config, scored = self.config, collect_scored(batch)
        if scored is None:
            return (), dict(NOTHING)
        rewards_N, metrics = scored.rewards_N, dict[str, float]()
        if config.overlong_share:
            penalties_N = config.overlong_penalty * scored.overlong_penalties(config.overlong_share)
            rewards_N, metrics["overlong_penalty"] = rewards_N + penalties_N, float(penalties_N.mean())
        rows, kl_R, penalties_N = self.rows(scored), None, np.zeros_like(rewards_N)
        if reference_logprobs is not None:
            kl_R = self._divergences(rows, reference_logprobs)
            kl_N, tokens = scored.sum_by_rollout(kl_R), float(sum(row.loss_mask.sum() for row in rows))
            after = float((rewards_N - config.kl_coef * kl_N).mean())
            metrics |= {"kl": float(kl_N.sum()) / max(tokens, 1.0), "reward_after_kl": after}
            penalties_N = np.zeros_like(kl_N) if self.takes_kl_by_token else config.kl_coef * kl_N
        # the reference is also needed for truncated rollouts, whose divergence counts in their groups
        if config.mask_truncated and (kl_R is not None or "reference_rewards" not in self.needs):
            rows, metrics["truncated_masked"] = scored.leave_out_truncated(rows)
        advantages_N = self.penalised_advantages(scored, rewards_N, penalties_N)
        advantages_R = self.token_advantages(BatchAdvantages(scored, rows, advantages_N, rewards_N, kl_R))
        additions_R = [
            self.additions(experience, segment) for experience in scored.experiences for segment in experience.segments
        ]
        additions_R = _with_discounts(scored, additions_R)
        rows = tuple(
            replace(row, advantages=advantages_T.astype(np.float32, copy=False), additions=additions)
            for row, advantages_T, additions in zip(rows, advantages_R, additions_R, strict=True)
        )
        metrics |= self.describe(scored, rows, advantages_N)
        return rows, scored.metrics(rewards_N, self._trained_advantages(rows, advantages_N), rows) | metrics

    def loss(
        self, policy_logprobs_BT: Tensor, rows: MicroBatch, denominators: Denominators
    ) -> tuple[Any, dict[str, Any]]:
        """Return the micro-batch's share of the loss in the module's formula, and its metrics as sums over tokens."""
        from rftstream.core.corrections import mismatch_sums
        from rftstream.core.kl import count_clamped_kl, estimate_kl
        from rftstream.core.masks import apply_mask

        config, mask_BT = self.config, rows.loss_mask_BT
        old_BT = self.old_logprobs(policy_logprobs_BT, rows)
        metrics = mismatch_sums(old_BT, rows.behavior_logprobs_BT, mask_BT)
        losses_BT, more = self.token_losses(policy_logprobs_BT, old_BT, rows)
        weights_BT, of_weights = self.weights(policy_logprobs_BT, old_BT, rows)
        metrics |= more | of_weights
        if weights_BT is not None:
            losses_BT = losses_BT * apply_mask(weights_BT.detach(), mask_BT)
        if AGE_WEIGHT in self.added:
            age_weights_BT = apply_mask(rows.additions[AGE_WEIGHT], mask_BT)
            losses_BT, metrics[AGE_WEIGHT] = losses_BT * age_weights_BT, age_weights_BT.sum()
        if DISCOUNT in rows.additions:
            losses_BT = losses_BT * (1 - apply_mask(rows.additions[DISCOUNT], mask_BT))
        parts = {"policy_loss": losses_BT.detach().sum()}
        if config.entropy_coefficient:
            if rows.entropy_BT is None:
                raise ValueError(f"{self.name}: got no entropy_BT, expected one since entropy_coefficient is set")
            bonus_BT = config.entropy_coefficient * apply_mask(rows.entropy_BT, mask_BT)
            losses_BT = losses_BT - bonus_BT
            parts["entropy_loss"] = -bonus_BT.detach().sum()
        if "reference_logprobs" in self.needs:
            if rows.reference_logprobs_BT is None:
                raise ValueError(f"{self.name}: got no reference_logprobs_BT, expected some since kl_coef is set")
            between = (policy_logprobs_BT, rows.reference_logprobs_BT, mask_BT)
            how: dict[str, Any] = {
                "estimator": config.kl_estimator,
                "old_logprobs_BT": old_BT if config.kl_unbiased else None,
            }
            kl_BT = estimate_kl(*between, **how)
            losses_BT = losses_BT + config.kl_coef * kl_BT
            metrics["kl"], metrics["kl_clamped"] = kl_BT.detach().sum(), count_clamped_kl(*between, **how)
            parts["kl_loss"] = config.kl_coef * metrics["kl"]
        return self.reduce(losses_BT, rows, denominators), metrics | parts

    def _trained_advantages(self, rows: Sequence[TrainingRow], advantages_N: np.ndarray) -> np.ndarray:
        """Return the advantages that metrics describe: those of trained tokens if tokens have their own, otherwise
        those of rollouts."""
        return of_trained_tokens(rows) if self.has_token_advantages else advantages_N

    @property
    def has_token_advantages(self) -> bool:
        """Whether tokens of one rollout may have different advantages."""
        return type(self).token_advantages is not PolicyGradient.token_advantages

    def old_logprobs(self, policy_BT: Tensor, rows: MicroBatch) -> Tensor:
        """Return the logprobs of the policy before the batch, without gradient [B, T]."""
        proximal_BT: Tensor | None = rows.proximal_logprobs_BT
        return policy_BT.detach() if proximal_BT is None else proximal_BT

    def summarise(self, means: Mapping[str, float]) -> dict[str, float]:
        """Compute the effective sample size, `ess`, from the means of rho and its square."""
        from rftstream.core.corrections import effective_sample_size

        metrics = {name: value for name, value in means.items() if name not in ("rho", "rho_square")}
        metrics["ess"] = effective_sample_size(means.get("rho", 0.0), means.get("rho_square", 0.0))
        return metrics

    def _divergences(self, rows: Sequence[TrainingRow], reference_logprobs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the divergence from the reference at each token, float64 [T] per row.

        It is the divergence of the sampling policy, whose logprobs are recorded and whose tokens these are."""
        import torch

        from rftstream.core.kl import estimate_kl

        def flat(arrays: Sequence[np.ndarray]) -> Tensor:
            return torch.from_numpy(np.concatenate(arrays).astype(np.float64))[None]

        kl_1T = estimate_kl(
            flat([row.behavior_logprobs for row in rows]),
            flat(reference_logprobs),
            flat([row.loss_mask for row in rows]),
            estimator=self.config.kl_estimator,
        )
        ends = np.cumsum([len(row.token_ids) for row in rows])[:-1]
        return np.split(kl_1T[0].numpy(), ends)


def _with_discounts(scored: ScoredBatch, additions_R: list[dict[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
    """Return the additions of the rows with their discounts, if any experience has a weight other than 1."""
    if all(experience.weight == 1 for experience in scored.experiences):
        return additions_R
    return [
        {**additions, DISCOUNT: np.full(segment.token_ids.shape[0], 1 - scored.experiences[owner].weight, np.float32)}
        for additions, segment, owner in zip(additions_R, scored.segments, scored.owners_R, strict=True)
    ]


class CorrectedPolicyGradient(PolicyGradient):
    """A policy gradient with a ratio to the policy before the batch, so that a weight can correct for the sampling
    policy."""

    Config: ClassVar[Any] = CorrectedConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._bounds = _bounds(config, self.name)
        self._interpolates = config.proximal == "log-linear"
        if self._interpolates:
            self.needs |= {"no_proximal_logprobs"}
            self.added |= {PROXIMAL_SHARE}

    def weights(self, policy_BT: Tensor, old_BT: Tensor, rows: MicroBatch) -> tuple[Tensor | None, dict[str, Any]]:
        """Return the weights that the chosen correction computes from each token's ratio to the sampling policy."""
        from rftstream.core import corrections

        config, mask_BT = self.config, rows.loss_mask_BT
        weights_BT, metrics = None, dict[str, Any]()
        if self._bounds is not None:
            outside, low, high = self._bounds
            weights_BT, metrics = corrections.importance_weights(
                old_BT,
                rows.behavior_logprobs_BT,
                mask_BT,
                outside=outside,
                low=low,
                high=high,
                level=config.correction_level,
            )
        if config.sequence_mask is not None:
            since_BT = rows.behavior_logprobs_BT if config.sequence_mask_from == "behavior" else old_BT
            kept_BT, more = corrections.sequence_mask(
                policy_BT, since_BT, rows.advantages_BT, mask_BT, threshold=config.sequence_mask
            )
            weights_BT, metrics = kept_BT if weights_BT is None else weights_BT * kept_BT, metrics | more
        return weights_BT, metrics

    def old_logprobs(self, policy_BT: Tensor, rows: MicroBatch) -> Tensor:
        """Return the proximal logprobs; with `proximal = "log-linear"` they are interpolated by versions."""
        if not self._interpolates:
            return super().old_logprobs(policy_BT, rows)
        from rftstream.core.corrections import interpolate_logprobs

        return interpolate_logprobs(
            policy_BT, rows.behavior_logprobs_BT, rows.additions[PROXIMAL_SHARE], rows.loss_mask_BT
        )

    def additions(self, experience: Experience, segment: Segment) -> dict[str, np.ndarray]:
        """Add the shares that interpolated logprobs need."""
        more = super().additions(experience, segment)
        if self._interpolates:
            more[PROXIMAL_SHARE] = _proximal_shares(segment, experience.batch_sequence)
        return more


class GroupRelative:
    """Advantages of GRPO, for a `GroupRelativeConfig`."""

    config: Any
    needs_spread: Spread = "group"

    def advantages(self, rewards_N: np.ndarray, groups_N: np.ndarray) -> np.ndarray:
        """Return (R - mean_g) / (std + eps) for each rollout, with the deviation of `scale_rewards`."""
        scale, eps = self.config.scale_rewards, self.config.advantage_eps
        if scale == "group":
            return compute_group_advantages(rewards_N, groups_N, eps=eps)
        centred_N = center_on_group_mean(rewards_N, groups_N)
        return centred_N if scale == "none" else scale_by_batch(centred_N, rewards_N, eps=eps)

    def penalised_advantages(self, scored: ScoredBatch, rewards_N: np.ndarray, penalties_N: np.ndarray) -> np.ndarray:
        """Return these minus the divergence, which is centred and not divided. Otherwise it would have full size in
        groups where the rewards differ only by it."""
        if self.config.scale_rewards == "none":
            return self.advantages(rewards_N - penalties_N, scored.groups_N)
        advantages_N = self.advantages(rewards_N, scored.groups_N)
        return np.asarray(advantages_N - center_on_group_mean(penalties_N, scored.groups_N))


class Clipped(CorrectedPolicyGradient):
    """PPO's clip, for a `ClippedConfig`."""

    Config: ClassVar[Any] = ClippedConfig
    clip_level: ClassVar[Level] = "token"
    """Whether the ratio is that of a token or of a row, as in `core.ratios`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if config.ratio_from == "behavior" and config.correction != "none":
            raise ConfigError(
                f"algorithms.{self.name}.correction: got {config.correction!r}, expected 'none' with ratio_from = "
                "'behavior', whose ratio makes up for who sampled; set one of the two"
            )

    def token_losses(self, policy_BT: Tensor, old_BT: Tensor, rows: MicroBatch) -> tuple[Tensor, dict[str, Any]]:
        """Return PPO's clipped losses, with ratios of the level `clip_level`."""
        from rftstream.core.losses import clipped_surrogate_losses

        config = self.config
        since_BT = rows.behavior_logprobs_BT if config.ratio_from == "behavior" else old_BT
        return clipped_surrogate_losses(
            policy_BT,
            since_BT,
            rows.advantages_BT,
            rows.loss_mask_BT,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
            level=self.clip_level,
        )


def _ages(segment: Segment, version: int) -> np.ndarray:
    """Return how many versions before `version` each token was sampled, at least 0. int64 [T]."""
    ages_T = np.zeros(len(segment.token_ids.numpy()), dtype=np.int64)
    for span in segment.versions:
        ages_T[span.start : span.start + span.count] = max(0, version - span.version)
    return ages_T


def _proximal_shares(segment: Segment, version: int) -> np.ndarray:
    """Return (v_prox - v_behavior) / (v_theta - v_behavior) with v_theta = version and v_prox = version - 1, inside [0,
    1]; 0 if `version` itself sampled the token. float32 [T]."""
    ages_T = _ages(segment, version)
    return np.where(ages_T > 0, (ages_T - 1) / np.maximum(ages_T, 1), 0.0).astype(np.float32)


def _check_kl(config: PolicyGradientConfig, name: str) -> None:
    if not config.kl_coef:
        return
    if config.kl_in == "loss" and config.kl_estimator == "k1" and not config.kl_unbiased:
        raise ConfigError(
            f"algorithms.{name}.kl_estimator: 'k1' in the loss has no gradient on average, expected 'k2' or 'k3'; or "
            'set kl_unbiased = true or kl_in = "reward"'
        )
    if config.kl_in == "reward" and config.kl_unbiased:
        raise ConfigError(
            f"algorithms.{name}.kl_unbiased: is for the loss, but kl_in is 'reward', where the estimate is unbiased as "
            "it is; leave one of the two out"
        )


def _bounds(config: CorrectedConfig, name: str) -> tuple[Any, float, float] | None:
    """Return the kind of correction and the bounds of rho; None for no correction."""
    given = {"correction_low": config.correction_low, "correction_high": config.correction_high}
    if config.correction == "none":
        if odd := [key for key, value in given.items() if value is not None]:
            raise ConfigError(f"algorithms.{name}.{odd[0]}: has no effect with correction = 'none'; leave it out")
        return None
    outside, low, high = CORRECTIONS[config.correction]
    low = low if config.correction_low is None else config.correction_low
    high = high if config.correction_high is None else config.correction_high
    if low >= high:
        raise ConfigError(f"algorithms.{name}.correction_low: got {low}, expected less than correction_high = {high}")
    return outside, low, high
