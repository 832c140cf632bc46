"""How a message is declared: `message` above its class says all that the log knows of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, dataclass_transform

if TYPE_CHECKING:
    from dataclasses import Field

Facts = dict[str, str | int | bool | None]
"""Header -> value. None and False are left out, and True is written as 1."""


class Message:
    """The base of all messages: frozen dataclasses that `message` makes and declares."""

    __slots__ = ()
    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSpec:
    """The declaration of a message, made by `message`. `messages` has the table of all.

    `codec` asks it for the key, the id and the headers of each record that is written."""

    type: type[Message]
    """The frozen dataclass."""
    contract: str
    """The name that travels in the header `contract`; `schemas/<contract>.json` is its schema."""
    topic: str
    """The topic (`topics`) that takes the message; it has one."""
    key: Callable[[Any], str]
    """Returns the record key, as the table of topics names it."""
    id: Callable[[Any], str] | None = None
    """Returns the header `id`, the record's own id. None: it is the key, which no other record has."""
    headers: Callable[[Any], Facts] = lambda message: {}
    """Returns the headers beside those that all messages have."""
    version: int = 1
    """The newest version that this code writes and reads; all versions up to it can be read."""
    readable_since: int | None = None
    """The oldest version whose readers may read what this code writes, since they may skip all fields added after it.
    It travels in a header. None: readers have to know `version`."""


SPEC_OF: dict[type, MessageSpec] = {}
"""Type of a message -> its declaration, for the modules that are imported; `messages` imports them all."""


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def message(contract: str, **facts: Any) -> Callable[[type[M]], type[M]]:
    """Make a frozen dataclass of the class below, and declare it; `facts` are the fields of its `MessageSpec`."""

    def declare(cls: type[M]) -> type[M]:
        made = dataclass(frozen=True, slots=True, kw_only=True)(cls)
        SPEC_OF[made] = MessageSpec(type=made, contract=contract, **facts)
        return made

    return declare
