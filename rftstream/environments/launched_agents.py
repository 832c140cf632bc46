"""Agents that an explorer starts: in its own host processes (`hosts/agents.py`), in places
(`harbor/agent.py`), or at a service (`called.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from rftstream.environments.called import CalledAgent, CalledAgentConfig
from rftstream.environments.harbor.agent import HarborAgent, HarborConfig
from rftstream.environments.hosts.agents import AgentResult, AgentWork, HostedAgent, HostedAgentConfig


class RunsAgent(Protocol):
    """Runs the agents of one environment. An explorer makes one for its run file."""

    is_elsewhere: bool
    """Whether a service runs the agents. The agents may then be on other machines, and need an address that is
    reachable from there. An agent may also continue with its key after its call is lost."""

    keeps_time: bool
    """Whether the object itself ends agents that take too long. The limit of an agent's silence does not hold then, and
    the agent may be silent while its place is made and while its work is tested."""

    async def run(self, work: AgentWork, begins: Callable[[], object]) -> AgentResult:
        """Run the agent of one rollout to its end; the launcher calls it. `begins` is called when the agent begins, or
        begins again; then its recorded calls answer it.

        HostError if the agent is lost, and may be started again; HostTimeout if it takes too long; HostedCodeError if
        it fails; ConfigError if no agent can run at all. Cancelling this cancels the agent."""


def agent_of(options: Any) -> RunsAgent | None:
    """Return the runner of an environment's agents for these settings; None if agents come by themselves. ConfigError
    for invalid settings."""
    match options:
        case HostedAgentConfig():
            return HostedAgent(options)
        case HarborConfig():
            return HarborAgent(options)
        case CalledAgentConfig(url=url) if url:
            return CalledAgent(options)
    return None
