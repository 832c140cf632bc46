"""GRPO: group-relative policy optimisation (arXiv 2402.03300), with the settings that have proved themselves in
practice.

The *old* policy has the trainer's parameters before the batch. With one optimizer step per batch these are the
parameters themselves, the ratio is 1, and the gradient goes through it. With more steps (`minibatches`,
`updates_per_batch`) the backend computes proximal logprobs once, before the first step. The sampling policy may differ
(an older version, an engine with other rounding); a weight on each token's loss corrects for that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rftstream.algorithms.base import TrainingRow
from rftstream.algorithms.policy_gradient import BatchAdvantages, Clipped, GroupRelative
from rftstream.algorithms.scored import ScoredBatch
from rftstream.algorithms.settings import GrpoConfig
from rftstream.algorithms.step_rewards import StepConfig, step_advantages, step_metrics


class Grpo(GroupRelative, Clipped):
    """PPO's clip on advantages relative to the group."""

    @dataclass(frozen=True, kw_only=True)
    class Config(StepConfig, GrpoConfig):
        """The settings in `[algorithms.grpo]`."""

    def __init__(self, config: GrpoConfig) -> None:
        super().__init__(config)
        self.normalise = config.normalise
        self._steps = config.step_rewards if isinstance(config, StepConfig) else "off"
        if self._steps != "off":
            self.needs_spread = "none"  # the rewards of steps may differ even if those of rollouts are equal

    def token_advantages(self, batch: BatchAdvantages) -> list[np.ndarray]:
        """Return for each token the rollout's advantage, or that of its steps, or the sum, according to
        `step_rewards`."""
        whole_R = super().token_advantages(batch)
        if self._steps == "off":
            return whole_R
        steps_R = step_advantages(batch.scored, eps=self.config.advantage_eps, name=self.name)
        if self._steps == "only":
            return steps_R
        return [whole_T + steps_T for whole_T, steps_T in zip(whole_R, steps_R, strict=True)]

    def describe(self, scored: ScoredBatch, rows: Sequence[TrainingRow], advantages_N: np.ndarray) -> dict[str, float]:
        """Return metrics of steps, if `step_rewards` is on."""
        more = super().describe(scored, rows, advantages_N)
        return more if self._steps == "off" else {**more, **step_metrics(scored, self.name)}

    @property
    def has_token_advantages(self) -> bool:
        """Whether tokens of one rollout may have different advantages."""
        return self._steps != "off" or type(self).token_advantages is not Grpo.token_advantages
