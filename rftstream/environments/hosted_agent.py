"""An agent that the explorer starts for each rollout, in a process with its own interpreter (`hosts/`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rftstream.environments.agent import DrivesItself
from rftstream.environments.hosts.agents import HostedAgentConfig


class LaunchedAgent(DrivesItself):
    """An agent in a host process. The explorer's launcher runs its function."""

    @dataclass(frozen=True, kw_only=True)
    class Config(HostedAgentConfig):
        """The settings in `[environments.hosted_agent]`."""

        on_restart: Literal["replay", "anew"] = "replay"
        """Action of another explorer that takes over a rollout. In both cases it starts the agent again. `replay`: a
        request that equals a recorded one gets the recorded answer. `anew`: the recorded calls are dropped."""
