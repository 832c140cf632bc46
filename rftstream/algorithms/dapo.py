"""DAPO (arXiv 2503.14476): GRPO for long reasoning, with room for unlikely tokens to rise and a soft limit of length.

Its four parts: a higher upper clip; the mean over all tokens; a penalty along the last fifth of the allowed tokens;
and dynamic sampling, which is the buffer's: set `buffer.zero_variance = "replace"`. No divergence is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from rftstream.algorithms.grpo import Grpo
from rftstream.algorithms.settings import GrpoConfig
from rftstream.algorithms.step_rewards import StepConfig


class Dapo(Grpo):
    """GRPO with DAPO's settings as defaults."""

    name = "dapo"

    @dataclass(frozen=True, kw_only=True)
    class Config(StepConfig, GrpoConfig):
        """The settings in `[algorithms.dapo]`."""

        clip_high: Annotated[float, Meta(gt=0)] = 0.28
        """Ratios above 1 + this are clipped. 0.28: DAPO."""
        overlong_share: Annotated[float, Meta(ge=0, le=1)] = 0.2
        """Takes up to `overlong_penalty` from the reward of a rollout along this last share of its `max_tokens`. 0.2:
        DAPO's 4096 of 20480 tokens. 0: nothing."""
