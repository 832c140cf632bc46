"""Model calls of agents: what an agent asks for, and what it is told. The gateway reads them off HTTP, the agent loop
answers them.

Requests come from the server's thread and are answered in the explorer's: `CallInbox` stands between the two.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from rftstream.contracts.assistant import AssistantMessage
from rftstream.contracts.tasks import ChatMessage
from rftstream.policies.base import Constraint

RETRY_AFTER_S = 1.0
"""Seconds after which a client may ask again, for refusals that pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The refusal of a request."""

    status: int
    """Status of HTTP: 400 what cannot be done exactly, 401 an unknown key, 409 the rollout has ended, 413 too large,
    429 too many, 503 not now."""
    sentence: str
    """For people: what was found, what was expected."""
    retry_after_s: float | None = None
    """Seconds after which the same request may be done; None: it would be refused again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledCall:
    """The answer that was sampled for a call. The agent loop makes it; the dialect turns it into the body of a
    response."""

    call_id: str
    """`rollout_id/call/N`."""
    created: int
    """Unix time when the call was finished, in seconds."""
    model: str
    """The name that the agent called the model by."""
    said: AssistantMessage
    """The assistant's turn, taken apart."""
    num_prompt_tokens: int
    """Tokens before the sampled ones."""
    num_sampled_tokens: int
    """Tokens that were sampled."""
    stop: tuple[str, ...] = ()
    """The agent's stop strings; the answer ends before the first of them."""


class Dialect(Protocol):
    """One of the HTTP APIs that agents speak. The gateway has one object for each.

    For a call, `answer` is asked once, when its tokens are there; what it returns is recorded. `served` is asked with
    each recorded answer; so later calls are recognized that begin with it."""

    @property
    def name(self) -> str:
        """The name on the log."""

    def answer(self, result: SampledCall) -> dict[str, Any]:
        """Return the body of the answer, without streaming."""

    def served(self, answer: Mapping[str, Any]) -> ChatMessage:
        """Return the assistant's message as `ModelCall.messages` will hold it when an agent sends the answer back."""


AnswerOf = Callable[[str], bytes | None]
"""Id of a call, as SampledCall has it -> the body of its answer; None if the rollout has no such call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """One request for an assistant's turn."""

    dialect: Dialect
    """Turns the result into an answer."""
    messages: tuple[ChatMessage, ...]
    """The whole conversation; empty while it is `unresolved`."""
    unresolved: Callable[[AnswerOf], tuple[ChatMessage, ...] | Refusal] | None = None
    """Returns the conversation of a request that refers to earlier answers; None: `messages` has it."""
    tools: tuple[dict[str, Any], ...] = ()
    """The tools that the model is shown, as chat templates take them."""
    model: str = ""
    """The name that the agent calls the model by."""
    max_tokens: int | None = None
    """The most tokens to sample for this call; None: as many as the rollout has left."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer, beside the task's."""
    constraint: Constraint | None = None
    """The form that the answer must have; None: any."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """Settings that the agent asked for, as they are recorded."""
    digest: str = ""
    """`sha256:<hex>` of the request. Two equal requests have the same."""
    idempotency_key: str | None = None
    """Name that the client gives to all tries of this request; None if it gives none."""
    is_retry: bool = False
    """Whether the client says that it has sent this request before."""
    stream: bool = False
    """Whether the answer is wanted as events."""
    include_usage: bool = False
    """Whether the events are to tell the usage (chat completions only)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountWanted:
    """An agent asks how many tokens the prompt of a call would have."""

    call: ModelCall
    """The call, which is not made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutEnd:
    """An agent says that its rollout is over."""

    reward: float | None = None
    """Its reward; None: the taskset's reward decides."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics that the agent measured."""
    error: str | None = None
    """Why the agent failed; None if it did not."""
    cut_short: str | None = None
    """Why the agent was ended before it was done; its calls count. None if it ended by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionWanted:
    """An agent that runs elsewhere asks for a rollout to do."""

    name: str = ""
    """The same for all tries of one request, so that a second try gets the same rollout; empty: no name."""
    idle_timeout_s: float | None = None
    """Seconds of silence after which the rollout ends, at most the explorer's; None: the explorer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallAnswer:
    """The answer to a call that is on the log."""

    number: int
    """The call's number in its rollout."""
    body: bytes
    """The JSON answer. A retry gets the same bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensCounted:
    """How long a prompt would be."""

    count: int
    """Its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutEnded:
    """The rollout is on the log."""

    rollout_id: str
    """The rollout."""
    status: str
    """How it ended, as RolloutStatus."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionGranted:
    """A rollout to do, for an agent elsewhere. That it was given away is on the log."""

    rollout_id: str
    """The rollout."""
    problem: Mapping[str, Any]
    """Messages, tools and info of the problem. The reference answer is not told."""
    seed: int
    """The task's seed, for what the agent draws itself."""


Wanted = ModelCall | CountWanted | RolloutEnd | SessionWanted
"""The kinds of requests that an agent can make."""
AgentAnswer = CallAnswer | TokensCounted | RolloutEnded | SessionGranted | Refusal
"""The kinds of answers to an agent's request."""


@dataclass(slots=True, kw_only=True)
class AgentRequest:
    """A request on its way. The server makes it, and the agent loop answers it by `reply`, exactly once."""

    rollout_id: str
    """The rollout that the request's key belongs to; empty for SessionWanted."""
    wanted: Wanted
    """Request of the agent."""
    reply: Callable[[AgentAnswer], None]
    """Takes the answer. It may be called from any thread, and does not block."""
    launch: str | None = None
    """The launch of an agent that the request's key was made for; empty for a key without one. None: the explorer asks
    itself, for the launch that it has now."""
    is_gone: bool = False
    """Whether the client has gone away. The server sets it; the request is done all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """The server has handed a call's answer to the client's connection."""

    rollout_id: str
    """The rollout of the call."""
    number: int
    """The call's number."""
    launch: str | None = None
    """Launch of an agent that the request's key was made for, as in AgentRequest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentBegins:
    """A notice that an agent of the explorer's own begins to run. Answers to requests of its earlier runs are
    dropped."""

    rollout_id: str
    """The rollout that it makes."""
    launch: str
    """The name of the launch: from now on no other one of this rollout may ask for anything."""


class CallInbox:
    """The queue of requests from the server's thread to the explorer's. The server calls `put`; the agent loop calls
    `take` in each slice. After `close` every request is refused with 503."""

    def __init__(self, wake: Callable[[], object] = lambda: None) -> None:
        """`wake` ends the explorer's wait. The server's thread calls it when there is something to do and was nothing.
        A notice that an answer was delivered is nothing to do: it only has to be read before what comes after it."""
        self._items: deque[AgentRequest | Delivered | AgentBegins] = deque()
        self._wake = wake
        self._has_woken = False
        """Whether the explorer was woken, and has not looked since."""
        self._is_closed = False

    @property
    def has_woken(self) -> bool:
        """Whether there is something to do."""
        return self._has_woken

    def put(self, *items: AgentRequest | Delivered | AgentBegins) -> None:
        """Add requests and notices, which come together. Any thread may call this."""
        if self._is_closed:
            for item in items:
                if isinstance(item, AgentRequest):
                    item.reply(moving())
            return
        self._items.extend(items)
        if not self._has_woken and not all(isinstance(item, Delivered) for item in items):
            self._has_woken = True
            self._wake()

    def take(self) -> list[AgentRequest | Delivered | AgentBegins]:
        """Return what came since the last call, in order."""
        self._has_woken = False  # before it looks: what comes meanwhile wakes it again
        taken = []
        while self._items:
            taken.append(self._items.popleft())
        return taken

    def close(self) -> None:
        """Refuse what is there, and what comes from now on."""
        self._is_closed = True
        for item in self.take():
            if isinstance(item, AgentRequest):
                item.reply(moving())


def canonical(value: Any) -> bytes:
    """Return plain values as JSON that is the same for those that are equal as JSON. True and 1 are not."""
    return msgspec.json.encode(value, order="sorted")


def digest(value: Any) -> str:
    """Return `sha256:<hex>` of plain values, as `canonical` tells them apart."""
    return f"sha256:{hashlib.sha256(canonical(value)).hexdigest()}"


def moving() -> Refusal:
    """Return the refusal for a rollout that is on its way to another explorer."""
    return Refusal(
        status=503,
        sentence="the rollout is moving to another process; send the same request again",
        retry_after_s=RETRY_AFTER_S,
    )
