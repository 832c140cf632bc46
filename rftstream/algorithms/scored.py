"""The scored experiences of a batch as arrays: rewards, groups and rows, and the metrics that all algorithms share.

Legend: N rollouts of the batch, R rows (a rollout has one per segment), T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rftstream.algorithms.base import TrainingRow, stratum_of, training_row
from rftstream.contracts.batches import Experience
from rftstream.contracts.rollouts import Segment
from rftstream.core.advantages import compute_overlong_penalties, count_groups_without_signal

NOTHING = {"num_groups": 0.0, "num_rollouts": 0.0}
"""Metrics of a batch without scored rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredBatch:
    """The experiences of a batch that have a reward."""

    experiences: tuple[Experience, ...]
    rewards_N: np.ndarray
    """Given rewards, float64."""
    groups_N: np.ndarray
    """int64, numbered from 0 in order of appearance."""
    owners_R: np.ndarray
    """int64: the rollout of each row."""

    @property
    def segments(self) -> list[Segment]:
        """The segment of each row."""
        return [segment for experience in self.experiences for segment in experience.segments]

    def rows(self) -> tuple[TrainingRow, ...]:
        """Return a row for each segment, without advantages yet."""
        return tuple(
            training_row(segment, 0.0, experience.sampling.temperature, int(group), rollout, stratum_of(experience))
            for rollout, (experience, group) in enumerate(zip(self.experiences, self.groups_N, strict=True))
            for segment in experience.segments
        )

    def leave_out_truncated(self, rows: Sequence[TrainingRow]) -> tuple[tuple[TrainingRow, ...], float]:
        """Return the rows with empty loss masks for truncated rollouts, and how many rollouts those were."""
        masked = tuple(
            replace(row, loss_mask=np.zeros_like(row.loss_mask)) if self.experiences[owner].truncated else row
            for row, owner in zip(rows, self.owners_R, strict=True)
        )
        return masked, float(sum(experience.truncated for experience in self.experiences))

    def overlong_penalties(self, share: float) -> np.ndarray:
        """Return for each rollout a penalty from 0 to -1, by how far it is into the last `share` of its allowed tokens.
        float64 [N]."""
        lengths_R = np.asarray([np.count_nonzero(segment.loss_mask.numpy()) for segment in self.segments])
        lengths_N = np.bincount(self.owners_R, weights=lengths_R, minlength=len(self.experiences))
        limits_N = np.asarray([experience.sampling.max_tokens for experience in self.experiences])
        return compute_overlong_penalties(lengths_N, limits_N, share=share)

    def sum_by_rollout(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Sum the values of tokens, [T] for each row, over each rollout; float64 [N]."""
        sums_R = np.asarray([value.sum(dtype=np.float64) for value in values])
        return np.bincount(self.owners_R, weights=sums_R, minlength=len(self.experiences))

    def metrics(self, rewards_N: np.ndarray, advantages: np.ndarray, rows: Sequence[TrainingRow]) -> dict[str, float]:
        """Return the metrics of the step. `rewards_N` are the rewards by which groups are judged, without a divergence.
        `advantages` are those of rollouts or tokens that are trained on."""
        without_signal = count_groups_without_signal(rewards_N, self.groups_N)
        num_groups = int(self.groups_N.max()) + 1
        return {
            "num_groups": float(num_groups),
            "num_rollouts": float(len(self.experiences)),
            "reward": float(self.rewards_N.mean()),
            "reward_std": float(self.rewards_N.std()),
            **describe_advantages(advantages),
            "groups_without_signal": float(without_signal),
            "groups_without_signal_share": without_signal / num_groups,
            "masked_fraction": masked_fraction(rows),
        }


def collect_scored(batch: Sequence[Experience]) -> ScoredBatch | None:
    """Return the scored experiences of a batch, or None if nothing is scored. Experiences without a reward are left
    out, and never count as a reward of 0."""
    scored = tuple(experience for experience in batch if experience.reward is not None)
    if not scored:
        return None
    numbers: dict[str, int] = {}
    return ScoredBatch(
        experiences=scored,
        rewards_N=np.asarray([experience.reward for experience in scored], dtype=np.float64),
        groups_N=np.asarray([numbers.setdefault(one.ids.group_id, len(numbers)) for one in scored]),
        owners_R=np.asarray([owner for owner, one in enumerate(scored) for _ in one.segments], dtype=np.int64),
    )


def describe_advantages(advantages: np.ndarray) -> dict[str, float]:
    """Return metrics of the advantages of rollouts or tokens, [N] or [T]."""
    return {
        "advantage": float(advantages.mean()) if len(advantages) else 0.0,
        "advantage_std": float(advantages.std()) if len(advantages) else 0.0,
        "advantage_max": float(np.abs(advantages).max(initial=0.0)),
    }


def of_trained_tokens(rows: Sequence[TrainingRow]) -> np.ndarray:
    """Return the advantages of all trained tokens, float64."""
    return np.concatenate([row.advantages[row.loss_mask > 0] for row in rows] or [np.zeros(0)]).astype(np.float64)


def masked_fraction(rows: Sequence[TrainingRow]) -> float:
    """Return the share of the tokens in these rows that are not trained on."""
    num_tokens = sum(len(row.loss_mask) for row in rows)
    return 1.0 - float(sum(row.loss_mask.sum() for row in rows)) / num_tokens if num_tokens else 0.0
