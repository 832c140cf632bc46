"""Fields of rows by their paths, and texts that are made of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rftstream.errors import ConfigError


def look_up(row: Mapping[str, Any], path: str) -> tuple[bool, Any, Sequence[str]]:
    """Return whether a column, or a field by its path, exists; its value; and the names found in its place.

    Below a null every field is null.
    """
    if path in row:
        return True, row[path], ()
    value: Any = row
    for part in path.split("."):
        if value is None:
            return True, None, ()
        if isinstance(value, list) and part.isdecimal():
            if int(part) >= len(value):
                return False, None, [f"a list of {len(value)}"]
            value = value[int(part)]
        elif isinstance(value, Mapping) and part in value:
            value = value[part]
        else:
            return False, None, list(value) if isinstance(value, Mapping) else [a_kind(value)]
    return True, value, ()


def a_kind(value: Any) -> str:
    """Return the kind of a value in words: `a text`, `an object`."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean", int: "a number", float: "a number"}
    return "a null" if value is None else names.get(type(value), f"a {type(value).__name__}")


_COLUMN = re.compile(r"\{([\w.]+)\}")
"""A column in a template."""


def template_columns(template: str) -> list[str]:
    """Return the columns that a template names."""
    return _COLUMN.findall(template)


def fill_template(template: str, row: Mapping[str, Any], where: str) -> str:
    """Return a template with the values of a row. ConfigError if it names a column that the row does not have."""
    return _COLUMN.sub(lambda match: _text_at(row, match[1], where), template)


def _text_at(row: Mapping[str, Any], path: str, where: str) -> str:
    found, value, names = look_up(row, path)
    if not found:
        raise ConfigError(f"{where}: options.template names {path!r}, found {', '.join(names or row)}; correct it")
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
