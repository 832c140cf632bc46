"""Checks whether a tool call survives a round trip: the chat template renders it as the policy's message, and it is
parsed again as in the turn loop."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from rftstream.contracts.assistant import AssistantMessage
from rftstream.contracts.tasks import ChatMessage
from rftstream.errors import ConfigError, pip_install
from rftstream.models.rendering import Renderer, joined
from rftstream.models.splice import BreakReason, Conversation

CALL_ID = "abcdef123"
SAMPLES: Mapping[str, Any] = {
    "string": "\n    two words\n\n",
    "integer": 12,
    "number": 0.5,
    "boolean": True,
    "array": [],
    "object": {},
    "null": None,
}
"""Type of an argument -> sample value. White space at the ends of texts shows readers that strip it wrongly."""


def doubts_about_tools(
    renderer: Renderer, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], *, is_shown: bool
) -> Iterator[str]:
    """Yield problems with the chat template's treatment of tools, in sentences. `is_shown`: whether demonstrations show
    the policy the form of calls, so that the prompt need not explain it."""
    if not is_shown and not shows_tools(renderer, messages, tools):
        yield (
            "the chat template does not show the tools, so the policy is not told of them; give a template that does "
            "(model.chat_template), or tell of them in the prompt; then a turn that is JSON alone is a call, "
            '{"name": ..., "arguments": {...}}'
        )
    if (why := lost_call(renderer, messages, tools)) is not None:
        yield (
            f"a tool call does not come back as it was made: {why}. Such calls reach the environment so; give another "
            f"template (model.chat_template), or {pip_install('rftstream[agents]')}, which reads more forms"
        )


def shows_tools(renderer: Renderer, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the template writes anything about the tools into the prompt."""
    return renderer.render(messages, tools) != renderer.render(messages)


def lost_call(renderer: Renderer, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Return in words how a call of the first tool changes in the round trip. None if it does not change, if the
    template shows no calls or refuses this one, or if a policy with these tokens could not write it."""
    function = tools[0].get("function", tools[0])
    name, arguments = str(function.get("name")), sample_arguments(function)
    call = {"id": CALL_ID, "type": "function", "function": {"name": name, "arguments": arguments}}
    asked = takewhile(lambda message: message.role != "assistant", messages)
    made = ChatMessage(role="assistant", content="", tool_calls=(call,))
    try:
        prompt, said = renderer.render_turn([*asked, made], tools)
    except ConfigError:
        return None
    written = joined(renderer.pieces(said))
    if name not in written:
        return None
    found = renderer.parse(prompt, said, tools=tools, finish_reason="stop", turn=0)
    why = _difference(found, name, arguments)
    return None if why is None else f"{why}; the template writes it as {_short(written)}"


def sample_arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return sample arguments for a function: one for each argument with a type, of that type."""
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    found: dict[str, Any] = {}
    for name, schema in (properties if isinstance(properties, Mapping) else {}).items():
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        if isinstance(kind, str) and kind in SAMPLES and "enum" not in schema:
            found[str(name)] = SAMPLES[kind]
    return found


def _difference(found: AssistantMessage, name: str, arguments: Mapping[str, Any]) -> str | None:
    if not found.tool_calls:
        return "it is read as an answer"
    first, *others = found.tool_calls
    if first.error is not None:
        return f"it cannot be read: {first.error}"
    if first.name != name:
        return f"it is read as a call of {first.name!r}, expected {name!r}"
    got = first.arguments or {}
    for key in (*arguments, *got):
        if key not in got or key not in arguments or json.dumps(got[key]) != json.dumps(arguments[key]):
            return f"its argument {key!r} is read as {_short(got.get(key))}, expected {_short(arguments.get(key))}"
    if others or found.content.strip():
        return f"with it comes {_short(found.content or others[0].text)}"
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


# ------------------------------- checks whether a chat template keeps the turns of a rollout in one segment


REPLIES = {
    "a plain reply": "4",
    "a reply with a thought": "<think>\n2+2\n</think>\n\n4",
    "a reply with white space around it": "  4  ",
}
"""Kind of reply -> a reply of the policy. Templates treat these kinds differently."""
CALL = '<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
"""A tool call that the policy could write if tools are offered."""
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
"""Reason -> its meaning for the template."""


def first_break(renderer: Renderer, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Return in words which turn would start a new segment, and why; None if no turn does."""
    for what, reply in _replies(tools):
        try:
            said = renderer.encode(reply)
            renderer.encode(ASKED)
        except ConfigError:  # a policy with these tokens could not write it
            continue
        # The policy ends its turn with one of the stop tokens. It is enough if the template agrees with one of them.
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
    """Return the first turn that does not continue the segment, and why, if each turn is this completion. The reason is
    a text if the template refuses the turn."""
    before = Conversation(messages=tuple(messages), tools=tuple(tools))
    try:
        known = [*renderer.render(before.messages, before.tools)]
    except ConfigError:  # the check that renders the first prompt reports it
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
