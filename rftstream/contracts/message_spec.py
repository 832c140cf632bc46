"""How a message is declared: one MessageSpec under its class says all that the log knows of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

M = TypeVar("M")

Facts = dict[str, str | int | bool | None]
"""Header -> value. None and False are left out, and True is written as 1."""


def _no_facts(message: object) -> Facts:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSpec(Generic[M]):
    """The declaration of a message. It stands under the message's class, and `messages` collects it.

    `codec` asks it for the key, the id and the headers of each record that is written."""

    type: type[M]
    """The frozen dataclass."""
    contract: str
    """The name that travels in the header `contract`; `schemas/<contract>.json` is its schema."""
    version: int = 1
    """The newest version that this code writes and reads; all versions up to it can be read."""
    readable_since: int | None = None
    """The oldest version whose readers may read what this code writes, since they may skip all fields added after it.
    It travels in a header. None: readers have to know `version`."""
    topic: str
    """The topic (`topics`) that takes the message; it has one."""
    key: Callable[[M], str]
    """Returns the record key, as the table of topics names it."""
    id: Callable[[M], str] | None = None
    """Returns the header `id`, the record's own id. None: it is the key, which no other record has."""
    headers: Callable[[M], Facts] = _no_facts
    """Returns the headers beside those that all messages have."""
