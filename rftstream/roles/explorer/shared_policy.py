"""One policy for two loops: the turn loop's requests and the agent loop's are sampled together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rftstream.contracts.versions import VersionName
from rftstream.policies.base import Completion, Policy, SampleRequest

if TYPE_CHECKING:
    from rftstream.weights.snapshot import RawTensor


class PolicyShare:
    """A policy as one of its users sees it: `step` returns that user's completions alone. `share_policy` makes it.

    Everything else is the policy's own; weights are loaded through any of the shares."""

    def __init__(self, policy: Policy, is_own: Callable[[str], bool], others: list[Completion]) -> None:
        self._policy, self._is_own, self._finished = policy, is_own, others

    @property
    def version(self) -> VersionName | None:
        """The version whose weights sample the next token."""
        return self._policy.version

    @property
    def slots(self) -> int:
        """Number of requests that may be active at once, of all users together."""
        return self._policy.slots

    @property
    def num_active(self) -> int:
        """Number of requests of all users that are active, or have finished and wait for their user."""
        return self._policy.num_active + len(self._finished)

    def load(self, tensors: Mapping[str, RawTensor], name: VersionName) -> None:
        """Take over new weights."""
        self._policy.load(tensors, name)

    def submit(self, request: SampleRequest) -> None:
        """Begin a request."""
        self._policy.submit(request)

    def so_far(self, request_id: str) -> Completion | None:
        """Return what was sampled for an active request; None for one that waits for its user."""
        return self._policy.so_far(request_id)

    def abort(self, request_id: str) -> None:
        """Forget a request, also one that has finished and waits for its user."""
        self._finished[:] = [one for one in self._finished if one.request_id != request_id]
        self._policy.abort(request_id)

    def step(self) -> list[Completion]:
        """Do a slice of work, and return this user's finished completions; the others wait for their user's `step`."""
        if self._policy.num_active:
            self._finished += self._policy.step()
        own = [one for one in self._finished if self._is_own(one.request_id)]
        if own:
            self._finished[:] = [one for one in self._finished if not self._is_own(one.request_id)]
        return own

    def idle_s(self) -> float:
        """Return the seconds for which `step` will have nothing to do."""
        return 0.0 if self._finished else self._policy.idle_s()

    def close(self) -> None:
        """End the policy."""
        self._policy.close()


def share_policy(policy: Policy, is_first: Callable[[str], bool]) -> tuple[PolicyShare, PolicyShare]:
    """Return two shares of a policy: requests whose id `is_first` accepts are the first one's."""
    finished: list[Completion] = []
    return (
        PolicyShare(policy, is_first, finished),
        PolicyShare(policy, lambda request_id: not is_first(request_id), finished),
    )
