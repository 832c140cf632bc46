"""Algorithms with PPO's clip that differ in their advantages and in what a ratio is of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import numpy as np
from msgspec import Meta

from rftstream.algorithms.base import Denominators, MicroBatch, TrainingRow
from rftstream.algorithms.grpo import Grpo
from rftstream.algorithms.policy_gradient import Clipped, GroupRelative
from rftstream.algorithms.scored import ScoredBatch
from rftstream.algorithms.settings import ClippedConfig, GroupRelativeConfig, GrpoConfig
from rftstream.algorithms.step_rewards import StepConfig
from rftstream.core.advantages import (
    center_on_group_mean,
    compute_baseline_advantages,
    compute_leave_one_out_advantages,
    compute_likelihood_advantages,
)
from rftstream.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


class Dapo(Grpo):
    """DAPO (arXiv 2503.14476): GRPO for long reasoning, with room for unlikely tokens to rise and a soft limit of
    length.

    Its four parts: a higher upper clip; the mean over all tokens; a penalty along the last fifth of the allowed tokens;
    and dynamic sampling, which is the buffer's: set `buffer.zero_variance = "replace"`. No divergence is taken.

    GRPO with DAPO's settings as defaults."""

    name = "dapo"

    @dataclass(frozen=True, kw_only=True)
    class Config(StepConfig, GrpoConfig):
        """The settings in `[algorithms.dapo]`."""

        clip_high: Annotated[float, Meta(gt=0)] = 0.28
        """Ratios above 1 + this are clipped. 0.28: DAPO."""
        overlong_share: Annotated[float, Meta(ge=0, le=1)] = 0.2
        """Takes up to `overlong_penalty` from the reward of a rollout along this last share of its `max_tokens`. 0.2:
        DAPO's 4096 of 20480 tokens. 0: nothing."""


class DrGrpo(Clipped):
    """Dr.GRPO: GRPO done right (arXiv 2503.20783): rewards are only centred, and all tokens weigh the same.

    Dividing by a group's spread makes easy and hard problems count for more than those between, and the mean over a row
    makes long wrong answers cheap. Here neither is done: the losses of tokens are summed over a row and divided by a
    constant.

    PPO's clip on rewards that are only centred, summed over rows and divided by a constant."""

    name = "dr_grpo"
    needs_spread = "group"
    normalise = "sum"

    @dataclass(frozen=True, kw_only=True)
    class Config(ClippedConfig):
        """The settings in `[algorithms.dr_grpo]`."""

        row_tokens: Annotated[int, Meta(ge=1)] = 256
        """The sum over a row is divided by this instead of its tokens: the largest number that it may have, as in
        `sampling.max_tokens`, whose default this is."""

    def advantages(self, rewards_N: np.ndarray, groups_N: np.ndarray) -> np.ndarray:
        """Return R - mean_g for each rollout."""
        return center_on_group_mean(rewards_N, groups_N)

    def reduce(self, losses_BT: Tensor, rows: MicroBatch, denominators: Denominators) -> Tensor:
        """Return the sum over tokens and rows / (rows row_tokens)."""
        loss: Tensor = super().reduce(losses_BT, rows, denominators) / self.config.row_tokens
        return loss


class Gspo(GroupRelative, Clipped):
    """GSPO: group sequence policy optimisation (arXiv 2507.18071): one ratio for a row, the geometric mean of its
    tokens'.

    A reward is of a whole answer, so what is clipped is whole answers. It is steadier than a ratio per token where
    single tokens are noisy: mixtures of experts, long answers.

    PPO's clip on the geometric mean of a row's ratios."""

    name = "gspo"
    normalise = "sequence"
    clip_level = "geometric"

    @dataclass(frozen=True, kw_only=True)
    class Config(ClippedConfig, GroupRelativeConfig):
        """The settings in `[algorithms.gspo]`."""

        clip_low: Annotated[float, Meta(gt=0, lt=1)] = 3e-4
        """Rows whose ratio is below 1 - this are clipped. 3e-4: the paper."""
        clip_high: Annotated[float, Meta(gt=0)] = 4e-4
        """Rows whose ratio is above 1 + this are clipped. 4e-4: the paper."""


class Rloo(Clipped):
    """RLOO: REINFORCE with the mean of the other siblings as the baseline (arXiv 2402.14740), over whole rows.

    An answer is one action: its ratio is that of the whole row, clipped as TRL does where a batch takes more than one
    optimizer step. With one step the ratio is 1, and the gradient that of REINFORCE: A times the row's log-probability.

    PPO's clip on whole rows, with the mean of the other siblings as the baseline."""

    name = "rloo"
    needs_spread = "group"
    normalise = "sequence"
    clip_level = "sequence"

    @dataclass(frozen=True, kw_only=True)
    class Config(ClippedConfig):
        """The settings in `[algorithms.rloo]`."""

    def advantages(self, rewards_N: np.ndarray, groups_N: np.ndarray) -> np.ndarray:
        """Return each rollout's reward above the mean of its siblings."""
        return compute_leave_one_out_advantages(rewards_N, groups_N)


class ReMax(Clipped):
    """ReMax (arXiv 2310.10505): the baseline of a problem is what the policy gets for its greedy answer.

    The first sibling of each group is sampled at temperature 0. It is scored and recorded like the others, and not
    trained on; they are, with how much better they did. A group whose greedy sibling could not be scored has no
    baseline, and is not trained on either.

    PPO's clip on rewards above that of the group's greedy sibling."""

    name = "remax"
    needs_spread = "group"

    @dataclass(frozen=True, kw_only=True)
    class Config(ClippedConfig):
        """The settings in `[algorithms.remax]`."""

    def rows(self, scored: ScoredBatch) -> tuple[TrainingRow, ...]:
        """Return the rows; those of greedy siblings, and of groups without one, have nothing to train on."""
        greedy_N = _greedy(scored)
        trained_N = ~greedy_N & np.isin(scored.groups_N, scored.groups_N[greedy_N])
        return tuple(
            row if trained_N[owner] else replace(row, loss_mask=np.zeros_like(row.loss_mask))
            for row, owner in zip(scored.rows(), scored.owners_R.tolist(), strict=True)
        )

    def rollout_advantages(self, scored: ScoredBatch, rewards_N: np.ndarray) -> np.ndarray:
        """Return each rollout's reward above its greedy sibling's; 0 where there is none."""
        return compute_baseline_advantages(rewards_N, scored.groups_N, _greedy(scored))

    def describe(self, scored: ScoredBatch, rows: Sequence[TrainingRow], advantages_N: np.ndarray) -> dict[str, float]:
        """Return the mean reward of greedy siblings, and how many groups had none."""
        greedy_N = _greedy(scored)
        without = set(scored.groups_N.tolist()) - set(scored.groups_N[greedy_N].tolist())
        metrics = {"groups_without_baseline": float(len(without))}
        if greedy_N.any():
            metrics["greedy_reward"] = float(scored.rewards_N[greedy_N].mean())
        return metrics


def _greedy(scored: ScoredBatch) -> np.ndarray:
    """Which rollouts were sampled greedily, bool [N]."""
    return np.asarray([experience.sampling.temperature == 0 for experience in scored.experiences], dtype=bool)


class MaxRl(Clipped):
    """MaxRL: maximum likelihood by reinforcement (arXiv 2602.02710): a success weighs by how rare it is in its group.

    In place of the expected reward it approaches the logarithm of the success rate, so hard problems count for more.
    For rewards that are never negative: a share of success.

    PPO's clip on rewards above the group's mean, divided by that mean."""

    name = "maxrl"
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
