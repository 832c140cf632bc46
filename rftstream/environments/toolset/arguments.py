"""Arguments of tools: makes a JSON Schema from a function's signature, and checks the model's arguments against a
schema."""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rftstream.environments.toolset.base import ToolError
from rftstream.errors import ConfigError

FILLED_IN = ("problem", "seed")
"""Parameters that the environment fills in. The model does not see them."""

MAX_SHOWN = 200
"""Largest number of characters of the model's text that an error repeats."""


class Signature:
    """The parameters of a function, as a JSON Schema and as a check. `toolset.open` makes it, once for each tool of a
    run file, and uses it for the arguments of calls and for the settings of a class."""

    def __init__(self, function: Callable[..., Any], *, where: str) -> None:
        """ConfigError if a parameter has no type hint, or a type that JSON cannot represent."""
        hints = _hints(function, where)
        fields: list[Any] = []
        given = []
        for name, parameter in inspect.signature(function).parameters.items():
            if name == "self":  # `__call__` of a class
                continue
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise ConfigError(f"{where}: parameter {parameter}, expected parameters that can be given by name")
            if name in FILLED_IN:
                given.append(name)
            elif name not in hints:
                raise ConfigError(f"{where}: parameter {name!r} has no type hint; add one, e.g. {name}: str")
            elif parameter.default is parameter.empty:
                fields.append((name, hints[name]))
            else:
                fields.append((name, hints[name], _default(parameter.default)))
        self.filled_in = tuple(given)
        """The parameters among `problem` and `seed` that the function has."""
        self._optional = frozenset(field[0] for field in fields if len(field) == 3)
        try:
            self._struct = msgspec.defstruct("Arguments", fields, kw_only=True, forbid_unknown_fields=True)
            self.schema = _schema(self._struct)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{where}: a type hint is not one that JSON has values for: {error}") from None
        self._names = [field[0] for field in fields]

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments, converted to the types of the hints; omitted ones stay omitted. ToolError says what is
        wrong."""
        try:
            made = msgspec.convert(dict(arguments), self._struct)
        except msgspec.ValidationError as error:
            raise ToolError(_sentence(str(error), self._names)) from None
        except RecursionError:
            raise ToolError("the arguments are nested too deeply") from None
        return {name: getattr(made, name) for name in self._names if name in arguments or name not in self._optional}


class SchemaCheck:
    """Checks arguments against a JSON Schema from elsewhere. References to other documents are not followed."""

    def __init__(self, schema: Mapping[str, Any], *, where: str) -> None:
        """ConfigError if the schema is not valid."""
        import jsonschema
        import referencing

        try:
            validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
            validator.check_schema(schema)
        except jsonschema.SchemaError as error:
            raise ConfigError(f"{where}: its JSON Schema is not valid: {error.message}") from None
        self._validator = validator(schema, registry=referencing.Registry())

    def check(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments unchanged. ToolError says what is wrong with them."""
        from jsonschema.exceptions import best_match

        try:
            error = best_match(self._validator.iter_errors(arguments))
        except RecursionError:
            raise ToolError("the arguments are nested too deeply") from None
        if error is not None:
            place = ".".join(map(str, error.absolute_path))
            raise ToolError(f"argument {shown(place)}: {cut(error.message)}" if place else cut(error.message))
        return arguments


def describe(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return the description of the function in a docstring, and of each parameter under `Args:`."""
    text, _, rest = (inspect.getdoc(function) or "").partition("\nArgs:\n")
    arguments: dict[str, str] = {}
    name = ""
    for line in rest.splitlines():
        if line and not line.startswith(" "):  # Returns:, Raises:
            break
        if found := re.match(r"(?: {2}| {4})(\w+)(?: \([^)]*\))?: *(.*)", line):
            name, arguments[found[1]] = found[1], found[2]
        elif name and line.strip():
            arguments[name] += " " + line.strip()
    return " ".join(text.split()), arguments


def shown(text: str) -> str:
    """Return the model's text in the form in which an error repeats it."""
    return repr(cut(text))


def cut(text: str, limit: int = MAX_SHOWN) -> str:
    """Return the text cut to a number of characters, with the number of missing ones."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text) - limit:,} characters more)"


def _called(function: Any) -> Any:
    """Return the function whose parameters a class has."""
    return function.__init__ if inspect.isclass(function) else function


def _hints(function: Callable[..., Any], where: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(_called(function), include_extras=True)
    except (NameError, TypeError) as error:
        raise ConfigError(f"{where}: its type hints cannot be read: {error}") from None


def _default(value: Any) -> Any:
    if isinstance(value, (list, dict, set)):
        return msgspec.field(default_factory=lambda: type(value)(value))
    return value


def _schema(struct: Any) -> dict[str, Any]:
    (top,), rest = msgspec.json.schema_components([struct], ref_template="#/$defs/{name}")
    rest = dict(rest)
    schema = dict(rest.pop(top["$ref"].rpartition("/")[2]))
    schema.pop("title", None)
    schema = {"type": "object", "properties": {}, **schema}
    return {**schema, "$defs": rest} if rest else schema


def _sentence(error: str, names: list[str]) -> str:
    """Return msgspec's error in words for the model."""
    text, _, path = error.partition(" - at `$")
    place = path.rstrip("`").lstrip(".")
    text = text.replace("`", "")
    if found := re.fullmatch(r"Object missing required field (\w+)", text):
        text = f"argument {found[1]!r} is missing"
    elif found := re.fullmatch(r"Object contains unknown field (.*)", text, re.DOTALL):
        text = f"unknown argument {shown(found[1])}"
    else:
        text = text[:1].lower() + text[1:]
    if place:
        return f"argument {shown(place)}: {cut(text)}"
    return f"{cut(text)}; it takes {', '.join(names) or 'none'}"


def as_text(value: Any) -> str:
    """Return a tool's result as a text: unchanged, or as JSON. ToolError if it is no plain value."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(msgspec.to_builtins(value), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise ToolError(f"the tool gave back a {type(value).__name__}, which is no plain value: {error}") from None
