"""What an agent has said and heard so far, and which recorded call a new one goes on from.

A call goes on from the deepest recorded call whose conversation and answer its own conversation begins with, tools
included. Conversations are compared by chains of digests: the digest of a conversation is that of its last message and
of the chain before it. Messages are compared as an agent sends them, so a served answer is recognized whatever the
client did to its JSON; reasoning is left out, since clients drop it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rftstream.contracts.rollouts import AgentCall
from rftstream.contracts.tasks import ChatMessage
from rftstream.models.splice import Conversation


@dataclass(slots=True, kw_only=True)
class RecordedCall:
    """A call that has its tokens. `AgentRollout` makes it, and changes only whether it is committed and delivered."""

    call: AgentCall
    """What stands on the log of it."""
    answer: bytes
    """The body of its answer."""
    parent: int | None
    """Number of the call that it goes on from."""
    new_messages: tuple[ChatMessage, ...]
    """The conversation after the parent's answer."""
    conversation: Conversation
    """What its prompt was rendered from: answers in it are as the template is to see them."""
    said: ChatMessage
    """Its own answer as the template is to see it."""
    chain: str
    """Digest of its conversation and answer."""
    is_committed: bool = False
    """Whether it is on the log."""
    is_delivered: bool = False
    """Whether the agent is known to have got the answer."""

    @property
    def end(self) -> int:
        """The position in its segment behind its last token."""
        return self.call.start + self.call.count


class CallHistory:
    """The recorded calls of a rollout. `AgentRollout` makes it, calls `add` for each, and `deepest` for a new one."""

    def __init__(self) -> None:
        self.calls: list[RecordedCall] = []
        """By their numbers."""
        self._numbers: dict[str, list[int]] = {}
        """Chain -> the calls that it leads up to."""

    def add(self, recorded: RecordedCall) -> None:
        """Take the next call."""
        assert recorded.call.number == len(self.calls)
        self._numbers.setdefault(recorded.chain, []).append(recorded.call.number)
        self.calls.append(recorded)

    def deepest(self, messages: Sequence[ChatMessage], tools_digest: str) -> tuple[int, list[RecordedCall]]:
        """Return how many messages belong to the deepest known conversation, its answer included, and the calls that
        have it; 0 and none if there is no such call."""
        found: tuple[int, list[RecordedCall]] = (0, [])
        for count, chain in enumerate(chains(messages, tools_digest), start=1):
            if (numbers := self._numbers.get(chain)) is not None:
                found = count, [self.calls[number] for number in numbers]
        return found


def chains(messages: Sequence[ChatMessage], tools_digest: str) -> Iterator[str]:
    """Yield the digest of the conversation up to each message."""
    chain = tools_digest
    for message in messages:
        chain = extend_chain(chain, message)
        yield chain


def extend_chain(chain: str, message: ChatMessage) -> str:
    """Return the digest of a conversation with one message more."""
    values: list[Any] = [chain, message.role, message.content, message.name, message.tool_call_id]
    return digest([*values, list(message.tool_calls)])


def digest(value: Any) -> str:
    """Return `sha256:<hex>` of plain values. Two that are equal as JSON have the same; True and 1 are not equal."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def digest_of_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the digest of the tools that a model is shown."""
    return digest(list(tools))
