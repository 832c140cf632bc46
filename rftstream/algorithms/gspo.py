"""GSPO: group sequence policy optimisation (arXiv 2507.18071): one ratio for a row, the geometric mean of its tokens'.

A reward is of a whole answer, so what is clipped is whole answers. It is steadier than a ratio per token where single
tokens are noisy: mixtures of experts, long answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from rftstream.algorithms.policy_gradient import Clipped, GroupRelative
from rftstream.algorithms.settings import ClippedConfig, GroupRelativeConfig


class Gspo(GroupRelative, Clipped):
    """PPO's clip on the geometric mean of a row's ratios."""

    name = "gspo"
    normalise = "sequence"
    clip_level = "geometric"

    @dataclass(frozen=True, kw_only=True)
    class Config(ClippedConfig, GroupRelativeConfig):
        """The settings in `[algorithms.gspo]`."""

        clip_low: Annotated[float, Meta(gt=0, lt=1)] = 3e-4
        """Rows whose ratio is below 1 - this are clipped. 3e-4: the paper."""
        clip_high: Annotated[float, Meta(gt=0)] = 4e-4
        """Rows whose ratio is above 1 + this are clipped. 4e-4: the paper."""
