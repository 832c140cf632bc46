"""The JSON of reports and messages, as the commands print it.

A `Report` says in `JSON` what its JSON holds, so that no report copies itself field by field. `pick` does the same for
what is no report, e.g. a message.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from rftstream.contracts.arrays import Array
from rftstream.contracts.tasks import ChatMessage


class Report:
    """A view that is printed as text and as JSON. Data classes of `queries` and `preflight` are made of it."""

    __slots__ = ()

    JSON: ClassVar[str] = "*"
    """Words for `pick`: the keys of `to_json`."""

    def to_json(self) -> dict[str, Any]:
        """Return the report as a dict for JSON."""
        return pick(self, self.JSON)


def pick(value: Any, wanted: str) -> dict[str, Any]:
    """Return a dict for JSON of a value's attributes.

    `wanted` has a word for each key: `key`, or `key=attribute` where they differ. An attribute is a field, a property,
    a method without arguments, or a path of these like `name.version`, which is None where one of them is. A key with a
    point is put into an inner dict. A `?` at the end leaves the key out where it would be None. `*` stands for all
    fields that no other word names.
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
    """Return key, path, and whether it is left out where it is None, of each word."""
    words = [(word.removesuffix("?"), word.endswith("?")) for word in wanted.split()]
    named = {word.rpartition("=")[2] for word, _ in words}
    found = []
    for word, is_optional in words:
        key, equals, path = word.partition("=")
        names = [field.name for field in dataclasses.fields(kind) if field.name not in named] if key == "*" else [key]
        found += [(name, tuple(path.split(".")) if equals else (name,), is_optional) for name in names]
    return tuple(found)


def plain(value: Any) -> Any:
    """Return a value of dicts, lists and words for JSON. What has a `to_json` says itself what its JSON is."""
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
    """Return what `plain` returns, with numbers that are not finite as texts: JSON has no such numbers."""
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
    """Return bytes as JSON can hold them."""
    return {"base64": base64.b64encode(data).decode()}


def chat_row(message: ChatMessage) -> dict[str, Any]:
    """Return a message as a row of a data set holds it: without what it does not have."""
    values: dict[str, Any] = msgspec.to_builtins(message)
    return {name: value for name, value in values.items() if value not in (None, [], ())}
