"""Model calls of agents: the requests and their answers. The gateway reads requests from HTTP, the agent loop answers
them.

Requests come from the server's thread and are answered in the explorer's thread. `CallInbox` connects the two."""

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
"""Seconds after which a client may retry, for temporary refusals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The refusal of a request."""

    status: int
    """HTTP status: 400 not supported, 401 unknown key, 409 the rollout has ended, 413 too large, 429 too many, 503 not
    now."""
    sentence: str
    """Error message for users: what was found, what was expected."""
    retry_after_s: float | None = None
    """Seconds after which the same request may succeed; None if it would be refused again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledCall:
    """The sampled answer of a call. The agent loop makes it, and the dialect turns it into the body of a response."""

    call_id: str
    """`rollout_id/call/N`."""
    created: int
    """Unix time when the call finished, in seconds."""
    model: str
    """The name that the agent called the model by."""
    said: AssistantMessage
    """The assistant's turn, parsed."""
    num_prompt_tokens: int
    """Tokens before the sampled ones."""
    num_sampled_tokens: int
    """Tokens that were sampled."""
    stop: tuple[str, ...] = ()
    """The agent's stop strings; the answer ends before the first of them."""


class Dialect(Protocol):
    """One of the HTTP APIs that agents use. The gateway has one object for each.

    `answer` is called once for each call, after sampling, and its result is recorded. `served` is called with each
    recorded answer, so that later calls that begin with this answer are recognized."""

    @property
    def name(self) -> str:
        """The name on the log."""

    def answer(self, result: SampledCall) -> dict[str, Any]:
        """Return the body of the answer, for a response without streaming."""

    def served(self, answer: Mapping[str, Any]) -> ChatMessage:
        """Return the assistant's message in the form in which `ModelCall.messages` holds it when an agent sends it
        back."""


AnswerOf = Callable[[str], bytes | None]
"""Call id, as in SampledCall -> body of the call's answer; None if the rollout has no such call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """One request for an assistant's turn."""

    dialect: Dialect
    """Turns the result into an answer."""
    messages: tuple[ChatMessage, ...]
    """The whole conversation; empty while it is `unresolved`."""
    unresolved: Callable[[AnswerOf], tuple[ChatMessage, ...] | Refusal] | None = None
    """Returns the conversation of a request that refers to earlier answers; None if `messages` is complete."""
    tools: tuple[dict[str, Any], ...] = ()
    """Tools for the model, in the form that chat templates take."""
    model: str = ""
    """The name that the agent calls the model by."""
    role: str = ""
    """The role that the model plays, in an episode of several agents; empty for none."""
    max_tokens: int | None = None
    """Most tokens to sample for this call; None for as many as the rollout has left."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer, in addition to the task's."""
    constraint: Constraint | None = None
    """Required form of the answer; None for any form."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """Settings that the agent asked for, in the form that is recorded."""
    digest: str = ""
    """`sha256:<hex>` of the request; equal requests have the same digest."""
    idempotency_key: str | None = None
    """Name that the client gives to all tries of this request; None without one."""
    is_retry: bool = False
    """Whether the client marks the request as a retry."""
    stream: bool = False
    """Whether the answer is streamed as events."""
    include_usage: bool = False
    """Whether the events include the usage (chat completions only)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountWanted:
    """A request for the number of tokens in a call's prompt."""

    call: ModelCall
    """The call, which is not made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutEnd:
    """A request to end the agent's rollout."""

    reward: float | None = None
    """The rollout's reward; None if the taskset's reward decides."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward."""
    roles: Mapping[str, float | None] = field(default_factory=dict)
    """Reward of each role, in an episode of several agents; None for a role that is not trained."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics that the agent measured."""
    error: str | None = None
    """Why the agent failed; None if it did not."""
    cut_short: str | None = None
    """Why the agent was stopped early; its calls count. None if it ended by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionWanted:
    """A request for a rollout, from an agent that runs elsewhere."""

    name: str = ""
    """Name of the request, the same for all tries, so that a second try gets the same rollout; empty without one."""
    idle_timeout_s: float | None = None
    """Seconds without a request after which the rollout ends, at most the explorer's setting; None for that setting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallAnswer:
    """The answer to a call that is on the log."""

    number: int
    """The call's number in its rollout."""
    body: bytes
    """The JSON answer. A retry gets the same bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensCounted:
    """The length of a prompt."""

    count: int
    """Number of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutEnded:
    """The answer to RolloutEnd: the rollout is on the log."""

    rollout_id: str
    """The rollout."""
    status: str
    """How the rollout ended, a RolloutStatus."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionGranted:
    """A rollout for an agent that runs elsewhere. The grant is on the log."""

    rollout_id: str
    """The rollout."""
    problem: Mapping[str, Any]
    """Messages, tools and info of the problem, without the reference answer."""
    seed: int
    """The task's seed, for random choices of the agent."""


Wanted = ModelCall | CountWanted | RolloutEnd | SessionWanted
"""The kinds of requests that an agent can make."""
AgentAnswer = CallAnswer | TokensCounted | RolloutEnded | SessionGranted | Refusal
"""The kinds of answers to an agent's request."""


@dataclass(slots=True, kw_only=True)
class AgentRequest:
    """A request on its way. The server makes it, and the agent loop answers it by calling `reply` exactly once."""

    rollout_id: str
    """The rollout that the request's key belongs to; empty for SessionWanted."""
    wanted: Wanted
    """Request of the agent."""
    reply: Callable[[AgentAnswer], None]
    """Receives the answer. It may be called from any thread, and does not block."""
    launch: str | None = None
    """The launch for which the request's key was made; empty for a key without a launch. None if the explorer itself
    asks, for the current launch."""
    is_gone: bool = False
    """Whether the client has disconnected. The server sets it. The request is processed all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """A notice that the server has written a call's answer to the client's connection."""

    rollout_id: str
    """The rollout of the call."""
    number: int
    """The call's number."""
    launch: str | None = None
    """The launch for which the request's key was made, as in AgentRequest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentBegins:
    """A notice that an agent started by the explorer begins to run. Answers to requests of its earlier runs are
    dropped."""

    rollout_id: str
    """The rollout that the agent makes."""
    launch: str
    """The name of the launch. From now on no other launch of this rollout may send requests."""
    keeps_time: bool = False
    """Whether the agent's runner ends it when it takes too long, so that its silence means nothing."""


class CallInbox:
    """The queue of requests from the server's thread to the explorer's thread. The server calls `put`, and the agent
    loop calls `take` in each slice. After `close` every request is refused with 503."""

    def __init__(self, wake: Callable[[], object] = lambda: None) -> None:
        """`wake` ends the explorer's wait. The server's thread calls it when work arrives in an empty queue. A
        Delivered notice does not count as work: it only has to be read before the entries after it."""
        self._items: deque[AgentRequest | Delivered | AgentBegins] = deque()
        self._wake = wake
        self._has_woken = False
        """Whether the explorer was woken and has not read the queue since."""
        self._is_closed = False

    @property
    def has_woken(self) -> bool:
        """Whether there is work."""
        return self._has_woken

    def put(self, *items: AgentRequest | Delivered | AgentBegins) -> None:
        """Add requests and notices as one unit. Any thread may call this."""
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
        """Return the entries since the last call, in order."""
        self._has_woken = False  # reset before the queue is read, so that new entries wake the explorer again
        taken = []
        while self._items:
            taken.append(self._items.popleft())
        return taken

    def close(self) -> None:
        """Refuse all waiting and all later requests."""
        self._is_closed = True
        for item in self.take():
            if isinstance(item, AgentRequest):
                item.reply(moving())


def canonical(value: Any) -> bytes:
    """Return plain values as canonical JSON: values that are equal as JSON give the same bytes. True and 1 differ."""
    return msgspec.json.encode(value, order="sorted")


def digest(value: Any) -> str:
    """Return `sha256:<hex>` of plain values in canonical JSON."""
    return f"sha256:{hashlib.sha256(canonical(value)).hexdigest()}"


def moving() -> Refusal:
    """Return the refusal for a rollout that is moving to another explorer."""
    return Refusal(
        status=503,
        sentence="the rollout is moving to another process; send the same request again",
        retry_after_s=RETRY_AFTER_S,
    )
