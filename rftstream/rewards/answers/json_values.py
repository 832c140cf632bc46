"""JSON inside a text, as models write it: alone, in fences, between words, or with a trailing comma."""

from __future__ import annotations

import json
import re
from typing import Any

MAX_TRIES = 500
"""Largest number of places in a text that are tried as the beginning of a JSON value."""

_OPENING = re.compile(r"[\[{]")
_LAST_COMMA = re.compile(r",(\s*[}\]])")


def json_values(text: str) -> list[Any]:
    """Return the outermost JSON lists and objects in a text, in order."""
    decoder = json.JSONDecoder()
    values: list[Any] = []
    place = tries = 0
    while tries < MAX_TRIES and (match := _OPENING.search(text, place)):
        tries += 1
        try:
            value, place = decoder.raw_decode(text, match.start())
        except (ValueError, RecursionError):
            place = match.start() + 1
        else:
            values.append(value)
    return values


def json_objects(text: str) -> list[dict[str, Any]]:
    """Return the outermost JSON objects in a text, in order. If there are none, trailing commas are removed and the
    search is repeated."""
    for form in (text, _LAST_COMMA.sub(r"\1", text)):
        if objects := [value for value in json_values(form) if isinstance(value, dict)]:
            return objects
    return []
