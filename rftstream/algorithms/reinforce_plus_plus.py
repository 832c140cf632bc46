"""REINFORCE++ (arXiv 2501.03262): no groups are needed; advantages are compared over the whole batch, per token.

The divergence is taken from the reward token by token, a token's return is what comes after it, and returns are
whitened over all trained tokens of the batch. With `group_baseline` the mean of the group is subtracted first (the
paper's variant for several samples of a problem). Returns pass through what was not sampled (tool output) as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rftstream.algorithms.policy_gradient import BatchAdvantages, Clipped
from rftstream.algorithms.scored import ScoredBatch
from rftstream.algorithms.settings import ClippedConfig
from rftstream.core.advantages import center_on_group_mean, sum_of_later, whiten


class ReinforcePlusPlus(Clipped):
    """PPO's clip on returns per token, whitened over the batch."""

    name = "reinforce_plus_plus"
    takes_kl_by_token = True

    @dataclass(frozen=True, kw_only=True)
    class Config(ClippedConfig):
        """The settings in `[algorithms.reinforce_plus_plus]`."""

        group_baseline: bool = False
        """Subtracts the mean reward of the group before whitening (REINFORCE++-baseline)."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.needs_spread = "group" if config.group_baseline else "batch"

    def advantages(self, rewards_N: np.ndarray, groups_N: np.ndarray) -> np.ndarray:
        """Return the advantages before the divergence is taken and all are whitened."""
        return center_on_group_mean(rewards_N, groups_N) if self.config.group_baseline else rewards_N

    def token_advantages(self, batch: BatchAdvantages) -> list[np.ndarray]:
        """Take the later divergence from each token's return, and whiten over all trained tokens. Where only the
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
        if white.any() and not has_signal:  # a spread of rounding stays none
            white = joined - joined.mean()
        parts_R = np.split(white, np.cumsum([int(trained.sum()) for trained in trained_R])[:-1])
        result = [np.zeros(len(row.token_ids)) for row in rows]
        for one_T, trained, part in zip(result, trained_R, parts_R, strict=True):
            one_T[trained] = part
        return result


def _joined(values_R: Sequence[np.ndarray], trained_R: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([one[trained] for one, trained in zip(values_R, trained_R, strict=True)])


def _later_divergence(scored: ScoredBatch, kl_R: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Sum the divergence from each token, itself included, to the end of its rollout, over all its rows; float64 [T] of
    each row."""
    later = []
    for rollout in range(len(scored.experiences)):
        own = [kl_R[row] for row in np.flatnonzero(scored.owners_R == rollout).tolist()]
        if own:
            later += np.split(sum_of_later(np.concatenate(own)), np.cumsum([len(one) for one in own])[:-1])
    return later
