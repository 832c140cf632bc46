"""The additional parts of a role that agents call. An explorer has them, and so has an evaluator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rftstream.contracts.tasks import Task
from rftstream.contracts.versions import VersionName
from rftstream.models.rendering import Renderer
from rftstream.policies.base import Completion, Policy, SampleRequest
from rftstream.roles.explorer.agents.launcher import AgentLauncher
from rftstream.roles.explorer.agents.loop import AgentLoop
from rftstream.roles.explorer.agents.rollout import AgentRollout
from rftstream.roles.explorer.model_calls import CallInbox, Dialect

if TYPE_CHECKING:
    from rftstream.weights.snapshot import RawTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentParts:
    """The agent loop, the launcher of agents, and the gateway. `workers/agents.py` makes it. A step calls `new_rollout`
    and `begin` for each task of an agent, drives the loop, and calls `close` at the end."""

    loop: AgentLoop
    """The rollouts that agents make."""
    inbox: CallInbox
    """Queue of requests from the gateway to the loop."""
    launcher: AgentLauncher
    """Starts the agents that run here."""
    environments: frozenset[str]
    """Names of the environments whose tasks agents make."""
    dialects: Mapping[str, Dialect]
    """Name of a dialect on the log -> the dialect."""
    renderer: Renderer
    """Renderer for tasks without a chat template of their own."""
    gateway_url: str = ""
    """URL of the gateway; empty in a simulated run, which has none."""
    close_gateway: Callable[[], object] = lambda: None
    """Closes the gateway."""

    def new_rollout(self, task: Task, renderer: Renderer | None = None) -> AgentRollout:
        """Return a rollout without calls. `renderer` is for a task with its own chat template."""
        return AgentRollout(task, renderer or self.renderer, self.dialects)

    def begin(self, key: int, rollout: AgentRollout, session: str | None = None, *, next_piece: int = 0) -> None:
        """Open a rollout to calls, and start its agent unless the agent runs elsewhere. `session` is as for
        `AgentLoop.start`. `next_piece` is the number of its next piece."""
        is_ours = self.launcher.launch(rollout.task)
        self.loop.start(key, rollout, session="" if is_ours else session, next_piece=next_piece)
        if is_ours:
            self.loop.rewind(key)

    def close(self) -> None:
        """End the agents, then the loop, then the gateway."""
        self.launcher.close()
        self.loop.close()
        self.close_gateway()


# ------------------------------------------------------------------------------------------
#
# One policy for two loops: the turn loop's requests and the agent loop's are sampled together.


class PolicyShare:
    """One user's view of a shared policy: `step` returns only this user's completions. `share_policy` makes it.

    All other state is the policy's own. Weights can be loaded through either view."""

    def __init__(self, policy: Policy, is_own: Callable[[str], bool], others: list[Completion]) -> None:
        self._policy, self._is_own, self._finished = policy, is_own, others

    @property
    def version(self) -> VersionName | None:
        """The version whose weights sample the next token."""
        return self._policy.version

    @property
    def slots(self) -> int:
        """Number of requests of all users that may be active at once."""
        return self._policy.slots

    @property
    def num_active(self) -> int:
        """Number of requests of all users that are active, or finished and not yet returned."""
        return self._policy.num_active + len(self._finished)

    def load(self, tensors: Mapping[str, RawTensor], name: VersionName) -> None:
        """Load new weights."""
        self._policy.load(tensors, name)

    def submit(self, request: SampleRequest) -> None:
        """Begin a request."""
        self._policy.submit(request)

    def so_far(self, request_id: str) -> Completion | None:
        """Return the tokens of an active request so far; None for a finished request that is not yet returned."""
        return self._policy.so_far(request_id)

    def abort(self, request_id: str) -> None:
        """Forget a request, also one that is finished and not yet returned."""
        self._finished[:] = [one for one in self._finished if one.request_id != request_id]
        self._policy.abort(request_id)

    def step(self) -> list[Completion]:
        """Do a slice of work, and return this user's finished completions. Other completions are kept for their user's
        `step`."""
        if self._policy.num_active:
            self._finished += self._policy.step()
        own = [one for one in self._finished if self._is_own(one.request_id)]
        if own:
            self._finished[:] = [one for one in self._finished if not self._is_own(one.request_id)]
        return own

    def idle_s(self) -> float:
        """Return the seconds for which `step` will have no work."""
        return 0.0 if self._finished else self._policy.idle_s()

    def close(self) -> None:
        """Close the policy."""
        self._policy.close()


def share_policy(policy: Policy, is_first: Callable[[str], bool]) -> tuple[PolicyShare, PolicyShare]:
    """Return two views of a policy. Requests whose id `is_first` accepts belong to the first view."""
    finished: list[Completion] = []
    return (
        PolicyShare(policy, is_first, finished),
        PolicyShare(policy, lambda request_id: not is_first(request_id), finished),
    )
