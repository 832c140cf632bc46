"""What a role has beside its ordinary parts if agents call it. An explorer has them, and so has an evaluator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rftstream.contracts.tasks import Task
from rftstream.models.rendering import Renderer
from rftstream.roles.explorer.agents.launcher import AgentLauncher
from rftstream.roles.explorer.agents.loop import AgentLoop
from rftstream.roles.explorer.agents.rollout import AgentRollout
from rftstream.roles.explorer.model_calls import CallInbox, Dialect


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentParts:
    """The agent loop, the launcher of agents, and the gateway. `workers/agents.py` makes it. A step calls `new_rollout`
    and `begin` for each task of an agent, drives the loop, and calls `close` at the end."""

    loop: AgentLoop
    """The rollouts that agents make."""
    inbox: CallInbox
    """Queue of requests from the gateway to the loop."""
    launcher: AgentLauncher
    """Starts those agents that do not come by themselves."""
    environments: frozenset[str]
    """Names of the environments whose tasks are agents'."""
    dialects: Mapping[str, Dialect]
    """Dialects by their names on the log."""
    renderer: Renderer
    """Renderer for tasks without a chat template of their own."""
    gateway_url: str = ""
    """URL of the gateway; empty in a simulated run, which has none."""
    close_gateway: Callable[[], object] = lambda: None
    """Ends the gateway."""

    def new_rollout(self, task: Task, renderer: Renderer | None = None) -> AgentRollout:
        """Return a rollout without calls. `renderer`: that of the task's own chat template."""
        return AgentRollout(task, renderer or self.renderer, self.dialects)

    def begin(self, key: int, rollout: AgentRollout, session: str | None = None, *, next_piece: int = 0) -> None:
        """Open a rollout to calls, and start its agent unless that comes by itself. `session`: as for
        `AgentLoop.start`. `next_piece`: number of its next piece."""
        is_ours = self.launcher.launch(rollout.task)
        self.loop.start(key, rollout, session="" if is_ours else session, next_piece=next_piece)
        if is_ours:
            self.loop.rewind(key)

    def close(self) -> None:
        """End the agents, then the loop, then the gateway."""
        self.launcher.close()
        self.loop.close()
        self.close_gateway()
