"""JSON that stands in a text, as models write it: alone, in fences, between words, with a comma too many."""

from __future__ import annotations

import json
import re
from typing import Any

MAX_TRIES = 500
"""Most places of a text where a JSON value may begin."""

_OPENING = re.compile(r"[\[{]")
_LAST_COMMA = re.compile(r",(\s*[}\]])")


def json_values(text: str) -> list[Any]:
    """Return the JSON lists and objects in a text that are not inside of another one, in order."""
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
    """Return the JSON objects in a text that are not inside of another value, in order. If there is none, commas before
    closing brackets are taken out, and it is looked again."""
    for form in (text, _LAST_COMMA.sub(r"\1", text)):
        if objects := [value for value in json_values(form) if isinstance(value, dict)]:
            return objects
    return []
