"""The policy's output in one turn, parsed: text, reasoning and tool calls.

A renderer makes it from the sampled tokens (`Renderer.parse`). Environments get it, and turns on the log keep it.
"""

from __future__ import annotations

from typing import Any

from rftstream.contracts.structs import message_part


@message_part(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One tool call of an assistant turn."""

    id: str
    """Names the call within its turn: as the model wrote it, where its form has ids, else `call_TURN_INDEX`, both from
    0."""
    name: str
    """Name of the tool; empty where it could not be read."""
    arguments: dict[str, Any] | None
    """The arguments; None where the model wrote something else than a JSON object."""
    text: str
    """The call as the model wrote it."""
    error: str | None = None
    """Why the call could not be read, for the model to see; None for a call that could be."""


@message_part(frozen=True, slots=True, kw_only=True)
class AssistantMessage:
    """One assistant turn as an environment sees it."""

    content: str
    """The text without reasoning and tool calls."""
    reasoning: str = ""
    """The thinking that the model wrote, without the marks around it."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The calls in the order of the text."""
    finish_reason: str = "stop"
    """Why the turn ended: stop, length or repetition. After the last two the rollout ends, whatever the reply is."""
    text: str = ""
    """The whole sampled text, decoded without special tokens."""
