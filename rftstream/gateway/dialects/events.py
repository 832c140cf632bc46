"""Server-sent events, as bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NewType

Event = NewType("Event", bytes)
"""One event in the form in which it is sent."""


def event(data: Mapping[str, Any], *, name: str | None = None) -> Event:
    """Return an event with this JSON; with a `name`, if the API names its events."""
    head = "" if name is None else f"event: {name}\n"
    return Event(f"{head}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode())
