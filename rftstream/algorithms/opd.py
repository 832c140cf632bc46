"""On-policy distillation: the policy samples, and a teacher computes the logprob of each sampled token. The gap is the
advantage, so that the gradient is that of KL(policy || teacher) on the policy's own samples.

    A_t = clip(logp_teacher - logp_behavior, -max_gap, max_gap) + reward_weight A_grpo

GKD (arXiv 2306.13649) with reverse KL and only on-policy data. Each token is credited without later tokens (a discount
of 0), as in thinkingmachines.ai/blog/on-policy-distillation. Clip, correction and means are those of `grpo`. The
teacher's logprobs come with the verdicts: reward `teacher`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from msgspec import Meta

from rftstream.algorithms.base import TrainingRow
from rftstream.algorithms.grpo import Grpo
from rftstream.algorithms.policy_gradient import BatchAdvantages
from rftstream.algorithms.scored import ScoredBatch
from rftstream.algorithms.settings import GrpoConfig
from rftstream.contracts.batches import Experience
from rftstream.core.advantages import compute_teacher_gaps
from rftstream.errors import ConfigError

TEACHER = "teacher_logprobs"
"""Addition of an experience: float32 for the tokens of all segments, one segment after the other."""


class Opd(Grpo):
    """GRPO whose advantages come from a teacher's logprobs, optionally with rewards in addition."""

    needs_spread = "none"

    @dataclass(frozen=True, kw_only=True)
    class Config(GrpoConfig):
        """The settings in `[algorithms.opd]`."""

        reward_weight: Annotated[float, Meta(ge=0)] = 0.0
        """Weight of the advantage that grpo would compute from the rewards. 0: only the teacher counts."""
        max_gap: Annotated[float, Meta(gt=0)] = 20.0
        """Limit of the gaps. For tokens that a teacher would never sample, its engine returns its own value for a
        probability of 0."""

    def advantages(self, rewards_N: np.ndarray, groups_N: np.ndarray) -> np.ndarray:
        """Return GRPO's advantages of the rewards, times `reward_weight`."""
        if not self.config.reward_weight:
            return np.zeros(len(rewards_N))
        return np.asarray(self.config.reward_weight * super().advantages(rewards_N, groups_N))

    def token_advantages(self, batch: BatchAdvantages) -> list[np.ndarray]:
        """Return the clipped gap to the teacher for each token, plus `reward_weight` times GRPO's advantage."""
        base_R = super().token_advantages(batch)
        limit = self.config.max_gap
        return [
            base_T + np.clip(gaps_T, -limit, limit) for base_T, gaps_T in zip(base_R, _gaps(batch.scored), strict=True)
        ]

    def describe(self, scored: ScoredBatch, rows: Sequence[TrainingRow], advantages_N: np.ndarray) -> dict[str, float]:
        """Return the distance between the policy and its teacher, over sampled tokens."""
        trained = [row.loss_mask > 0 for row in rows]
        gaps = np.concatenate([gaps_T[kept] for gaps_T, kept in zip(_gaps(scored), trained, strict=True)])
        given = np.concatenate([row.advantages[kept] for row, kept in zip(rows, trained, strict=True)])
        if not len(gaps):
            return {}
        return {
            "teacher_kl": float(-gaps.mean()),
            "teacher_gap_max": float(np.abs(gaps).max()),
            "token_advantage_std": float(given.std()),
        }


def _gaps(scored: ScoredBatch) -> list[np.ndarray]:
    """Return the gap to the teacher at each token of a row, float64 [T], 0 where no token was sampled."""
    gaps: list[np.ndarray] = []
    for experience in scored.experiences:
        teacher_T = _of_teacher(experience)
        lengths = [len(segment.token_ids.numpy()) for segment in experience.segments]
        parts = np.split(teacher_T, np.cumsum(lengths)[:-1])
        gaps += [
            compute_teacher_gaps(part_T, segment.behavior_logprobs.numpy(), segment.loss_mask.numpy())
            for segment, part_T in zip(experience.segments, parts, strict=True)
        ]
    return gaps


def _of_teacher(experience: Experience) -> np.ndarray:
    num_tokens = sum(len(segment.token_ids.numpy()) for segment in experience.segments)
    stamped = experience.additions.get(TEACHER)
    if stamped is None or stamped.shape != (num_tokens,):
        found = "no" if stamped is None else f"{list(stamped.shape)}"
        raise ConfigError(
            f"algorithms.opd: rollout {experience.ids.rollout_id} has {found} {TEACHER}, expected one for each of its "
            f"{num_tokens} tokens; add the reward 'teacher' to tasksets.{experience.ids.taskset}.reward"
        )
    return stamped.numpy()
