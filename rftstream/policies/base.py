"""The inference engine as the explorer sees it: submit prompts, take decoding steps, exchange weights between two.

A policy runs in the explorer's one thread. `step` does a bounded slice of work (one decoding step of everything
that is active, or a look at what an engine of its own has finished), so that the loop can poll, heartbeat and take
over weights in between, and so that a simulated run is driven step by step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rftstream.messages import Sampling, VersionName, VersionSpan

if TYPE_CHECKING:
    import numpy as np

    from rftstream.weights.snapshot import RawTensor


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
    """stop, length, or error."""
    error: str | None = None


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

    def abort(self, request_id: str) -> None:
        """Forgets an active request; unknown ids are ignored."""

    def step(self) -> list[Completion]:
        """A bounded slice of work; the requests that finished in it."""

    def close(self) -> None: ...
