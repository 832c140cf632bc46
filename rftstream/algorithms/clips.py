"""Algorithms with PPO's clip that differ in their advantages and in the level of their ratio."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from msgspec import Meta

from rftstream.algorithms.base import Denominators, MicroBatch, TrainingRow
from rftstream.algorithms.grpo import Grpo
from rftstream.algorithms.policy_gradient import BatchAdvantages, Clipped, GroupRelative
from rftstream.algorithms.scored import ScoredBatch
from rftstream.algorithms.settings import ClippedConfig, GroupRelativeConfig, GrpoConfig, RowTokensConfig
from rftstream.algorithms.step_rewards import StepConfig
from rftstream.core.advantages import (
    center_on_group_mean,
    compute_baseline_advantages,
    compute_leave_one_out_advantages,
    compute_likelihood_advantages,
    sum_of_later,
    whiten,
)
from rftstream.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


class Dapo(Grpo):
    """DAPO (arXiv 2503.14476): GRPO for long reasoning. Unlikely tokens can rise further, and length has a soft limit.

    It has four parts: a higher upper clip; the mean over all tokens; a penalty along the last fifth of the allowed
    tokens; and dynamic sampling, which the buffer does: set `buffer.zero_variance = "replace"`. There is no divergence.

    GRPO with DAPO's settings as defaults."""

    @dataclass(frozen=True, kw_only=True)
    class Config(StepConfig, GrpoConfig):
        """The settings in `[algorithms.dapo]`."""

        clip_high: Annotated[float, Meta(gt=0)] = 0.28
        """Ratios above 1 + this are clipped. 0.28: DAPO."""
        overlong_share: Annotated[float, Meta(ge=0, le=1)] = 0.2
        """Last share of a rollout's `max_tokens`, along which its reward falls by up to `overlong_penalty`. 0.2:
        DAPO's 4096 of 20480 tokens. 0: off."""


class RowSums(GroupRelative, Clipped):
    """Group-relative advantages with PPO's clip, and sums over rows that are divided by `row_tokens`."""

    def reduce(self, losses_BT: Tensor, rows: MicroBatch, denominators: Denominators) -> Tensor:
        """Return the mean of `normalise`; where it is "sum", the sum over tokens and rows / (rows row_tokens)."""
        loss: Tensor = super().reduce(losses_BT, rows, denominators)
        return loss / self.config.row_tokens if self.normalise == "sum" else loss


class DrGrpo(RowSums):
    """Dr.GRPO: GRPO done right (arXiv 2503.20783): rewards are only centred, and all tokens have the same weight.

    Division by a group's spread gives easy and hard problems more weight than those in between. The mean over a row
    makes long wrong answers cheap. Dr.GRPO does neither: the losses of tokens are summed over a row and divided by a
    constant.

    PPO's clip on rewards that are only centred, summed over rows and divided by a constant."""

    normalise = "sum"

    @dataclass(frozen=True, kw_only=True)
    class Config(RowTokensConfig, ClippedConfig, GroupRelativeConfig):
        """The settings in `[algorithms.dr_grpo]`."""

        scale_rewards: Literal["group", "batch", "none"] = "none"
        """Divisor of a rollout's reward minus its group's mean: none, as in the paper, the standard deviation of its
        group, or that of all rewards of the batch."""


class Gspo(RowSums):
    """GSPO: group sequence policy optimisation (arXiv 2507.18071): one ratio for a row, the geometric mean of its
    tokens' ratios.

    A reward belongs to a whole answer, so whole answers are clipped. This is more stable than a ratio per token where
    single tokens are noisy: mixtures of experts, long answers.

    PPO's clip on the geometric mean of a row's ratios."""

    clip_level = "geometric"

    @dataclass(frozen=True, kw_only=True)
    class Config(RowTokensConfig, ClippedConfig, GroupRelativeConfig):
        """The settings in `[algorithms.gspo]`."""

        clip_low: Annotated[float, Meta(gt=0, lt=1)] = 3e-4
        """Rows whose ratio is below 1 - this are clipped. 3e-4: the paper."""
        clip_high: Annotated[float, Meta(gt=0)] = 4e-4
        """Rows whose ratio is above 1 + this are clipped. 4e-4: the paper."""
        normalise: Literal["sequence", "token", "constant"] = "sequence"
        """Mean over rows (the paper), mean over all tokens, so that long rows count more, or sum over a row's tokens
        divided by `row_tokens`; LUSPO (arXiv 2602.05261) is the last with `row_tokens` = 1."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.normalise = "sum" if config.normalise == "constant" else config.normalise


class Rloo(Clipped):
    """RLOO: REINFORCE with the mean of the other siblings as the baseline (arXiv 2402.14740), over whole rows.

    An answer is one action. Its ratio is that of the whole row, clipped as in TRL if a batch takes more than one
    optimizer step. With one step the ratio is 1, and the gradient is that of REINFORCE: A times the gradient of the
    row's log-probability.

    PPO's clip on whole rows, with the mean of the other siblings as the baseline."""

    needs_spread = "group"
    normalise = "sequence"
    clip_level = "sequence"

    @dataclass(frozen=True, kw_only=True)
    class Config(ClippedConfig):
        """The settings in `[algorithms.rloo]`."""

    def advantages(self, rewards_N: np.ndarray, groups_N: np.ndarray) -> np.ndarray:
        """Return each rollout's reward minus the mean of its siblings' rewards."""
        return compute_leave_one_out_advantages(rewards_N, groups_N)


class ReMax(Clipped):
    """ReMax (arXiv 2310.10505): the baseline of a problem is the reward of the policy's greedy answer.

    The first sibling of each group is sampled at temperature 0. It is scored and recorded like the others, but not
    trained on. The other siblings are trained on, with their difference to its reward as the advantage. A group whose
    greedy sibling could not be scored has no baseline, and is not trained on either.

    PPO's clip on rewards above that of the group's greedy sibling."""

    needs_spread = "group"

    @dataclass(frozen=True, kw_only=True)
    class Config(ClippedConfig):
        """The settings in `[algorithms.remax]`."""

    def rows(self, scored: ScoredBatch) -> tuple[TrainingRow, ...]:
        """Return the rows. Greedy siblings, and groups without a greedy sibling, have empty loss masks."""
        greedy_N = _greedy(scored)
        trained_N = ~greedy_N & np.isin(scored.groups_N, scored.groups_N[greedy_N])
        return tuple(
            row if trained_N[owner] else replace(row, loss_mask=np.zeros_like(row.loss_mask))
            for row, owner in zip(scored.rows(), scored.owners_R.tolist(), strict=True)
        )

    def rollout_advantages(self, scored: ScoredBatch, rewards_N: np.ndarray) -> np.ndarray:
        """Return each rollout's reward minus that of its greedy sibling; 0 if there is none."""
        return compute_baseline_advantages(rewards_N, scored.groups_N, _greedy(scored))

    def describe(self, scored: ScoredBatch, rows: Sequence[TrainingRow], advantages_N: np.ndarray) -> dict[str, float]:
        """Return the mean reward of greedy siblings, and the number of groups without one."""
        greedy_N = _greedy(scored)
        without = set(scored.groups_N.tolist()) - set(scored.groups_N[greedy_N].tolist())
        metrics = {"groups_without_baseline": float(len(without))}
        if greedy_N.any():
            metrics["greedy_reward"] = float(scored.rewards_N[greedy_N].mean())
        return metrics


def _greedy(scored: ScoredBatch) -> np.ndarray:
    """Return which rollouts were sampled greedily, bool [N]."""
    return np.asarray([experience.sampling.temperature == 0 for experience in scored.experiences], dtype=bool)


class MaxRl(Clipped):
    """MaxRL: maximum likelihood by reinforcement (arXiv 2602.02710): a success has more weight the rarer it is in its
    group.

    It approximates the logarithm of the success rate instead of the expected reward, so hard problems have more weight.
    For rewards that are never negative, such as a share of success.

    PPO's clip on rewards above the group's mean, divided by that mean."""

    needs_spread = "group"

    @dataclass(frozen=True, kw_only=True)
    class Config(ClippedConfig):
        """The settings in `[algorithms.maxrl]`."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        odd = [key for key in ("overlong_share", "kl_coef") if getattr(config, key)]
        if odd and not (odd == ["kl_coef"] and config.kl_in == "loss"):
            raise ConfigError(
                f"algorithms.maxrl.{odd[0]}: could make a reward negative, expected 0; maxrl divides by "
                "the mean reward of a group"
            )

    def advantages(self, rewards_N: np.ndarray, groups_N: np.ndarray) -> np.ndarray:
        """Return (R - mean_g) / mean_g for each rollout. ConfigError for a negative reward."""
        if (rewards_N < 0).any():
            raise ConfigError(
                f"trainer.algorithm: maxrl got a reward of {rewards_N.min():g}, expected none below 0; "
                "shift the rewards, or go on with another algorithm"
            )
        return compute_likelihood_advantages(rewards_N, groups_N)


class GiGpo(Grpo):
    """GiGPO: group-in-group policy optimisation (arXiv 2505.10978): credit for single turns in which siblings meet
    again.

    In addition to its rollout's advantage, a turn has its own advantage, among all turns of the group that were made in
    the same state. A state is the text since the previous turn (the prompt, a tool's output, an observation), compared
    token by token. A turn that is alone in its state has no advantage of its own.

    GRPO whose turns have an advantage of their own beside their rollout's."""

    needs_spread = "batch"

    @dataclass(frozen=True, kw_only=True)
    class Config(GrpoConfig):
        """The settings in `[algorithms.gigpo]`."""

        turn_weight: Annotated[float, Meta(ge=0)] = 1.0
        """Weight of a turn's own advantage, which is added to the rollout's. 1: the paper."""
        discount: Annotated[float, Meta(gt=0, le=1)] = 0.95
        """Factor per turn. The return of a turn is the rollout's reward times this factor for each later turn. 0.95:
        the paper."""

    def token_advantages(self, batch: BatchAdvantages) -> list[np.ndarray]:
        """Return the rollout's advantage plus that of each turn among the group's turns from the same state."""
        result = super().token_advantages(batch)
        scored, rows = batch.scored, batch.rows
        turns = [
            (row, start, end)
            for row, segment in enumerate(scored.segments)
            for start, end in sampled_runs(segment.loss_mask.numpy())
        ]
        owners_K = np.asarray([scored.owners_R[row] for row, _, _ in turns], dtype=np.int64)
        returns_K = batch.rewards_N[owners_K] * self.config.discount ** _turns_after(owners_K)
        states: dict[tuple[int, bytes], int] = {}
        states_K = np.empty(len(turns), dtype=np.int64)
        before = {row: 0 for row, _, _ in turns}
        for number, (row, start, end) in enumerate(turns):
            shown = rows[row].token_ids[before[row] : start].tobytes()
            states_K[number] = states.setdefault((rows[row].group, shown), len(states))
            before[row] = end
        own_K = self.advantages(returns_K, states_K)
        for (row, start, end), own in zip(turns, own_K, strict=True):
            result[row][start:end] += self.config.turn_weight * own
        return result


def sampled_runs(loss_mask_T: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield start and end of each turn of a segment, that is of each run of sampled tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], loss_mask_T != 0, [0]]).astype(np.int8)))
    return zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _turns_after(owners_K: np.ndarray) -> np.ndarray:
    """Return how many later turns of the same rollout each turn has. int [K]; the turns of a rollout are consecutive,
    in order."""
    ends = {owner: number for number, owner in enumerate(owners_K.tolist())}
    return np.asarray([ends[owner] - number for number, owner in enumerate(owners_K.tolist())], dtype=np.int64)


class ReinforcePlusPlus(Clipped):
    """REINFORCE++ (arXiv 2501.03262): no groups are needed. Advantages are compared over the whole batch, per token.

    The divergence is subtracted from the reward token by token. A token's return is the sum of everything after it, and
    returns are whitened over all trained tokens of the batch. With `group_baseline` the mean of the group is subtracted
    first (the paper's variant for several samples of a problem). Returns pass unchanged through tokens that were not
    sampled (tool output).

    PPO's clip on returns per token, whitened over the batch."""

    takes_kl_by_token = True

    @dataclass(frozen=True, kw_only=True)
    class Config(ClippedConfig):
        """The settings in `[algorithms.reinforce_plus_plus]`."""

        group_baseline: bool = False
        """Whether the group's mean reward is subtracted before whitening (REINFORCE++-baseline)."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.needs_spread = "group" if config.group_baseline else "batch"

    def advantages(self, rewards_N: np.ndarray, groups_N: np.ndarray) -> np.ndarray:
        """Return the advantages before the divergence is subtracted and all are whitened."""
        return center_on_group_mean(rewards_N, groups_N) if self.config.group_baseline else rewards_N

    def token_advantages(self, batch: BatchAdvantages) -> list[np.ndarray]:
        """Subtract the later divergence from each token's return, and whiten over all trained tokens. If only the
        divergence differs, returns are centred and not divided."""
        rows = batch.rows
        returns_R = [
            np.full(len(row.token_ids), batch.advantages_N[owner])
            for row, owner in zip(rows, batch.scored.owners_R, strict=True)
        ]
        trained_R = [row.loss_mask > 0 for row in rows]
        has_signal = bool(whiten(_joined(returns_R, trained_R)).any())
        if batch.kl_R is not None:
            later_R = _later_divergence(batch.scored, batch.kl_R)
            returns_R = [one - self.config.kl_coef * later for one, later in zip(returns_R, later_R, strict=True)]
        joined = _joined(returns_R, trained_R)
        white = whiten(joined)
        if white.any() and not has_signal:  # a spread caused by rounding stays 0
            white = joined - joined.mean()
        parts_R = np.split(white, np.cumsum([int(trained.sum()) for trained in trained_R])[:-1])
        result = [np.zeros(len(row.token_ids)) for row in rows]
        for one_T, trained, part in zip(result, trained_R, parts_R, strict=True):
            one_T[trained] = part
        return result


def _joined(values_R: Sequence[np.ndarray], trained_R: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([one[trained] for one, trained in zip(values_R, trained_R, strict=True)])


def _later_divergence(scored: ScoredBatch, kl_R: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return for each token the sum of its own and all later divergences in its rollout, over all its rows; float64 [T]
    of each row."""
    later = []
    for rollout in range(len(scored.experiences)):
        own = [kl_R[row] for row in np.flatnonzero(scored.owners_R == rollout).tolist()]
        if own:
            later += np.split(sum_of_later(np.concatenate(own)), np.cumsum([len(one) for one in own])[:-1])
    return later
