"""Reading the fields of a request, for all dialects. Every error raises RequestRefused with a sentence."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from rftstream.contracts.rollouts import MAX_ROLE_CHARACTERS
from rftstream.contracts.tasks import FORMS, ChatMessage
from rftstream.models.calls.call_reading import kind
from rftstream.policies.base import Constraint
from rftstream.roles.explorer.model_calls import Refusal

MAX_ASKED_BYTES = 1024
"""Largest setting that is recorded in full, in bytes of JSON."""

MAX_STOPS = 16
"""Most stop strings of a request."""

MAX_DEPTH = 24
"""Deepest nesting of lists and maps in a request."""

ALIAS = "policy"
"""A name of the model in every run. `policy:ROLE` says in an episode of several agents who speaks."""

_ROLE = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_ROLE_CHARACTERS}}}")

Json = Mapping[str, Any]


class RequestRefused(Exception):
    """A request that is not carried out. `refusal` is the message to the client."""

    def __init__(self, sentence: str, *, status: int = 400) -> None:
        super().__init__(sentence)
        self.refusal = Refusal(status=status, sentence=sentence)


def parse_body(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a request's body."""
    try:
        found = msgspec.json.decode(body)
    except (ValueError, RecursionError) as error:  # msgspec's and Unicode's are ValueErrors
        raise RequestRefused(f"the body is not JSON in UTF-8: {error}") from None
    if not isinstance(found, dict):
        raise RequestRefused(f"the body is {kind(found)}, expected a JSON object")
    if _is_deeper(found, MAX_DEPTH):
        raise RequestRefused(f"the body has more than {MAX_DEPTH} levels of lists and maps, expected at most that")
    return found


def string(body: Json, name: str, where: str = "", *, default: str | None = None) -> str:
    """Return a field that is a string; `default` if it is absent or null."""
    value = body.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise RequestRefused(f"{where}{name}: got {kind(value)}, expected a string")
    return value


def role(model: str) -> str:
    """Return the role in the name of a model, `policy:ROLE`; empty if it has none."""
    prefix, colon, name = model.partition(":")
    if not colon or prefix != ALIAS:
        return ""
    if not _ROLE.fullmatch(name):
        raise RequestRefused(
            f"model: got the role {name[:80]!r}, expected 1 to {MAX_ROLE_CHARACTERS} letters, digits, '_', '.' or '-' "
            f"behind {ALIAS}:"
        )
    return name


def items(body: Json, name: str, where: str = "") -> list[Json]:
    """Return a field that is a list of objects; empty if it is absent or null."""
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise RequestRefused(f"{where}{name}: got {kind(value)}, expected a list")
    for i, item in enumerate(value):
        if not isinstance(item, dict):
            raise RequestRefused(f"{where}{name}[{i}]: got {kind(item)}, expected an object")
    return value


def text_of(value: Any, where: str, *, text_types: Collection[str], passed_over: Collection[str] = ()) -> str:
    """Return the text of a content: a string, or a list of parts, joined by line breaks as servers do. Parts of
    `passed_over` types are left out."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    texts = []
    for i, part in enumerate(items({"content": value}, "content", where)):
        part_type = part.get("type")
        if part_type in text_types:
            texts.append(string(part, "text", f"{where}content[{i}]."))
        elif part_type not in passed_over:
            raise RequestRefused(
                f"{where}content[{i}]: got a part of type {part_type!r}, expected text: the model reads text alone"
            )
    return "\n".join(texts)


def tool(name: Any, description: Any, parameters: Any, where: str) -> dict[str, Any]:
    """Return a tool in the form that chat templates take."""
    if not isinstance(name, str) or not name:
        raise RequestRefused(f"{where}name: got {kind(name)}, expected the tool's name")
    if parameters is not None and not isinstance(parameters, dict):
        raise RequestRefused(f"{where}: got {kind(parameters)} as the schema of {name!r}, expected an object")
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description if isinstance(description, str) else "",
            "parameters": parameters or {"type": "object", "properties": {}},
        },
    }


def left_out(types: Collection[Any]) -> dict[str, Any]:
    """Return the record of tools that the model is not shown, since it could not call them."""
    return {"tools left out": sorted({str(one)[:64] for one in types})[:16]} if types else {}


def tool_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """Return the assistant's tool call in the form that chat templates take.

    Arguments that are the text of a JSON object become the object, so that a call has the same form in all dialects. If
    the object is nested too deeply for a request, they stay text."""
    if isinstance(arguments, str):
        try:
            read = msgspec.json.decode(arguments or "{}")
        except (ValueError, RecursionError):
            read = None
        arguments = read if isinstance(read, dict) and not _is_deeper(read, MAX_DEPTH) else arguments
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(content: str, tool_calls: list[dict[str, Any]]) -> ChatMessage:
    """Return an assistant's message of a history."""
    return ChatMessage(role="assistant", content=content, tool_calls=tuple(tool_calls))


def limit(body: Json, *names: str) -> int | None:
    """Return the token limit in the first of these settings that is present; None if none is."""
    name = next((name for name in names if body.get(name) is not None), None)
    if name is None:
        return None
    value = body[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RequestRefused(f"{name}: got {value!r}, expected a whole number of at least 1")
    return value


def stops(body: Json, name: str) -> tuple[str, ...]:
    """Return a setting of stop strings: one, or a list."""
    value = body.get(name)
    found = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found) or len(found) > MAX_STOPS:
        raise RequestRefused(f"{name}: got {kind(value)}, expected a string, or at most {MAX_STOPS} of them")
    return tuple(one for one in found if one)


def constraint(has_tools: bool, *found: Constraint | None) -> Constraint | None:
    """Return the only constraint of a request on its answer; None if there is none. A constraint together with tools is
    refused, since the model could call no tool."""
    given = [one for one in found if one is not None]
    for one in given:
        if not isinstance(one.value, FORMS[one.kind]):
            raise RequestRefused(f"{one.setting}: got {kind(one.value)} as {one.kind}, expected another kind of value")
    if len(given) > 1:
        raise RequestRefused(f"{given[1].setting}: got it beside {given[0].setting}, expected one of them")
    if given and has_tools:
        raise RequestRefused(
            f"{given[0].setting}: got it together with tools, which a model whose text has this form cannot call; send "
            "one of the two"
        )
    return given[0] if given else None


def schema_format(form: Any, setting: str) -> Constraint | None:
    """Return the constraint in a format of OpenAI's or Anthropic's APIs."""
    if form is None or (isinstance(form, dict) and form.get("type") == "text"):
        return None
    if isinstance(form, dict) and form.get("type") == "json_object":
        return Constraint(kind="json_object", value=True, setting=setting)
    inner = form.get("json_schema", form) if isinstance(form, dict) and form.get("type") == "json_schema" else None
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, dict):
        raise RequestRefused(f"{setting}: expected the type text, json_object, or json_schema with a schema")
    return Constraint(kind="json", value=schema, setting=setting)


def _is_deeper(value: Any, levels: int) -> bool:
    layer = [value]
    for _ in range(levels + 1):
        layer = [one for one in layer if type(one) is dict or type(one) is list]
        if not layer:
            return False
        layer = [item for one in layer for item in (one.values() if type(one) is dict else one)]
    return True
