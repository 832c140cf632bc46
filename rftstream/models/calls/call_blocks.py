"""Tool calls between marks: what stands inside may be JSON, tags around each argument, or Python.

<tool_call>{"name": ..., "arguments": {...}}</tool_call>            Hermes, Qwen, Granite, and many others
<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...       Qwen3-Coder, Nemotron, Step, Seed
<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>   GLM, Laguna, Hunyuan
<minimax:tool_call><invoke name="NAME"><parameter name="KEY">...    MiniMax
<|tool_call_start|>[NAME(KEY=VALUE)]<|tool_call_end|>               LFM
<|tools_prefix|>[{NAME: {...}}]<|tools_suffix|>                     Apertus
<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>       DeepSeek
<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>   Kimi
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rftstream.models.calls.call_reading import (
    FORMLESS,
    Found,
    WrittenCall,
    attempts_of,
    called,
    failed,
    no_json,
    read_value,
)
from rftstream.models.calls.python_calls import begun_call, python_calls


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMarks:
    """The marks around calls, as one family of models writes them."""

    opening: str
    closing: str
    must_end: bool = False
    """Whether the closing mark is required. In other families a call without it is complete, since the mark may be the
    stop token, or the model may have none."""
    is_keyed: bool = False
    """Whether a call is an object with the name as its only key."""


BLOCKS = (
    CallMarks(opening="<tool_call>", closing="</tool_call>", must_end=True),
    CallMarks(opening="<tool_call:opensource>", closing="</tool_call:opensource>", must_end=True),
    CallMarks(opening="<minimax:tool_call>", closing="</minimax:tool_call>", must_end=True),
    CallMarks(opening="<seed:tool_call>", closing="</seed:tool_call>", must_end=True),
    CallMarks(opening="<｜DSML｜tool_calls>", closing="</｜DSML｜tool_calls>", must_end=True),
    CallMarks(opening="<｜DSML｜function_calls>", closing="</｜DSML｜function_calls>", must_end=True),
    CallMarks(opening="<｜tool▁call▁begin｜>", closing="<｜tool▁call▁end｜>", must_end=True),
    CallMarks(opening="<|tool_call_begin|>", closing="<|tool_call_end|>", must_end=True),
    CallMarks(opening="<|tool_call|>", closing="<|/tool_call|>"),
    CallMarks(opening="<|tool_call_start|>", closing="<|tool_call_end|>"),
    CallMarks(opening="<|python_start|>", closing="<|python_end|>"),
    CallMarks(opening="<|START_ACTION|>", closing="<|END_ACTION|>"),
    CallMarks(opening="<|tools_prefix|>", closing="<|tools_suffix|>", is_keyed=True),
)
SECTIONS = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<tool_calls:opensource>", "</tool_calls:opensource>"),
)
"""Marks around all calls of a turn. They add nothing to the marks of each call, so they are dropped."""
SEPARATOR, ARGUMENTS, SUFFIX = "<｜tool▁sep｜>", "<|tool_call_argument_begin|>", ":opensource"
DSML = "｜DSML｜"
"""Part of each tag of the newer models of DeepSeek."""
ARGUMENT_TAGS = tuple(
    f"<{slash}{tag}{suffix}>"
    for tag in ("arg_key", "arg_value", "tool_sep")
    for slash in ("", "/")
    for suffix in ("", SUFFIX)
)
BLOCK_MARKS = frozenset(
    {mark for block in BLOCKS for mark in (block.opening, block.closing)}
    | {*SECTIONS, *ARGUMENT_TAGS, SEPARATOR, ARGUMENTS, DSML}
)

_OPENING = re.compile("|".join(re.escape(block.opening) for block in BLOCKS))
_BY_OPENING = {block.opening: block for block in BLOCKS}
_FUNCTION = re.compile(r"<function=([^>\n]*)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=(?P<key>[^>\n]*)>(?P<value>.*?)</parameter>", re.DOTALL)
_INVOKE = re.compile(r'<invoke name="([^"\n]*)">(.*?)(?:</invoke>|\Z)', re.DOTALL)
_NAMED_PARAMETER = re.compile(
    r'<parameter name="(?P<key>[^"\n]*)"(?: string="(?P<text>true|false)")?>(?P<value>.*?)</parameter>', re.DOTALL
)
_PAIR = re.compile(
    r"<arg_key(?P<suffix>(?::\w+)?)>(?P<key>.*?)</arg_key(?P=suffix)>\s*"
    r"<arg_value(?P=suffix)>(?P<value>.*?)</arg_value(?P=suffix)>",
    re.DOTALL,
)
_PAIR_OR_END = re.compile(r"<arg_key(?::\w+)?>|<tool_sep(?::\w+)?>|\Z")
_FENCED = re.compile(r"\s*([^\n]+)\n```(?:json)?[ \t]*\n(.*?)\n?```\s*\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Tools:
    """The known types of arguments. A reader makes it from the tools that a prompt offers."""

    schemas: Mapping[str, Mapping[str, Any]]
    """Name of a tool -> name of an argument -> its JSON schema."""
    on_lines: bool | None = None
    """Whether the template writes a tagged argument on lines of its own; None if unknown."""

    @staticmethod
    def of(tools: Sequence[Mapping[str, Any]], on_lines: bool | None = None) -> Tools:
        """Read the tools' schemas. Values that are no schemas are skipped."""
        schemas: dict[str, Mapping[str, Any]] = {}
        for tool in tools:
            function = tool.get("function", tool)
            parameters = function.get("parameters") if isinstance(function, Mapping) else None
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                schemas[function["name"]] = properties if isinstance(properties, Mapping) else {}
        return Tools(schemas, on_lines)


def find_blocks(rest: str, was_cut: bool, tools: Tools) -> Found | None:
    """Return the text without its marked calls, and these calls; None if there are no marks."""
    outside, calls, place, is_found = "", [], 0, False
    while (opened := _OPENING.search(rest, place)) is not None:
        is_found = True
        outside += rest[place : opened.start()]
        found, place = _read_block(rest, opened, was_cut, tools)
        calls += found
    outside += rest[place:]
    for mark in SECTIONS:
        outside = outside.replace(mark, "")
    return (outside, calls) if is_found else None


def _read_block(rest: str, opened: re.Match[str], was_cut: bool, tools: Tools) -> tuple[list[WrittenCall], int]:
    """Return the calls of a block, and where it ends."""
    block, inside = _BY_OPENING[opened[0]], opened.end()
    if rest[inside:].lstrip()[:1] in ("{", "[") and begun_call(rest[inside:]) is None:
        return _read_json(rest, opened, block, was_cut)
    closing = _end_of(rest, inside, block.closing)
    place = len(rest) if closing < 0 else closing + len(block.closing)
    whole, body = rest[opened.start() : place], rest[inside : closing if closing >= 0 else len(rest)]
    if closing < 0 and (block.must_end or was_cut):
        return [failed(whole, f"The tool call has no end: {block.closing} is missing", was_cut)], place
    return list(_body(body, whole, block, tools)), place


def _read_json(rest: str, opened: re.Match[str], block: CallMarks, was_cut: bool) -> tuple[list[WrittenCall], int]:
    """Return the calls of a block that holds JSON, and where the block ends. A mark inside the JSON does not end the
    block."""
    inside = opened.end()
    value, end, problem = read_value(rest, inside)
    closing = rest.find(block.closing, inside if problem else end)
    place = closing + len(block.closing) if closing >= 0 else len(rest) if block.must_end or problem else end
    whole = rest[opened.start() : place]
    if closing < 0 and (block.must_end or problem):
        error = f"The tool call has no end: {block.closing} is missing" if block.must_end else no_json(problem)
        return [failed(whole, error, was_cut)], place
    if problem or (closing >= 0 and rest[end:closing].strip()):
        return [failed(whole, no_json(problem or "text follows the JSON object"), was_cut=False)], place
    if block.is_keyed:
        values = value if isinstance(value, list) else [value]
        value = [_unkeyed(value) for value in values]
    return list(attempts_of(value, whole)), place


def _unkeyed(value: Any) -> Any:
    """Return `{"name": ..., "arguments": ...}` of a call that is an object with its name as the only key."""
    if isinstance(value, dict) and len(value) == 1:
        ((name, arguments),) = value.items()
        return {"name": name, "arguments": arguments}
    return value


def _end_of(rest: str, inside: int, closing: str) -> int:
    """Return where the closing mark is. Code in an argument may contain the mark, so a mark after the end of the
    function is preferred to an earlier one."""
    if rest[inside:].lstrip().startswith("<function="):
        found = re.compile(rf"</function>\s*({re.escape(closing)})").search(rest, inside)
        if found is not None:
            return found.start(1)
    return rest.find(closing, inside)


def _body(body: str, whole: str, block: CallMarks, tools: Tools) -> Iterator[WrittenCall]:
    """Yield the calls of a block without JSON around them."""
    name, separator, after = body.partition(SEPARATOR)
    if separator:
        fenced = _FENCED.match(after)
        yield _named_json(*((fenced[1], fenced[2]) if fenced else (name, after)), whole)
        return
    call_id, separator, after = body.partition(ARGUMENTS)
    if separator:
        name = call_id.strip().partition(":")[0]
        yield _named_json(name.partition(".")[2] or name, after, whole, call_id.strip())
        return
    tagged = list(_tagged(body.replace(DSML, ""), whole, block, tools))
    if tagged:
        yield from tagged
    elif begun_call(body) is not None:
        calls, problem = python_calls(body)
        yield from (called(name, arguments, whole) for name, arguments in calls)
        if problem:
            yield failed(whole, f"{FORMLESS}: {problem}", was_cut=False)
    else:
        yield failed(whole, no_json(read_value(body, 0)[2] or "text follows the JSON object"), was_cut=False)


def _named_json(name: str, text: str, whole: str, call_id: str = "") -> WrittenCall:
    value, end, problem = read_value(text, 0) if text.strip() else ({}, len(text), "")
    if problem or text[end:].strip():
        return failed(whole, no_json(problem or "text follows the JSON object"), was_cut=False, name=name.strip())
    return called(name.strip(), value, whole, call_id)


def _tagged(body: str, whole: str, block: CallMarks, tools: Tools) -> Iterator[WrittenCall]:
    """Yield the calls whose arguments stand between their own tags."""
    if "<function=" in body:
        for function in _FUNCTION.finditer(body):
            on_lines = block.opening == "<tool_call>" if tools.on_lines is None else tools.on_lines
            yield _with(function[1].strip(), _PARAMETER, "<parameter", function[2], whole, tools, on_lines)
    elif "<invoke " in body:
        for invoke in _INVOKE.finditer(body):
            on_lines = bool(tools.on_lines)
            yield _with(invoke[1], _NAMED_PARAMETER, "<parameter", invoke[2], whole, tools, on_lines)
    else:
        found = _PAIR_OR_END.search(body)
        name = body[: found.start()].strip() if found else ""
        if (found and found[0]) or (name in tools.schemas and tools.on_lines is False):
            yield _with(name, _PAIR, "<arg_", body, whole, tools, bool(tools.on_lines))


def _with(
    name: str, pattern: re.Pattern[str], tag: str, body: str, whole: str, tools: Tools, on_lines: bool
) -> WrittenCall:
    """Return the call with the arguments that a pattern finds. Some forms mark which arguments are strings."""
    schemas = tools.schemas.get(name, {})
    arguments: dict[str, Any] = {}
    for found in pattern.finditer(body):
        key, is_text = found["key"].strip(), found.groupdict().get("text")
        schema = schemas.get(key) if is_text is None else {"type": "string"} if is_text == "true" else None
        arguments[key] = typed(found["value"], schema, on_lines=on_lines)
    if not name or tag in pattern.sub("", body):
        return failed(whole, FORMLESS, was_cut=False, name=name)
    return called(name, arguments, whole)


# ------------------------------------------------------------------------------------------------ values

_WORDS: Mapping[str, Any] = {"True": True, "False": False, "None": None}
"""Values that some templates write with Python's `str`."""


def typed(text: str, schema: Any, *, on_lines: bool) -> Any:
    """Return the value that a text between tags stands for.

    The value is the text itself, white space included, unless the schema allows another type and the text parses as
    that type. `on_lines`: whether one line break at each end belongs to the tags."""
    plain = text.removeprefix("\n").removesuffix("\n") if on_lines else text
    types = _types_of(schema)
    if types == {"string"}:
        return plain
    bare = plain.strip()
    value, end, problem = read_value(bare, 0)
    if bare in _WORDS:
        value = _WORDS[bare]
    elif problem or end < len(bare) or isinstance(value, str):
        return plain
    return plain if "string" in types and not types & _kinds_of(value) else value


def _types_of(schema: Any) -> set[str]:
    """Return the types that a JSON schema allows; none if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set(declared) if isinstance(declared, list) else set()
    for branch in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        types |= _types_of(branch)
    if not types and isinstance(schema.get("enum"), list):
        types = {kind for one in schema["enum"] for kind in _kinds_of(one)}
    return types


def _kinds_of(value: Any) -> set[str]:
    """Return the types of JSON schemas that allow a value."""
    if isinstance(value, bool):
        return {"boolean"}
    kinds = {int: "integer number", float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
    return set(kinds.get(type(value), "").split())
