"""A check: whether a chat template lets a rollout of several turns go on in one segment.

It plays a conversation as the turn loop would, with what a policy could have said, and asks the renderer to continue
each prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rftstream.contracts.tasks import ChatMessage
from rftstream.errors import ConfigError
from rftstream.models.rendering import Renderer
from rftstream.models.splice import BreakReason, Conversation

REPLIES = {
    "a plain reply": "4",
    "a reply with a thought": "<think>\n2+2\n</think>\n\n4",
    "a reply with white space around it": "  4  ",
}
"""Kind of reply -> what the policy could have said. Templates treat these kinds differently."""
CALL = '<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
"""A call of a tool that the policy could have written, where tools are offered."""
ASKED = "3+3="
"""Text of the user in later turns, or of a tool's result."""
TURNS = 3

MEANINGS = {
    BreakReason.template_changes_history: "the template writes earlier messages in another way",
    BreakReason.turn_hidden: "the template does not show what the assistant said",
    BreakReason.other_stop: "the template ends the turn with another token than the sampled one",
    BreakReason.no_stop: "nobody can tell how the turn ends",
    BreakReason.tail_varies: "what the template writes after the turn depends on what was said in it",
    BreakReason.pieces_merge: "the tokenizer would merge the end of the turn with what follows",
}
"""Reason -> what it says of the template."""


def first_break(renderer: Renderer, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Return in words where a later turn would begin a new segment, and why; None if none does."""
    for what, reply in _replies(tools):
        try:
            said = renderer.encode(reply)
            renderer.encode(ASKED)
        except ConfigError:  # a policy with these tokens could not say it
            continue
        # The policy ends its turn with one of the stop tokens. It is enough if the template goes with one of them.
        ends: list[tuple[int, ...]] = [(token,) for token in sorted(renderer.stop_token_ids)] or [()]
        breaks = [_break_after(renderer, messages, tools, (*said, *end)) for end in ends]
        if (first := breaks[0]) is not None and None not in breaks:
            turn, why = first
            if not isinstance(why, BreakReason):
                return f"it refuses turn {turn}: {why}"
            return f"after {what} turn {turn} begins a new segment: {why} ({MEANINGS.get(why, 'it should not')})"
    return None


def _replies(tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    yield from REPLIES.items()
    if tools:
        yield "a tool call", CALL.format(name=tools[0].get("function", tools[0]).get("name"))


def _break_after(
    renderer: Renderer, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], completion: Sequence[int]
) -> tuple[int, BreakReason | str] | None:
    """Return the first turn that does not continue, and why, if each turn is this completion. The reason is a text if
    the template refuses the turn."""
    before = Conversation(messages=tuple(messages), tools=tuple(tools))
    try:
        known = [*renderer.render(before.messages, before.tools)]
    except ConfigError:  # said where the first prompt itself is rendered
        return None
    for turn in range(2, TURNS + 1):
        said = renderer.parse(known, completion, tools=before.tools, finish_reason="stop", turn=turn - 2)
        calls = [ChatMessage(role="tool", content=ASKED, tool_call_id=call.id) for call in said.tool_calls]
        after = calls or [ChatMessage(role="user", content=ASKED)]
        now = Conversation(
            messages=(*before.messages, renderer.as_chat_message(said, completion), *after), tools=before.tools
        )
        known += completion
        try:
            found = renderer.continue_prompt(known, len(completion), before, now)
        except ConfigError as error:
            return turn, str(error)
        if found.break_reason is not None:
            return turn, found.break_reason
        known += found.token_ids
        before = now
    return None
