"""GRPO: group-relative policy optimisation (arXiv 2402.03300), with the settings that practice has kept.

Which policy is *old*: the trainer's parameters before the batch. With one optimizer step per batch these are the
parameters themselves, the ratio is 1 and the gradient goes through it; with more (`minibatches`,
`updates_per_batch`) the backend computes proximal logprobs once, before the first step, and passes them in. Who
sampled (an older version, an engine that rounds otherwise) is made up for by a weight on each token's loss.
"""

from __future__ import annotations

from dataclasses import dataclass

from rftstream.algorithms.policy_gradient import Clipped, GroupRelative
from rftstream.algorithms.settings import GrpoConfig


class Grpo(GroupRelative, Clipped):
    """PPO's clip on advantages relative to the group."""

    name = "grpo"

    @dataclass(frozen=True, kw_only=True)
    class Config(GrpoConfig):
        """The settings in `[algorithms.grpo]`."""

    def __init__(self, config: GrpoConfig) -> None:
        super().__init__(config)
        self.normalise = config.normalise
