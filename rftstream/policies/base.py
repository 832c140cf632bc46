"""The inference engine as the explorer sees it: submit prompts, take decoding steps, load new weights between steps.

A policy runs in the explorer's only thread. `step` does a bounded slice of work: one decoding step of all active
requests, or a check for results of an engine that runs beside it. So the loop can poll, send heartbeats and load
weights between steps, and a simulation can drive it step by step.

Another explorer may resume a rollout: `so_far` returns the tokens sampled for a request, and a request with
`num_sampled` resumes from them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rftstream.contracts.rollouts import ImageSpan, VersionSpan
from rftstream.contracts.tasks import ChatMessage, Sampling
from rftstream.contracts.versions import VersionName

if TYPE_CHECKING:
    import numpy as np

    from rftstream.contracts.beside import Columns
    from rftstream.weights.snapshot import RawTensor


LOOK_S = 0.05
"""Longest time in seconds between two steps of a policy with active requests, and until a new request is seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """The form that the text of a completion must have. Only a policy that declares `constrains` gets constraints.
    Tokens that break the form have probability 0; recorded logprobs are those of the remaining distribution."""

    kind: str
    """One of FORMS."""
    value: Any
    """A JSON schema, True, a regular expression, the texts to choose from, or a grammar in GBNF."""
    setting: str = ""
    """The setting that requires the form, for messages."""


def form_of(sampling: Sampling, setting: str = "sampling.grammar") -> Constraint | None:
    """Return the form that the sampling settings ask for; None for any form."""
    for kind, value in sampling.grammar.items():
        return Constraint(kind=kind, value=value, setting=setting)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """A completion to sample. The explorer makes it from a turn's prompt and gives it to `Policy.submit`."""

    request_id: str
    """Id of the request in `so_far`, `abort` and its completion. No two active requests share an id."""
    token_ids: tuple[int, ...]
    """The prompt. For a resumed rollout, the tokens of the completion that were already sampled follow it."""
    sampling: Sampling
    """Temperature, penalties, truncation and stop conditions."""
    seed: int
    """Random seed. Seed, prompt and weights alone decide which tokens are sampled, as far as the engine allows."""
    max_tokens: int
    """Largest number of tokens of this completion: the remainder of the rollout's and the context's limit."""
    num_sampled: int = 0
    """Number of tokens at the end of `token_ids` that were already sampled for this completion. They count for
    penalties, min_tokens and stop strings, and random numbers continue after them. An engine whose random numbers
    restart with each request must not draw the numbers of these tokens again."""
    sampler_state: bytes | None = None
    """The `sampler_state` that `so_far` returned together with these tokens."""
    images: tuple[ImageSpan, ...] = ()
    """Places of images in `token_ids`. Only a policy that declares `takes_images` gets any."""
    group_id: str = ""
    """Id shared by requests that begin with the same prompt: those of a group. With several servers, all of them go to
    one server. Empty: there are no others."""
    rollout_id: str = ""
    """Id shared by requests in which each may begin with the previous one: those of a rollout. With several servers,
    all of them go to one server. Empty: `request_id` is used."""
    may_go_on: bool = False
    """Whether a later request may begin with these tokens and the sampled ones, as the next turn of a rollout does. An
    engine may keep its computed states for that request."""
    constraint: Constraint | None = None
    """The form that the completion must have; None for any form."""
    messages: tuple[ChatMessage, ...] = ()
    """The conversation that the prompt renders, for engines that show it. Empty if only the tokens are known."""
    min_version: int = 0
    """Oldest version that may sample a token. The explorer submits no request to a policy whose version is older."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The completion of a request. `Policy.step` returns it when the request has finished."""

    request_id: str
    """The id of the request."""
    token_ids: np.ndarray
    """Sampled tokens, int32 [T], the stop token included if it was sampled."""
    behavior_logprobs: np.ndarray
    """Logprobs of the sampled tokens, float32 [T], under the distribution from which they were sampled: after
    temperature, penalties and truncation."""
    versions: tuple[VersionSpan, ...]
    """Versions that sampled the tokens; `start` counts from the completion's first token."""
    finish_reason: str
    """`stop`, `length` or `error`; `unfinished` in what `so_far` returns."""
    error: str | None = None
    """Description of the error, if the finish reason is `error`."""
    beside: Columns = field(default_factory=dict)
    """Values that the trainer needs beside the tokens of the request and the sampled ones, all of them or the last:
    those recorded in the passes that this engine took. Earlier passes may have had others."""
    sampler_state: bytes | None = None
    """In an unfinished completion: the state that another engine of this kind needs, besides request and tokens, to
    continue exactly as this one would. None if request and tokens are enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """The load of an engine, as it says itself. A policy that declares `says_load` has `engine_load`, which returns it.
    The explorer decides by it how many rollouts it samples at once (`explorer.max_concurrent = "auto"`)."""

    num_tokens: int
    """Tokens sampled since the engine started."""
    busy_s: float
    """Seconds since the start in which the engine sampled them. Time without requests or asleep does not count."""
    num_waiting: int = 0
    """Requests for which the engine has no place now."""
    num_refused: int = 0
    """Number of times since the start that the engine had no room: it put back a running request, to compute it again
    later, or a server answered that it has too many requests."""
    memory: float = 0.0
    """Used share of the memory that running requests may take, 0 to 1; 0 if it is not known. Where it is nearly 1,
    the explorer samples fewer at once, so an engine that can do with full memory says less."""
    lag_s: float = 0.0
    """Seconds of `busy_s` that newly sampled tokens may be older than: an engine that says only whole completions
    counts tokens when a request ends."""


class Policy(Protocol):
    """An engine that samples completions with the newest loaded weights.

    The explorer or the evaluator makes it at its start, loads a version, and calls `step` in each round of its loop. It
    loads the next version between two steps. The life of a request:

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
        """Number of requests that may be active at once. The explorer submits no more."""

    @property
    def num_active(self) -> int:
        """Number of requests that were submitted and have neither finished nor been aborted."""

    def load(self, tensors: Mapping[str, RawTensor], name: VersionName) -> None:
        """Load new weights; active requests use them from their next token on.

        The explorer calls it between two steps. The policy copies the tensors that it keeps, since the bytes of
        `tensors` change with the next version. Afterwards `version` is `name`."""

    def submit(self, request: SampleRequest) -> None:
        """Begin a request. The explorer calls it after the first `load`, while fewer than `slots` requests are active.

        A request that cannot be sampled comes back from a later `step` with finish_reason `error`."""

    def so_far(self, request_id: str) -> Completion | None:
        """Return the tokens sampled for an active request since it was submitted, without its `num_sampled` tokens.

        The explorer calls it to save unfinished rollouts. The request continues. None if the request is unknown, or has
        finished and `step` is about to return it."""

    def abort(self, request_id: str) -> None:
        """Forget an active request; `step` never returns it. Unknown ids are ignored."""

    def step(self) -> list[Completion]:
        """Do a bounded slice of work, and return the requests that finished in it.

        The explorer calls it in each round, unless `idle_s` says that there is no work."""

    def idle_s(self) -> float:
        """Return the seconds for which `step` will have no work.

        The explorer calls it before it waits for the log. A policy that computes tokens itself returns 0 while requests
        are active, and `math.inf` until the next `submit`. A policy whose engine runs beside it returns at most
        LOOK_S."""

    def close(self) -> None:
        """End the engine and release its memory. Active requests are dropped; no other call may follow."""


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
    """Return how many tokens may be sampled for a request if prompt and completion may have `context` tokens
    together."""
    return request.max_tokens if context is None else min(request.max_tokens, context - len(request.token_ids))


def part_seed(request: SampleRequest) -> int:
    """Return the seed for an engine whose random numbers restart with each request. A resumed request gets another
    seed, so that the engine does not draw the same numbers again."""
    digest = hashlib.sha256(f"{request.seed}/{request.num_sampled}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
