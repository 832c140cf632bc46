"""The limits of a record value. `codec` holds what it reads and what it writes to the same ones, by the same function.

items          of one list or map: `metrics`, the turns of a rollout, a list in a column
total_items    of all lists and maps of a message together
bytes          of a value; and of a record (key, value, headers), as its topic says
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import GenericAlias, NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgpack  # type: ignore[import-untyped]  # it has no stubs
import msgspec

from rftstream.contracts.topics import MAX_DEAD_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageLimits:
    """Limits on the content of a record value. Depth is limited by msgpack's own stack (1,024), and below that by the
    types and `checks.MAX_DEPTH`."""

    items: int = 65_536
    """The most items of one list or map. (Tokens are not lists but bytes.)"""
    total_items: int = 1_000_000
    """The most items of all lists and maps together. Eight million empty lists fit into a record, and take fifty times
    its size in memory."""
    num_bytes: int = MAX_DEAD_BYTES
    """Most bytes. A topic may allow fewer."""

    def holds(self, num_bytes: int) -> bool:
        """Return whether every value of this size is within all limits, since an item takes at least one byte."""
        return num_bytes < min(self.items, self.total_items, self.num_bytes)


LIMITS = MessageLimits()


_LISTS = (1024, 32)
"""The most items of a list, and of a list inside a list, in which `is_bounded` looks for texts and bytes."""


def is_bounded(value: bytes, cls: type, limits: MessageLimits) -> bool:
    """Return whether a value of a message is certainly within all limits. Nothing of it is copied, and little is built:
    long texts and arrays have no items, so all that has items is in the rest of the bytes."""
    num_bytes = len(value)
    if limits.holds(num_bytes):
        return True
    if num_bytes > limits.num_bytes:
        return False
    try:
        return limits.holds(num_bytes - _num_bulk_bytes(_bulk_decoder(cls).decode(value)))
    except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError):
        return False


def _num_bulk_bytes(found: Any) -> int:
    """Return the bytes of all texts and byte strings in what `_bulk_decoder` has found, without their first ones."""
    if isinstance(found, msgspec.Raw):
        view = memoryview(found)
        return len(view) - 1 if len(view) and view[0] in _TEXTS_AND_BYTES else 0
    if isinstance(found, msgspec.Struct):
        return sum(_num_bulk_bytes(getattr(found, name)) for name in found.__struct_fields__)
    return sum(map(_num_bulk_bytes, found.values() if isinstance(found, dict) else found or ()))


_TEXTS_AND_BYTES = frozenset((*range(0xA0, 0xC0), 0xC4, 0xC5, 0xC6, 0xD9, 0xDA, 0xDB))
"""First bytes of msgpack's texts and byte strings."""


_bulk_decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {}
_one_makes = threading.Lock()


def _bulk_decoder(cls: type) -> msgspec.msgpack.Decoder[Any]:
    """Return the decoder of `_bulk_type`. Only one thread at a time makes one, for the reason that `codec` gives."""
    decoder = _bulk_decoders.get(cls)
    if decoder is None:
        with _one_makes:
            decoder = _bulk_decoders[cls] = msgspec.msgpack.Decoder(_bulk_type(cls, 0))
    return decoder


@functools.cache
def _bulk_type(kind: Any, depth: int) -> Any:
    """Return a type that finds only what may be long inside of a type; None if there is nothing. Other fields are
    skipped by the decoder."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in (str, bytes, memoryview):
        return msgspec.Raw
    if origin is Annotated:
        return _bulk_type(arguments[0], depth)
    if origin in (Union, UnionType):
        found = [_bulk_type(one, depth) for one in arguments if one is not NoneType]
        return None if len(found) != 1 or found[0] is None else found[0] if found[0] is msgspec.Raw else found[0] | None
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        inside = {field.name: _bulk_type(hints[field.name], depth) for field in dataclasses.fields(kind)}
        fields = [(name, one, msgspec.Raw() if one is msgspec.Raw else None) for name, one in inside.items() if one]
        return msgspec.defstruct("Bulk", fields, kw_only=True) if fields else None
    if origin in (tuple, dict) and depth < len(_LISTS):
        item = _bulk_type(arguments[0 if origin is tuple else 1], depth + 1)
        if item is None or item is msgspec.Raw:
            return None
        annotated: Any = Annotated
        found_in = GenericAlias(list, (item,)) if origin is tuple else GenericAlias(dict, (str, item))
        return annotated[found_in, msgspec.Meta(max_length=_LISTS[depth])]
    return None


def unpack(value: bytes, limits: MessageLimits) -> Any:
    """Return the plain maps and lists in a value. ValueError if a limit is exceeded, which is detected before anything
    is built: from the number of bytes, and from each length that the bytes declare."""
    num_bytes = len(value)
    if num_bytes > limits.num_bytes:
        raise ValueError(f"{num_bytes} bytes exceed the limit of {limits.num_bytes}")
    max_items = min(num_bytes, limits.items)
    count = None if limits.holds(num_bytes) else _counter(limits.total_items)
    return msgpack.unpackb(
        value,
        raw=False,
        strict_map_key=True,
        max_str_len=num_bytes,
        max_bin_len=num_bytes,
        max_array_len=max_items,
        max_map_len=max_items,
        max_ext_len=0,
        list_hook=count,
        object_hook=count,
    )


def _counter(most: int) -> Callable[[Any], Any]:
    """Return a function that counts items. It is called for each container."""
    total = 0

    def count(container: Any) -> Any:
        nonlocal total
        total += len(container) + 1
        if total > most:
            raise ValueError(f"the items of all lists and maps exceed the limit of {most}")
        return container

    return count


def find_excess(fields: Any, limits: MessageLimits) -> tuple[str, str] | None:
    """Return path and text for the first exceeded limit in a message's plain maps and lists; None if there is none. If
    all bytes or items together are too many, the path is that of the part that holds most of them."""
    for path, container in _containers(fields, "$"):
        if len(container) > limits.items:
            return path, f"got {len(container)} items, expected at most {limits.items}"
    if (total := _num_items(fields)) > limits.total_items:
        text = f"got {total} items in all lists and maps of the message, expected at most {limits.total_items}"
        return _largest(fields, _num_items), f"{text}; most are here"
    if (num_bytes := _num_bytes(fields)) > limits.num_bytes:
        return largest_part(fields), f"got {num_bytes} bytes in all, expected at most {limits.num_bytes}; most are here"
    return None


def largest_part(fields: Any) -> str:
    """Return the path of the innermost part that holds more than half of a message's bytes."""
    return _largest(fields, _num_bytes)


def _largest(value: Any, measure: Callable[[Any], int]) -> str:
    path, most = "$", measure(value) // 2
    while isinstance(value, dict | list | tuple) and value:
        name, inner = max(_inside(value), key=lambda pair: measure(pair[1]))
        if measure(inner) <= most:
            break
        path, value = f"{path}{name}", inner
    return path


def _containers(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list | tuple):
        yield path, value
        for name, inner in _inside(value):
            yield from _containers(inner, f"{path}{name}")


def _inside(container: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(container, dict):
        yield from ((f".{name}"[:80], inner) for name, inner in container.items())
    else:
        yield from ((f"[{place}]", inner) for place, inner in enumerate(container))


def _num_items(value: Any) -> int:
    return sum(len(container) + 1 for _, container in _containers(value, ""))


def _num_bytes(value: Any) -> int:
    return len(msgpack.packb(value))
