"""The limits of a record value. `codec` holds what it reads and what it writes to the same ones, by the same function.

items          of one list or map: `metrics`, the turns of a rollout, a list in a column
total_items    of all lists and maps of a message together
bytes          of a value; and of a record (key, value, headers), as its topic says
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgpack  # type: ignore[import-untyped]  # it has no stubs

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
