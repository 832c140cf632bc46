"""The scored experiences of a batch as arrays: rewards, groups and rows, and the metrics that all algorithms share.

Legend: N rollouts of the batch, R rows (a rollout has one per segment), T tokens of a row. In episodes of several
agents each role of a rollout counts as a rollout, and each role of a group as a group (roles.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rftstream.algorithms.base import TrainingRow, stratum_of, training_row
from rftstream.algorithms.roles import by_role
from rftstream.contracts.batches import Experience
from rftstream.contracts.rollouts import Segment
from rftstream.core.advantages import compute_overlong_penalties, have_signal

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
    wholes_N: np.ndarray
    """int64, dense from 0: the same number for all roles of an episode."""
    roles: tuple[str, ...] = ()
    """The role of each rollout, in episodes of several agents; empty if there are none."""

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
        truncated_N = [one.truncated for one in self.experiences]
        return masked, float(len(np.unique(self.wholes_N[truncated_N])))

    def overlong_penalties(self, share: float) -> np.ndarray:
        """Return for each rollout a penalty from 0 to -1, by how far it is into the last `share` of its allowed tokens.
        All roles of an episode are. float64 [N]."""
        lengths_R = np.asarray([np.count_nonzero(segment.loss_mask.numpy()) for segment in self.segments])
        lengths_N = np.bincount(self.owners_R, weights=lengths_R, minlength=len(self.experiences))
        lengths_N = np.bincount(self.wholes_N, weights=lengths_N)[self.wholes_N]
        limits_N = np.asarray([experience.sampling.max_tokens for experience in self.experiences])
        return compute_overlong_penalties(lengths_N, limits_N, share=share)

    def sum_by_rollout(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Sum the values of tokens, [T] for each row, over each rollout; float64 [N]."""
        sums_R = np.asarray([value.sum(dtype=np.float64) for value in values])
        return np.bincount(self.owners_R, weights=sums_R, minlength=len(self.experiences))

    def metrics(self, rewards_N: np.ndarray, advantages: np.ndarray, rows: Sequence[TrainingRow]) -> dict[str, float]:
        """Return the metrics of the step. `rewards_N` are the rewards by which groups are judged, without a divergence.
        `advantages` are those of rollouts or tokens that are trained on."""
        whole_groups_N = numbered(one.ids.group_id for one in self.experiences)
        num_groups, has_signal_N = int(whole_groups_N.max()) + 1, have_signal(rewards_N, self.groups_N)
        without_signal = num_groups - len(np.unique(whole_groups_N[has_signal_N]))
        return {
            "num_groups": float(num_groups),
            "num_rollouts": float(self.wholes_N.max() + 1),
            "reward": float(self.rewards_N.mean()),
            "reward_std": float(self.rewards_N.std()),
            **describe_advantages(advantages),
            "groups_without_signal": float(without_signal),
            "groups_without_signal_share": without_signal / num_groups,
            "masked_fraction": masked_fraction(rows),
            **self._of_roles(has_signal_N, whole_groups_N),
        }

    def _of_roles(self, has_signal_N: np.ndarray, whole_groups_N: np.ndarray) -> dict[str, float]:
        """Return for each role the share of its groups that have a signal, and how often a role is in one rollout of a
        group alone, so that nothing can be compared with it."""
        if not self.roles:
            return {}
        signal_G = np.bincount(self.groups_N, weights=has_signal_N) > 0
        groups: dict[str, set[int]] = {}
        for role, group in zip(self.roles, self.groups_N.tolist(), strict=True):
            groups.setdefault(role, set()).add(group)
        shares = {f"role_signal/{role or 'none'}": float(signal_G[sorted(own)].mean()) for role, own in groups.items()}
        alone_N = np.bincount(self.groups_N)[self.groups_N] == 1
        pairs = np.unique(np.stack([whole_groups_N, self.wholes_N]), axis=1)
        has_siblings_N = (np.bincount(pairs[0]) > 1)[whole_groups_N]
        return {**shares, "roles_alone": float((alone_N & has_siblings_N).sum())}


def collect_scored(batch: Sequence[Experience]) -> ScoredBatch | None:
    """Return the scored experiences of a batch, or None if nothing is scored. Experiences without a reward are left
    out, and never count as a reward of 0."""
    parts = [part for part in by_role(batch) if part.experience.reward is not None]
    if not parts:
        return None
    scored = tuple(part.experience for part in parts)
    return ScoredBatch(
        experiences=scored,
        rewards_N=np.asarray([experience.reward for experience in scored], dtype=np.float64),
        groups_N=numbered((part.experience.ids.group_id, part.role) for part in parts),
        owners_R=np.asarray([owner for owner, one in enumerate(scored) for _ in one.segments], dtype=np.int64),
        wholes_N=numbered(part.whole for part in parts),
        roles=tuple(part.role for part in parts) if any(part.role for part in parts) else (),
    )


def numbered(names: Iterable[Hashable]) -> np.ndarray:
    """Return a number for each name, from 0 in order of appearance. int64 [N]."""
    numbers: dict[Hashable, int] = {}
    return np.asarray([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.int64)


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
    return 1.0 - sum(row.num_trained for row in rows) / num_tokens if num_tokens else 0.0
