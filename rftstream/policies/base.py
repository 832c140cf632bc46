"""The inference engine as the explorer sees it: submit prompts, take decoding steps, exchange weights between two.

A policy runs in the explorer's one thread. `step` does a bounded slice of work (one decoding step of everything
that is active, or a look at what an engine of its own has finished), so that the loop can poll, heartbeat and take
over weights in between, and so that a simulated run is driven step by step.

A rollout may go on elsewhere: `so_far` tells what was sampled of a request, and a request with `num_sampled` goes on
from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rftstream.contracts.rollouts import VersionSpan
from rftstream.contracts.tasks import Sampling
from rftstream.contracts.versions import VersionName

if TYPE_CHECKING:
    import numpy as np

    from rftstream.weights.snapshot import RawTensor


LOOK_S = 0.05
"""How long a policy with active requests is left alone at most: so soon the next of them is begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    request_id: str
    token_ids: tuple[int, ...]
    """The prompt, and what was sampled so far of it when a rollout goes on."""
    sampling: Sampling
    seed: int
    """The sampled tokens depend on it, the prompt, the weights and nothing else (as far as the engine can)."""
    max_tokens: int
    """Of this completion; what is left of the rollout's and the context's limit."""
    num_sampled: int = 0
    """So many of the last `token_ids` were sampled of this completion before: they count for penalties, min_tokens and
    stop strings, and chance goes on behind them. An engine whose random numbers begin anew with each request must not
    draw those again that these tokens were drawn with."""
    sampler_state: bytes | None = None
    """What `so_far` gave with these tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    request_id: str
    token_ids: np.ndarray
    """int32 [T], the stop token included if it was sampled."""
    behavior_logprobs: np.ndarray
    """float32 [T], of the distribution that was sampled from: after temperature, penalties and truncation."""
    versions: tuple[VersionSpan, ...]
    """`start` counts from the completion's first token."""
    finish_reason: str
    """stop, length, or error; `unfinished` of what `so_far` gives."""
    error: str | None = None
    sampler_state: bytes | None = None
    """Of unfinished ones: what another engine of this kind needs, beside the request and the tokens, to go on as this
    one would have; None where these are enough."""


class Policy(Protocol):
    @property
    def version(self) -> VersionName | None:
        """Whose weights the next token is sampled with; None before the first `load`."""

    @property
    def slots(self) -> int:
        """How many requests may be active at once."""

    @property
    def num_active(self) -> int: ...

    def load(self, tensors: Mapping[str, RawTensor], name: VersionName) -> None:
        """New weights, between two steps; what is active goes on with them. Copies what it keeps: the bytes change with
        the next version."""

    def submit(self, request: SampleRequest) -> None: ...

    def so_far(self, request_id: str) -> Completion | None:
        """What was sampled of an active request since it was submitted, `num_sampled` left out. None if it is unknown,
        or has finished and `step` is about to tell so."""

    def abort(self, request_id: str) -> None:
        """Forgets an active request; unknown ids are ignored."""

    def step(self) -> list[Completion]:
        """A bounded slice of work; the requests that finished in it."""

    def idle_s(self) -> float:
        """Seconds for which `step` has nothing to do: 0 while it computes tokens itself, `math.inf` until somebody
        submits. An engine that works beside it says how long it may be left alone; LOOK_S at most it is."""

    def close(self) -> None: ...


def without_tokens(request: SampleRequest, reason: str, error: str | None) -> Completion:
    """Of a request that nothing is sampled for."""
    import numpy as np

    return Completion(
        request_id=request.request_id,
        token_ids=np.zeros(0, np.int32),
        behavior_logprobs=np.zeros(0, np.float32),
        versions=(),
        finish_reason=reason,
        error=error,
    )
