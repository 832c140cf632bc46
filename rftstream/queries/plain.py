"""The JSON of reports and messages, as the commands print it.

A `Report` declares the keys of its JSON in `JSON`, so that no report copies its fields one by one. `pick` does the same
for other values, e.g. a message.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import html
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from rftstream.contracts.arrays import Array
from rftstream.contracts.tasks import ChatMessage


class Report:
    """A view that is printed as text and as JSON. Data classes of `queries` and `preflight` inherit from it."""

    __slots__ = ()

    JSON: ClassVar[str] = "*"
    """Words for `pick`: the keys of `to_json`."""

    def to_json(self) -> dict[str, Any]:
        """Return the report as a dict for JSON."""
        return pick(self, self.JSON)

    def _repr_html_(self) -> str | None:
        """Return its text as HTML, for notebooks; None if it has none."""
        to_text = getattr(self, "to_text", None)
        style = "white-space: pre-wrap; max-height: 40em; overflow: auto"
        return None if to_text is None else f'<pre style="{style}">{html.escape(to_text())}</pre>'


def pick(value: Any, wanted: str) -> dict[str, Any]:
    """Return a dict for JSON of a value's attributes.

    `wanted` has a word for each key: `key`, or `key=attribute` if they differ. An attribute is a field, a property, a
    method without arguments, or a path of these such as `name.version`. A path is None if one of its parts is None. A
    key with a dot is put into an inner dict. With a `?` at the end, the key is left out if its value is None. `*`
    stands for all fields that no other word names.
    """
    found: dict[str, Any] = {}
    for key, path, is_optional in _words(value.__class__, wanted):
        part = value
        for name in path:
            part = None if part is None else getattr(part, name)
        part = part() if callable(part) else part
        if part is not None or not is_optional:
            *outer, last = key.split(".")
            functools.reduce(lambda inner, name: inner.setdefault(name, {}), outer, found)[last] = plain(part)
    return found


@functools.cache
def _words(kind: type, wanted: str) -> tuple[tuple[str, tuple[str, ...], bool], ...]:
    """Return key, path, and whether to leave out None, for each word."""
    words = [(word.removesuffix("?"), word.endswith("?")) for word in wanted.split()]
    named = {word.rpartition("=")[2] for word, _ in words}
    found = []
    for word, is_optional in words:
        key, equals, path = word.partition("=")
        names = [field.name for field in dataclasses.fields(kind) if field.name not in named] if key == "*" else [key]
        found += [(name, tuple(path.split(".")) if equals else (name,), is_optional) for name in names]
    return tuple(found)


def plain(value: Any) -> Any:
    """Return a value as dicts, lists and simple values for JSON. An object with a `to_json` is converted by it."""
    if isinstance(value, Array):
        return {"dtype": value.dtype, "shape": list(value.shape), "values": array_values(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if callable(own := getattr(value, "to_json", None)):
            return own()
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, bytes):
        return as_base64(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def printable(value: Any) -> Any:
    """Return the result of `plain`, with non-finite numbers as texts, since JSON has no such numbers."""
    return _finite(plain(value))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def array_values(array: Array) -> Any:
    """Return the numbers of an array as nested lists."""
    values = array.numpy()
    if array.dtype == "bfloat16":
        import numpy as np

        values = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.tolist()


def as_base64(data: bytes) -> dict[str, str]:
    """Return bytes as base64 text, which JSON can hold."""
    return {"base64": base64.b64encode(data).decode()}


def chat_row(message: ChatMessage) -> dict[str, Any]:
    """Return a message as a row of a data set, without its empty fields."""
    values: dict[str, Any] = msgspec.to_builtins(message)
    return {name: value for name, value in values.items() if value not in (None, [], ())}
