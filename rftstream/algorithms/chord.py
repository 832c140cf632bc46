"""CHORD: MIX with a weight of imitation that changes during the run, and that learns most where the policy is undecided
(arXiv 2508.11408). It also has all settings of `grpo`.

    mu rises linearly to its peak, then falls to its valley along half a cosine;
    a token of a demonstration has the weight phi = p (1 - p), where p is its probability under the policy
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from rftstream.algorithms.grpo import Grpo
from rftstream.algorithms.mix import Mix


class Chord(Mix):
    """MIX with a weight of imitation that follows a schedule, and with a weight for each token of a demonstration."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Grpo.Config):
        """The settings in `[algorithms.chord]`, in addition to those of `grpo`."""

        mu_peak: Annotated[float, Meta(ge=0, le=1)] = 0.9
        """Largest weight of imitation."""
        mu_valley: Annotated[float, Meta(ge=0, le=1)] = 0.05
        """Weight after the decay."""
        mu_warmup_steps: Annotated[int, Meta(ge=0)] = 0
        """Number of steps up to the peak."""
        mu_decay_steps: Annotated[int, Meta(ge=1)] = 200
        """Number of steps from the peak to the valley."""
        phi: bool = True
        """Whether tokens are weighted by p (1 - p). Without it all tokens have the same weight, as in the paper's first
        variant."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)  # type: ignore[arg-type]  # it asks for `mu` by the method alone
        self._schedule = config
        self.phi = config.phi

    def mu(self, version: int) -> float:
        """Return the weight of imitation for the batch that is trained at `version`."""
        schedule = self._schedule
        if version < schedule.mu_warmup_steps:
            return schedule.mu_peak * version / schedule.mu_warmup_steps
        progress = min(1.0, (version - schedule.mu_warmup_steps) / schedule.mu_decay_steps)
        return schedule.mu_valley + (schedule.mu_peak - schedule.mu_valley) * (1 + math.cos(math.pi * progress)) / 2
