"""A demonstration is a conversation to imitate, or a preference pair. Topic `experts`."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from rftstream.contracts.message_spec import Message, message
from rftstream.contracts.ranges import NonNegativeInt
from rftstream.contracts.rules import Violation, presence, rule
from rftstream.contracts.structs import message_part
from rftstream.contracts.tasks import ChatMessage


@message_part(frozen=True, slots=True, kw_only=True)
class Preference:
    """Two answers to the same messages."""

    prompt: tuple[ChatMessage, ...]
    """The messages that both answers reply to."""
    chosen: tuple[ChatMessage, ...]
    """The better answer."""
    rejected: tuple[ChatMessage, ...]
    """The worse answer."""


@message(
    "demonstration",
    version=3,
    topic="experts",
    key=lambda demonstration: demonstration.demonstration_id,
    headers=lambda demonstration: {"number": demonstration.number},
)
class Demonstration(Message):
    """Expert experience. `experts`: `rftstream experts load`, gateway -> buffer. Chat or preference, never both."""

    demonstration_id: str
    """Derived from source and content."""
    source: str
    """File or service that it came from."""
    messages: tuple[ChatMessage, ...] = ()
    """A chat; the assistant messages are trained on."""
    preference: Preference | None = None
    """A preference pair."""
    weight: float = 1.0
    """Factor of its loss."""
    info: dict[str, Any] = field(default_factory=dict)
    """Everything else that the source had; plain values only."""
    number: NonNegativeInt = 0
    """Dense from 0, in the order in which they were loaded; `number mod partitions` is the partition."""


@rule(
    Demonstration,
    json_schema={
        "oneOf": [
            {"required": ["messages"], "properties": {"messages": {"minItems": 1}, "preference": {"type": "null"}}},
            {"required": ["preference"], "properties": {"messages": {"maxItems": 0}, "preference": {"type": "object"}}},
        ]
    },
)
def _check_demonstration(demonstration: Demonstration) -> Violation | None:
    if bool(demonstration.messages) is (demonstration.preference is not None):
        return ".preference", (
            f"got {presence(demonstration.preference)} beside {len(demonstration.messages)} "
            "messages, expected exactly one of chat and preference pair"
        )
    return None
