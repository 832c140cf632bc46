"""ReMax (arXiv 2310.10505): the baseline of a problem is what the policy gets for its greedy answer.

The first sibling of each group is sampled at temperature 0. It is scored and recorded like the others, and not trained
on; they are, with how much better they did. A group whose greedy sibling could not be scored has no baseline, and is
not trained on either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rftstream.algorithms.base import TrainingRow
from rftstream.algorithms.policy_gradient import Clipped
from rftstream.algorithms.scored import ScoredBatch
from rftstream.algorithms.settings import ClippedConfig
from rftstream.core.advantages import compute_baseline_advantages


class ReMax(Clipped):
    """PPO's clip on rewards above that of the group's greedy sibling."""

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
