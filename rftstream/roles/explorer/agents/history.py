"""The conversations of an agent, and the recorded call that a new call continues.

A call continues the deepest recorded call whose conversation and answer are the beginning of the new call's
conversation; the tools must be the same. The known conversations form a tree with one place for each message. Messages
are compared in the form that an agent sends, so a served answer is recognized whatever the client did to its JSON.
Reasoning is left out, since clients drop it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rftstream.contracts.rollouts import AgentCall
from rftstream.contracts.tasks import ChatMessage
from rftstream.models.splice import Conversation
from rftstream.roles.explorer.model_calls import canonical, digest


@dataclass(slots=True, eq=False)
class HistoryNode:
    """A place in the tree of conversations: a message together with all messages before it."""

    calls: list[RecordedCall] = field(default_factory=list)
    """The calls whose answer is this message."""
    following: dict[Hashable, HistoryNode] = field(default_factory=dict)
    """Next messages -> their places."""


@dataclass(slots=True, kw_only=True)
class RecordedCall:
    """A call that was sampled. `AgentRollout` makes it. Only `is_delivered` changes later."""

    call: AgentCall
    """The record of the call on the log."""
    answer: bytes
    """Body of the call's answer."""
    parent: int | None
    """Number of the call that this one continues; None if it continues none."""
    new_messages: tuple[ChatMessage, ...]
    """The conversation after the parent's answer."""
    conversation: Conversation
    """Conversation that the prompt was rendered from, with answers in the form that the template takes."""
    said: ChatMessage
    """The answer in the form that the template takes."""
    place: HistoryNode
    """Place in the tree at the end of the answer, with messages in the form that an agent sends."""
    is_delivered: bool = False
    """Whether the agent has certainly received the answer."""

    @property
    def end(self) -> int:
        """Position in its segment after the call's last token."""
        return self.call.start + self.call.count


class CallHistory:
    """The recorded calls of a rollout. `AgentRollout` makes it, and calls `add` for each call. For a new call it asks
    `deepest` and `of_request`."""

    def __init__(self) -> None:
        self.calls: list[RecordedCall] = []
        """Calls by their numbers."""
        self._roots: dict[str, HistoryNode] = {}
        """Digest of tools -> root of the conversations with these tools."""
        self._of_request: dict[str, list[RecordedCall]] = {}

    def place_behind(
        self, parent: RecordedCall | None, tools_digest: str, messages: Iterable[ChatMessage], said: ChatMessage
    ) -> HistoryNode:
        """Return the place of a conversation with its answer, in the form that the agent sends. The conversation is the
        parent's, up to its answer, followed by `messages` and `said`."""
        place = self._roots.setdefault(tools_digest, HistoryNode()) if parent is None else parent.place
        for message in (*messages, said):
            place = place.following.setdefault(_identity(message), HistoryNode())
        return place

    def add(self, recorded: RecordedCall) -> None:
        """Add the next call."""
        assert recorded.call.number == len(self.calls)
        self.calls.append(recorded)
        recorded.place.calls.append(recorded)
        self._of_request.setdefault(recorded.call.request_digest, []).append(recorded)

    def of_request(self, request_digest: str) -> Sequence[RecordedCall]:
        """Return the calls with equal requests, in order."""
        return self._of_request.get(request_digest, ())

    def deepest(self, messages: Sequence[ChatMessage], tools_digest: str) -> tuple[int, Sequence[RecordedCall]]:
        """Return the number of messages in the deepest known conversation, with its answer, and the calls that have it;
        0 and an empty list if there is none."""
        found: tuple[int, Sequence[RecordedCall]] = (0, ())
        place = self._roots.get(tools_digest)
        for count, message in enumerate(messages, start=1):
            place = None if place is None else place.following.get(_identity(message))
            if place is None:
                break
            if place.calls:
                found = count, place.calls
        return found


def _identity(message: ChatMessage) -> Hashable:
    """Return a key that is the same for equal messages."""
    calls = canonical(message.tool_calls) if message.tool_calls else b""  # True and 1 are equal, but differ here
    return message.role, message.content, message.name, message.tool_call_id, calls


def digest_of_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the digest of the tools that a model is shown."""
    return digest(tools)
