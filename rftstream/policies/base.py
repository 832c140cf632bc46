"""The inference engine as the explorer sees it: submit prompts, take decoding steps, exchange weights in between.

A policy runs in the explorer's one thread. `step` does a bounded slice of work: one decoding step of everything that is
active, or a look at what an engine of its own has finished. So the loop can poll, send heartbeats and take over weights
in between, and a simulated run is driven step by step.

Another explorer may go on with a rollout: `so_far` tells what was sampled for a request, and a request with
`num_sampled` goes on from there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rftstream.contracts.rollouts import ImageSpan, VersionSpan
from rftstream.contracts.tasks import Sampling
from rftstream.contracts.versions import VersionName

if TYPE_CHECKING:
    import numpy as np

    from rftstream.weights.snapshot import RawTensor


LOOK_S = 0.05
"""Longest time in seconds that a policy with active requests is left alone, and that a new request waits."""


CONSTRAINTS = ("json", "json_object", "regex", "choice", "grammar")
"""Kinds of constraints, by vLLM's names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """The form that the text of a completion must have. Only a policy that declares `constrains` is given any. Tokens
    that break it have no probability, and recorded logprobs are those of the rest."""

    kind: str
    """One of CONSTRAINTS."""
    value: Any
    """A JSON schema, True, a regular expression, the texts to choose from, or a grammar in EBNF."""
    setting: str = ""
    """The setting that asked for it, for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """A completion to sample. The explorer makes it from a turn's prompt and gives it to `Policy.submit`."""

    request_id: str
    """Names the request in `so_far`, `abort` and its completion; no two active requests share it."""
    token_ids: tuple[int, ...]
    """The prompt, followed by what was sampled of the completion before, when a rollout goes on."""
    sampling: Sampling
    """Temperature, penalties, truncation and stop conditions."""
    seed: int
    """Seed of chance. Seed, prompt and weights alone decide which tokens are sampled, as far as the engine can."""
    max_tokens: int
    """Largest number of tokens of this completion: what is left of the rollout's and the context's limit."""
    num_sampled: int = 0
    """Number of the last `token_ids` that were sampled of this completion before. They count for penalties, min_tokens
    and stop strings, and chance goes on behind them. An engine whose random numbers begin anew with each request must
    not draw the numbers again that these tokens were drawn with."""
    sampler_state: bytes | None = None
    """The `sampler_state` that `so_far` gave together with these tokens."""
    images: tuple[ImageSpan, ...] = ()
    """Where images stand in `token_ids`. Only a policy that declares `takes_images` is given any."""
    group_id: str = ""
    """Names the requests that begin with the same prompt: those of a group. With several servers, one of them gets
    them. Empty: there are no others."""
    rollout_id: str = ""
    """Names the requests of which each may begin with the one before: those of a rollout. With several servers, one of
    them gets them. Empty: `request_id` does."""
    may_go_on: bool = False
    """Whether a later request may begin with these tokens and what is sampled, as the next turn of a rollout does. An
    engine may keep what it has computed for that."""
    constraint: Constraint | None = None
    """The form that the completion must have; None: any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The completion of a request. `Policy.step` returns it when the request has finished."""

    request_id: str
    """The id of the request."""
    token_ids: np.ndarray
    """Sampled tokens, int32 [T], the stop token included if it was sampled."""
    behavior_logprobs: np.ndarray
    """Logprobs of the sampled tokens, float32 [T], under the distribution that they were sampled from: after
    temperature, penalties and truncation."""
    versions: tuple[VersionSpan, ...]
    """Versions that sampled the tokens; `start` counts from the completion's first token."""
    finish_reason: str
    """`stop`, `length` or `error`; `unfinished` in what `so_far` returns."""
    error: str | None = None
    """Description of the error, where the finish reason is `error`."""
    sampler_state: bytes | None = None
    """In an unfinished completion: what another engine of this kind needs, beside request and tokens, to go on as this
    one would have. None where request and tokens are enough."""


class Policy(Protocol):
    """An engine that samples completions with the weights it was given last.

    The explorer (and the evaluator) makes it when it starts, loads a version, and calls `step` in each round of its
    loop; the next version is loaded between two steps. The life of a request:

        policy.load(tensors, name)
        policy.submit(SampleRequest(request_id="g1/0", token_ids=prompt, sampling=sampling, seed=1, max_tokens=64))
        while policy.num_active:
            for completion in policy.step():
                print(completion.request_id, completion.finish_reason, len(completion.token_ids))
        policy.close()
    """

    @property
    def version(self) -> VersionName | None:
        """The version whose weights sample the next token; None before the first `load`."""

    @property
    def slots(self) -> int:
        """Number of requests that may be active at once. The explorer submits no more than that."""

    @property
    def num_active(self) -> int:
        """Number of requests that were submitted and have neither finished nor been aborted."""

    def load(self, tensors: Mapping[str, RawTensor], name: VersionName) -> None:
        """Take over new weights; active requests go on with them from their next token.

        The explorer calls it between two steps. The policy copies what it keeps, since the bytes of `tensors` change
        with the next version. Afterwards `version` is `name`."""

    def submit(self, request: SampleRequest) -> None:
        """Begin a request. The explorer calls it after the first `load`, while fewer than `slots` are active.

        A request that cannot be sampled comes back from a later `step` with finish_reason `error`."""

    def so_far(self, request_id: str) -> Completion | None:
        """Return what was sampled for an active request since it was submitted, without its `num_sampled` tokens.

        The explorer calls it when it saves unfinished rollouts. The request goes on. None if the request is unknown, or
        has finished and `step` is about to return it."""

    def abort(self, request_id: str) -> None:
        """Forget an active request; `step` never returns it. Unknown ids are ignored."""

    def step(self) -> list[Completion]:
        """Do a bounded slice of work, and return the requests that finished in it.

        The explorer calls it in each round, unless `idle_s` says that there is nothing to do."""

    def idle_s(self) -> float:
        """Return the seconds for which `step` will have nothing to do.

        The explorer asks it before it waits for the log. A policy that computes tokens itself returns 0 while requests
        are active, and `math.inf` until the next `submit`. A policy whose engine works beside it returns at most
        LOOK_S."""

    def close(self) -> None:
        """End the engine and give back its memory. Active requests are dropped; no other call may follow."""


def without_tokens(request: SampleRequest, reason: str, error: str | None) -> Completion:
    """Return the completion of a request for which nothing was sampled."""
    import numpy as np

    return Completion(
        request_id=request.request_id,
        token_ids=np.zeros(0, np.int32),
        behavior_logprobs=np.zeros(0, np.float32),
        versions=(),
        finish_reason=reason,
        error=error,
    )


def room_for(request: SampleRequest, context: int | None) -> int:
    """Return how many tokens a request may have sampled where prompt and completion have `context` tokens in all."""
    return request.max_tokens if context is None else min(request.max_tokens, context - len(request.token_ids))


def part_seed(request: SampleRequest) -> int:
    """Return the seed for an engine whose random numbers begin anew with each request: one that goes on gets another,
    so that it draws other numbers than before."""
    digest = hashlib.sha256(f"{request.seed}/{request.num_sampled}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
