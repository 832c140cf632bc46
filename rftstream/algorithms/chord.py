"""CHORD: MIX whose weight of imitation changes as the run goes on, and that learns most where it is undecided
(arXiv 2508.11408). It has all settings of `grpo`, too.

    mu goes up in a line to its peak, then down to its valley in half a cosine;
    a token of a demonstration counts by phi = p (1 - p), p its probability to the policy
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
        """Beside them, all of `grpo`'s settings."""

        mu_peak: Annotated[float, Meta(ge=0, le=1)] = 0.9
        """Largest weight of imitation."""
        mu_valley: Annotated[float, Meta(ge=0, le=1)] = 0.05
        """Weight that stays."""
        mu_warmup_steps: Annotated[int, Meta(ge=0)] = 0
        """Steps up to the peak."""
        mu_decay_steps: Annotated[int, Meta(ge=1)] = 200
        """Steps from there to the valley."""
        phi: bool = True
        """Weighs tokens by p (1 - p); without it, as the paper's first variant, all count the same."""

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
