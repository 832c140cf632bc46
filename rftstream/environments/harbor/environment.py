"""The environment `harbor`: agents in places of their own, judged by their tasks' tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rftstream.environments.agent import DrivesItself
from rftstream.environments.harbor.agent import HarborConfig


class HarborEnvironment(DrivesItself):
    """An agent in a place. The explorer's launcher runs it."""

    @dataclass(frozen=True, kw_only=True)
    class Config(HarborConfig):
        """The settings in `[environments.harbor]`."""

        on_restart: Literal["replay", "anew"] = "replay"
        """Action of another explorer that takes over a rollout. In both cases the agent starts again in a new place.
        `replay`: a request that equals a recorded one gets the recorded answer. `anew`: the recorded calls are
        dropped."""
