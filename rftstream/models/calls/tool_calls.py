"""Splits completions into text, reasoning and tool calls. Nothing here raises.

It looks for these forms, in this order:

    calls between marks                                         listed in `call_blocks`
    [TOOL_CALLS][{"name": ..., "arguments": {...}}]             Mistral; also [TOOL_CALLS]name[ARGS]{...}
    <|python_tag|>{"name": ..., "parameters": {...}}            Llama 3; also the bare object as the whole text
    [name(key=value), ...]                                      Llama 3.2 and 4, as the whole text
    ```json blocks that hold such an object

Calls are looked for only where tools are offered, and never inside reasoning. A call that cannot be read becomes a
`ToolCall` without arguments and with an error message for the model. `families` finds the calls of models that write
them inside reasoning or in channels of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rftstream.contracts.assistant import AssistantMessage, ToolCall
from rftstream.contracts.tasks import ChatMessage
from rftstream.models.calls.call_blocks import BLOCK_MARKS, Tools, find_blocks
from rftstream.models.calls.call_reading import (
    FORMLESS,
    Found,
    WrittenCall,
    attempt_of,
    attempts_of,
    called,
    failed,
    function_of,
    no_json,
    read_value,
)
from rftstream.models.calls.python_calls import begun_call, python_calls
from rftstream.models.chat_template import END_THINK, THINK, with_thinking

PYTHON_TAG, CALLS_TAG, ID_TAG, ARGS_TAG = "<|python_tag|>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
THOUGHT_MARKS = ((THINK, END_THINK), ("[THINK]", "[/THINK]"))
MARKS = BLOCK_MARKS | {PYTHON_TAG, CALLS_TAG, ID_TAG, ARGS_TAG, *sum(THOUGHT_MARKS, ())}
"""Marks that are read here. They are kept in the decoded text, even if the tokenizer has them as special tokens."""
PROMPT_END = 32
"""Number of tokens at the end of a prompt that are searched for the mark that opens reasoning."""

_FENCE = re.compile(r"```(?:json|tool_call|tool_code)?[ \t]*\n(.*?)(```|\Z)", re.DOTALL)
_NAMED_CALL = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]([^\[\s]*)\s*)?\[ARGS\]")
_BEGUN_CALL = re.compile(r'\{\s*"(?:type"\s*:\s*"function"\s*,\s*")?(?:name|function)"\s*:')

_Find = Callable[[str, bool, Tools], Found | None]


def parse_text(
    written: str,
    *,
    text: str,
    tools: Sequence[Mapping[str, Any]],
    finish_reason: str,
    turn: int,
    in_thought: bool = False,
    on_lines: bool | None = None,
) -> AssistantMessage:
    """Return a completion split into its parts.

    `written` contains the special tokens that are in MARKS; `text` contains none. `in_thought`: whether the prompt
    ended inside reasoning. `on_lines`: whether the template writes tagged arguments on lines of their own."""
    reasoning, rest, is_closed = split_reasoning(written, in_thought=in_thought)
    calls: list[WrittenCall] = []
    if tools and is_closed:
        found = _find_calls(rest, finish_reason != "stop", Tools.of(tools, on_lines))
        rest, calls = (rest, []) if found is None else (found[0].strip(), found[1])
    return AssistantMessage(
        content=rest,
        reasoning=reasoning,
        tool_calls=tool_calls(calls, turn),
        finish_reason=finish_reason,
        text=text,
    )


def tool_calls(calls: Sequence[WrittenCall], turn: int) -> tuple[ToolCall, ...]:
    """Return the calls of a turn. A call keeps the id that the model gave. It gets an id of ours if the model gave
    none, or if an earlier call of the turn has the same id."""
    made: dict[str, ToolCall] = {}
    for index, call in enumerate(calls):
        name = call.id if call.id and call.id not in made else f"call_{turn}_{index}"
        made[name] = ToolCall(id=name, name=call.name, arguments=call.arguments, text=call.text, error=call.error)
    return tuple(made.values())


def _find_calls(rest: str, was_cut: bool, tools: Tools) -> Found | None:
    """Return the text without its calls, and the calls; None if there are none. The beginning of the text is checked
    before marks inside it, since a mark inside a call means nothing."""
    plain: tuple[_Find, ...] = (_bare_python, _bare, _fenced)
    begun = plain if rest.lstrip().startswith(("{", "[", "```")) else ()
    for find in begun:
        if (found := find(rest, was_cut, tools)) is not None and not any(call.error for call in found[1]):
            return found
    found_first = (find(rest, was_cut, tools) for find in (find_blocks, _after_calls_tag, _after_python_tag, *plain))
    return next((found for found in found_first if found is not None), None)


def _bare_python(rest: str, was_cut: bool, tools: Tools) -> Found | None:
    text = rest.strip()
    name = begun_call(text) if text.startswith("[") else None
    if name is None:
        return None
    calls, problem = _python(text)
    if not calls and name in tools.schemas:
        calls = [failed(text, f"{FORMLESS}: {problem}", was_cut, name)]
    return ("", calls) if calls else None


def chat_message(said: AssistantMessage, *, shows_calls: bool) -> ChatMessage:
    """Return the message in the form that a chat template gets. `shows_calls`: whether the template shows tool
    calls."""
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
    """Return the reasoning without its marks, the rest of the text, and whether the reasoning is closed (also True if
    there is none)."""
    begun = written.lstrip()
    for opening, closing in THOUGHT_MARKS:
        opens = begun.startswith(opening)
        if not opens and not (in_thought and closing in written):
            continue
        body = begun[len(opening) :] if opens else written
        reasoning, end, rest = body.partition(closing)
        return reasoning.strip(), rest.lstrip("\n"), bool(end)
    return (written.strip(), "", False) if in_thought else ("", written, True)


def ends_in_thought(prompt: str) -> bool:
    """Return whether a prompt ends with the mark that opens reasoning."""
    return prompt.rstrip().endswith(tuple(opening for opening, _ in THOUGHT_MARKS))


def _after_calls_tag(rest: str, was_cut: bool, _: Tools) -> Found | None:
    before, tag, _after = rest.partition(CALLS_TAG)
    if not tag:
        return None
    calls: list[WrittenCall] = []
    for part in rest[len(before) :].split(CALLS_TAG)[1:]:
        named = _NAMED_CALL.match(part)
        value, end, problem = read_value(part, named.end() if named else 0)
        if problem or part[end:].strip():
            name = named[1] if named else ""
            calls.append(failed(tag + part, no_json(problem or "text follows the JSON"), was_cut, name))
        elif named:
            calls.append(called(named[1], value, tag + part, named[2]))
        else:
            calls += attempts_of(value, tag + part)
    return before, calls


def _after_python_tag(rest: str, was_cut: bool, _: Tools) -> Found | None:
    before, tag, after = rest.partition(PYTHON_TAG)
    if not tag:
        return None
    calls, problem = _python(after) if after.lstrip().startswith("[") else _objects(after)
    return before, calls if calls else [failed(tag + after, no_json(problem), was_cut)]


def _bare(rest: str, was_cut: bool, _: Tools) -> Found | None:
    text = rest.strip()
    if not text.startswith("{"):
        return None
    calls, problem = _objects(text)
    if calls:
        return "", calls
    return ("", [failed(text, no_json(problem), was_cut)]) if problem and _BEGUN_CALL.match(text) else None


def _fenced(rest: str, was_cut: bool, _: Tools) -> Found | None:
    outside, calls, place = "", [], 0
    for block in _FENCE.finditer(rest):
        found, problem = _objects(block[1])
        if not found and problem and _BEGUN_CALL.match(block[1].strip()):
            found = [failed(block[0], no_json(problem), was_cut and not block[2])]
        if found:
            outside, place = outside + rest[place : block.start()], block.end()
            calls += found
    return (outside + rest[place:], calls) if calls else None


def _python(text: str) -> tuple[list[WrittenCall], str]:
    """Return the calls if the whole text is calls written as Python; else no calls and the problem."""
    calls, problem = python_calls(text)
    return [called(name, arguments, text.strip()) for name, arguments in calls], problem


def _objects(text: str) -> tuple[list[WrittenCall], str]:
    """Return the calls if the whole text is JSON calls, separated by `;` or white space. If it is not JSON: no
    calls and the problem. If it is JSON but no call: no calls and no problem."""
    calls: list[WrittenCall] = []
    place = 0
    while text[place:].strip():
        value, end, problem = read_value(text, place)
        if problem:
            return [], problem
        if not (isinstance(value, dict) and function_of(value).keys() & {"arguments", "parameters"}):
            return [], ""
        calls.append(attempt_of(value, text[place:end].strip()))
        place = end
        if text[place:].lstrip().startswith(";"):
            place = text.index(";", place) + 1
    return calls, "" if calls else "nothing is there"
