"""Rewards of steps, which a process reward model adds to verdicts, as arrays for an algorithm.

Shapes: N rollouts, R rows, T tokens of all segments of a rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rftstream.algorithms.scored import ScoredBatch
from rftstream.contracts.batches import Experience
from rftstream.core.advantages import compute_step_advantages
from rftstream.errors import ConfigError

STEP_REWARDS, STEP_ENDS = "step_rewards", "step_ends"
"""Additions of a verdict, for the tokens of all segments, one after the other. The first is float32: the reward of the
step that ends with the token, 0 elsewhere. The second is uint8: 1 where a step ends."""


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """Settings of algorithms that can learn from rewards of steps."""

    step_rewards: Literal["off", "only", "beside"] = "off"
    """Whether tokens learn from the rewards of their steps (DeepSeekMath, process supervision): not at all, in place of
    the rollout's reward, or beside it, as the sum of both advantages. The reward must supply them, as `reward_model`
    with `steps` does."""


def step_advantages(scored: ScoredBatch, *, eps: float, name: str) -> list[np.ndarray]:
    """Return the advantages of each row's tokens from the rewards of the group's steps, float64 [T]. ConfigError,
    naming the algorithm `name`, if a rollout has no step rewards."""
    rewards_N, ends_N = [], []
    for experience in scored.experiences:
        rewards_T, ends_T = _of_steps(experience, name)
        rewards_N.append(rewards_T)
        ends_N.append(ends_T)
    found_N = compute_step_advantages(rewards_N, ends_N, scored.groups_N, eps=eps)
    return [
        part_T
        for experience, found_T in zip(scored.experiences, found_N, strict=True)
        for part_T in np.split(found_T, np.cumsum(_lengths(experience))[:-1])
    ]


def step_metrics(scored: ScoredBatch, name: str) -> dict[str, float]:
    """Return the mean number of steps of a rollout, and the mean reward of a step."""
    found = [_of_steps(experience, name) for experience in scored.experiences]
    rewards_S = np.concatenate([rewards_T[ends_T] for rewards_T, ends_T in found])
    return {
        "steps_per_rollout": len(rewards_S) / len(found),
        "step_reward": float(rewards_S.mean()) if len(rewards_S) else 0.0,
    }


def _of_steps(experience: Experience, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the rewards, float64 [T], and the ends of steps, bool [T]."""
    num_tokens = sum(_lengths(experience))
    rewards, ends = (experience.additions.get(key) for key in (STEP_REWARDS, STEP_ENDS))
    if rewards is None or ends is None or not rewards.shape == ends.shape == (num_tokens,):
        raise ConfigError(
            f"algorithms.{name}.step_rewards: rollout {experience.ids.rollout_id} has no rewards of steps for its "
            f"{num_tokens} tokens, expected some; add the reward 'reward_model' with `steps` to "
            f'tasksets.{experience.ids.taskset}.reward, or set step_rewards to "off"'
        )
    return rewards.numpy().astype(np.float64), ends.numpy() != 0


def _lengths(experience: Experience) -> Sequence[int]:
    return [segment.token_ids.shape[0] for segment in experience.segments]
