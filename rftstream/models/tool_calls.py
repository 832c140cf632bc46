"""Taking apart what the policy wrote: text, reasoning and tool calls. Nothing here raises.

This is the way for models whose format no library knows (`families` has the others). It reads, in this order:

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>    Hermes, Qwen, and many that follow them
    [TOOL_CALLS][{"name": ..., "arguments": {...}}]             Mistral; also [TOOL_CALLS]name[ARGS]{...}
    <|python_tag|>{"name": ..., "parameters": {...}}            Llama 3; also the bare object as the whole text
    ```json blocks that hold such an object

Calls are looked for only where tools are offered, and never inside of reasoning. A call that cannot be read is a
`ToolCall` without arguments and with an error, in words for the model.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rftstream.contracts.assistant import AssistantMessage, ToolCall
from rftstream.contracts.tasks import ChatMessage
from rftstream.models.chat_template import END_THINK, THINK, with_thinking

OPEN_CALL, END_CALL = "<tool_call>", "</tool_call>"
PYTHON_TAG, CALLS_TAG, ARGS_TAG = "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"
THOUGHT_MARKS = ((THINK, END_THINK), ("[THINK]", "[/THINK]"))
MARKS = frozenset({OPEN_CALL, END_CALL, PYTHON_TAG, CALLS_TAG, ARGS_TAG, *sum(THOUGHT_MARKS, ())})
"""Marks that are read here. They stay in the text that is read, though a tokenizer may have them as special tokens."""
PROMPT_END = 32
"""Tokens at the end of a prompt in which the mark that opens reasoning is looked for."""
EXPECTED = 'write one JSON object with "name" and "arguments"'

_FENCE = re.compile(r"```(?:json|tool_call|tool_code)?[ \t]*\n(.*?)(```|\Z)", re.DOTALL)
_NAMED_CALL = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w*)?\[ARGS\]")
_BEGUN_CALL = re.compile(r'\{\s*"(?:type"\s*:\s*"function"\s*,\s*")?(?:name|function)"\s*:')
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """One call, or what should have been one, before it has an id."""

    text: str
    """As it was written."""
    name: str = ""
    arguments: dict[str, Any] | None = None
    error: str | None = None


_Found = tuple[str, list[_Attempt]]
"""The text without the calls, and the calls."""


def parse_text(
    written: str,
    *,
    text: str,
    tools: Sequence[Mapping[str, Any]],
    finish_reason: str,
    turn: int,
    in_thought: bool = False,
) -> AssistantMessage:
    """Return what was written, taken apart.

    `written` has those special tokens in it that are among MARKS, `text` has none. `in_thought`: whether the prompt
    ended inside of reasoning."""
    reasoning, rest, is_closed = split_reasoning(written, in_thought=in_thought)
    calls: list[_Attempt] = []
    if tools and is_closed:
        was_cut = finish_reason != "stop"
        for find in (_tagged, _after_calls_tag, _after_python_tag, _bare, _fenced):
            if (found := find(rest, was_cut)) is not None:
                rest, calls = found[0].strip(), found[1]
                break
    return AssistantMessage(
        content=rest,
        reasoning=reasoning,
        tool_calls=tuple(
            ToolCall(
                id=call_id(turn, index),
                name=call.name,
                arguments=call.arguments,
                text=call.text,
                error=call.error,
            )
            for index, call in enumerate(calls)
        ),
        finish_reason=finish_reason,
        text=text,
    )


def call_id(turn: int, index: int) -> str:
    """Return the id of a call of a turn."""
    return f"call_{turn}_{index}"


def chat_message(said: AssistantMessage, *, shows_calls: bool) -> ChatMessage:
    """Return the message as a chat template is to see it; `shows_calls`: whether it shows tool calls."""
    calls, content = said.tool_calls, said.content
    if calls and not (shows_calls and all(call.arguments is not None for call in calls)):
        content = "\n".join(filter(None, (content, *dict.fromkeys(call.text for call in calls))))
        calls = ()
    return ChatMessage(
        role="assistant",
        content=with_thinking(said.reasoning, content),
        tool_calls=tuple(
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ),
    )


def split_reasoning(written: str, *, in_thought: bool) -> tuple[str, str, bool]:
    """Return the reasoning without its marks, the rest, and whether the reasoning has an end (or there is none)."""
    begun = written.lstrip()
    for opening, closing in THOUGHT_MARKS:
        opens = begun.startswith(opening)
        if not opens and not (in_thought and (closing in written or opening == THINK)):
            continue
        body = begun[len(opening) :] if opens else written
        reasoning, end, rest = body.partition(closing)
        return reasoning.strip(), rest.lstrip("\n"), bool(end)
    return "", written, True


def ends_in_thought(prompt: str) -> bool:
    """Return whether a prompt ends with the mark that opens reasoning."""
    return prompt.rstrip().endswith(tuple(opening for opening, _ in THOUGHT_MARKS))


def checked_arguments(arguments: Any) -> str | None:
    """Return what is wrong with the arguments of a call, in words for the model; None if they are a JSON object."""
    if not isinstance(arguments, dict):
        return f"The arguments of the tool call are {_kind(arguments)}, expected a JSON object; {EXPECTED}."
    try:
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError):
        return "The arguments of the tool call have a number or a character that JSON does not have."
    return None


def _tagged(rest: str, was_cut: bool) -> _Found | None:
    if OPEN_CALL not in rest:
        return None
    outside, calls, place = "", [], 0
    while (start := rest.find(OPEN_CALL, place)) >= 0:
        outside += rest[place:start]
        inside = start + len(OPEN_CALL)
        value, end, problem = _read(rest, inside)
        closing = rest.find(END_CALL, inside if problem else end)
        place = len(rest) if closing < 0 else closing + len(END_CALL)
        whole = rest[start:place]
        if closing < 0:
            calls.append(_failed(whole, f"The tool call has no end: {END_CALL} is missing", was_cut))
        elif problem or rest[end:closing].strip():
            calls.append(_failed(whole, _no_json(problem or "text follows the JSON object"), was_cut=False))
        else:
            calls += _attempts(value, whole)
    return outside + rest[place:], calls


def _after_calls_tag(rest: str, was_cut: bool) -> _Found | None:
    before, tag, _ = rest.partition(CALLS_TAG)
    if not tag:
        return None
    calls: list[_Attempt] = []
    for part in rest[len(before) :].split(CALLS_TAG)[1:]:
        named = _NAMED_CALL.match(part)
        value, end, problem = _read(part, named.end() if named else 0)
        if problem or part[end:].strip():
            name = named[1] if named else ""
            calls.append(_failed(tag + part, _no_json(problem or "text follows the JSON"), was_cut, name))
        elif named:
            calls.append(_attempt({"name": named[1], "arguments": value}, tag + part))
        else:
            calls += _attempts(value, tag + part)
    return before, calls


def _after_python_tag(rest: str, was_cut: bool) -> _Found | None:
    before, tag, after = rest.partition(PYTHON_TAG)
    if not tag:
        return None
    calls, problem = _objects(after)
    return before, calls if calls else [_failed(tag + after, _no_json(problem), was_cut)]


def _bare(rest: str, was_cut: bool) -> _Found | None:
    text = rest.strip()
    if not text.startswith("{"):
        return None
    calls, problem = _objects(text)
    if calls:
        return "", calls
    return ("", [_failed(text, _no_json(problem), was_cut)]) if problem and _BEGUN_CALL.match(text) else None


def _fenced(rest: str, was_cut: bool) -> _Found | None:
    outside, calls, place = "", [], 0
    for block in _FENCE.finditer(rest):
        found, problem = _objects(block[1])
        if not found and problem and _BEGUN_CALL.match(block[1].strip()):
            found = [_failed(block[0], _no_json(problem), was_cut and not block[2])]
        if found:
            outside, place = outside + rest[place : block.start()], block.end()
            calls += found
    return (outside + rest[place:], calls) if calls else None


def _objects(text: str) -> tuple[list[_Attempt], str]:
    """Return the calls that a text consists of, `;` or white space between them. None, and a problem, if it is not
    JSON; none and no problem if it is something else than calls."""
    calls: list[_Attempt] = []
    place = 0
    while text[place:].strip():
        value, end, problem = _read(text, place)
        if problem:
            return [], problem
        if not (isinstance(value, dict) and _function_of(value).keys() & {"arguments", "parameters"}):
            return [], ""
        calls.append(_attempt(value, text[place:end].strip()))
        place = end
        if text[place:].lstrip().startswith(";"):
            place = text.index(";", place) + 1
    return calls, "" if calls else "nothing is there"


def _read(text: str, place: int) -> tuple[Any, int, str]:
    """Return the JSON value at a place, where it ends, and what is wrong with it, if anything is."""
    while place < len(text) and text[place].isspace():
        place += 1
    try:
        value, end = _DECODER.raw_decode(text, place)
    except json.JSONDecodeError as error:
        return None, place, f"{error.msg} at character {error.pos - place}"
    except (ValueError, RecursionError) as error:  # a number of a million digits, a million brackets
        return None, place, str(error).partition(";")[0] or "too deep"
    return value, end, ""


def _attempts(value: Any, text: str) -> Iterator[_Attempt]:
    yield from (_attempt(one, text) for one in (value if isinstance(value, list) and value else [value]))


def _attempt(value: Any, text: str) -> _Attempt:
    if not isinstance(value, dict):
        return _Attempt(text=text, error=f"The tool call is {_kind(value)}, expected a JSON object; {EXPECTED}.")
    function = _function_of(value)
    name = function.get("name")
    if not isinstance(name, str) or not name:
        return _Attempt(text=text, error=f'The tool call has no "name"; {EXPECTED}.')
    arguments = function.get("arguments", function.get("parameters", {}))
    error = checked_arguments(arguments)
    return _Attempt(text=text, name=_clean(name), arguments=arguments if error is None else None, error=error)


def _function_of(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the map that has name and arguments: itself, or what it has under `function`."""
    inner = value.get("function")
    return inner if isinstance(inner, dict) and "name" not in value else value


def _failed(text: str, error: str, was_cut: bool, name: str = "") -> _Attempt:
    if not name and (found := _NAME.search(text)):
        name = found[1]
    error = "The tool call was cut off before its end" if was_cut else error
    return _Attempt(text=text, name=_clean(name), error=f"{error}; {EXPECTED}.")


def _no_json(problem: str) -> str:
    return f"The tool call is not valid JSON: {problem}"


def _clean(text: str) -> str:
    """Return the text without halves of surrogate pairs, which no encoding has."""
    return text.encode(errors="replace").decode()


def _kind(value: Any) -> str:
    kinds: dict[type, str] = {
        type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list",
    }  # fmt: skip
    return kinds.get(type(value), "something else")


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON value")


_constant_hook: Callable[[str], Any] = _constant
_DECODER = json.JSONDecoder(strict=False, parse_float=_number, parse_constant=_constant_hook)
"""Takes line breaks in strings, which models write in code; no numbers that are none."""
