"""The parts that all readers of tool calls share: a call as far as it could be read, a tolerant JSON reader, and
messages about what is wrong. Nothing here raises."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

EXPECTED = 'write one JSON object with "name" and "arguments"'
FORMLESS = "The tool call does not have the form that the tools ask for"
MAX_ID_CHARACTERS = 128
"""Longest call id that is accepted from a model."""

_NAME = re.compile(r'"name"\s*:\s*"([^"\\]*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCall:
    """One call, or an attempt at a call that could not be read, before it becomes part of a turn."""

    text: str
    """Text of the call as it was written."""
    name: str = ""
    arguments: dict[str, Any] | None = None
    error: str | None = None
    id: str = ""
    """The id that the model gave; empty if it gave none."""


Found = tuple[str, list[WrittenCall]]
"""The text without the calls, and the calls."""


def checked_arguments(arguments: Any) -> str | None:
    """Return what is wrong with the arguments of a call, in words for the model; None if they are a JSON object."""
    if not isinstance(arguments, dict):
        return f"The arguments of the tool call are {kind(arguments)}, expected a JSON object; {EXPECTED}."
    try:
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError):
        return "The arguments of the tool call have a number or a character that JSON does not have."
    return None


def read_value(text: str, place: int) -> tuple[Any, int, str]:
    """Return the JSON value at a place, where the value ends, and what is wrong with it (empty if nothing is)."""
    while place < len(text) and text[place].isspace():
        place += 1
    try:
        value, end = _DECODER.raw_decode(text, place)
    except json.JSONDecodeError as error:
        return None, place, f"{error.msg} at character {error.pos - place}"
    except (ValueError, RecursionError) as error:  # a number of a million digits, a million brackets
        return None, place, str(error).partition(";")[0] or "too deep"
    return value, end, ""


def attempts_of(value: Any, text: str) -> Iterator[WrittenCall]:
    """Yield the calls that a JSON value stands for: one, or a list of them."""
    yield from (attempt_of(one, text) for one in (value if isinstance(value, list) and value else [value]))


def attempt_of(value: Any, text: str) -> WrittenCall:
    """Return the call that a JSON value stands for."""
    if not isinstance(value, dict):
        return WrittenCall(text=text, error=f"The tool call is {kind(value)}, expected a JSON object; {EXPECTED}.")
    function = function_of(value)
    name = function.get("name", function.get("tool_name"))
    if not isinstance(name, str) or not name:
        return WrittenCall(text=text, error=f'The tool call has no "name"; {EXPECTED}.')
    arguments = function.get("arguments", function.get("parameters", {}))
    return called(name, arguments, text, value.get("id", value.get("tool_call_id")))


def called(name: str, arguments: Any, text: str, given_id: Any = None) -> WrittenCall:
    """Return a call with a name. Its error is set if the arguments are no JSON object."""
    error = checked_arguments(arguments)
    known = given_id if isinstance(given_id, str) and len(given_id) <= MAX_ID_CHARACTERS else ""
    arguments = arguments if error is None else None
    return WrittenCall(text=text, name=clean(name), arguments=arguments, error=error, id=clean(known))


def function_of(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the mapping that has the name and the arguments: the value itself, or the mapping under its key
    `function`."""
    inner = value.get("function")
    return inner if isinstance(inner, dict) and "name" not in value else value


def failed(text: str, error: str, was_cut: bool, name: str = "") -> WrittenCall:
    """Return a call that could not be read, and why. `was_cut`: whether a limit ended the turn."""
    if not name and (found := _NAME.search(text)):
        name = found[1]
    error = "The tool call was cut off before its end" if was_cut else error
    return WrittenCall(text=text, name=clean(name), error=f"{error}; {EXPECTED}.")


def no_json(problem: str) -> str:
    """Return the message to the model about a call that is not JSON."""
    return f"The tool call is not valid JSON: {problem}"


def clean(text: str) -> str:
    """Return the text without unpaired surrogates, which UTF-8 cannot encode."""
    return text.encode(errors="replace").decode()


def kind(value: Any) -> str:
    """Return the type of a JSON value as a word for messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON value")


_constant_hook: Callable[[str], Any] = _constant
_DECODER = json.JSONDecoder(strict=False, parse_float=_number, parse_constant=_constant_hook)
"""A decoder that accepts line breaks in strings, since models write them in code, and rejects NaN and infinity."""
