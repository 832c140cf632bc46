"""The declaration of messages: `message` above a class tells all that the log knows about the message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, dataclass_transform

if TYPE_CHECKING:
    from dataclasses import Field

from rftstream.contracts.structs import struct_of

Facts = dict[str, str | int | bool | None]
"""Header -> value. None and False are left out, True is written as 1."""


class Message:
    """The base of all messages: frozen structs that `message` makes and declares."""

    __slots__ = ()
    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSpec:
    """The declaration of a message, made by `message`. `messages` has the table of all.

    `codec` asks it for the key, the id and the headers of each written record."""

    type: type[Message]
    """The struct."""
    contract: str
    """The name in the header `contract`. Its schema is `schemas/<contract>.json`."""
    topic: str
    """The only topic (`topics`) that takes the message."""
    key: Callable[[Any], str]
    """Returns the record key as defined in the table of topics."""
    id: Callable[[Any], str] | None = None
    """Returns the header `id`, the record's own id. None if the key is unique and serves as the id."""
    headers: Callable[[Any], Facts] = lambda message: {}
    """Returns the headers in addition to those that all messages have."""
    version: int = 1
    """The newest version, which this code writes. All versions up to it can be read."""
    readable_since: int | None = None
    """The oldest version whose readers may read the records that this code writes, since all later fields can be
    skipped. It is written as a header. None if readers must know `version`."""
    skippable: Callable[[Any], bool] = lambda message: True
    """Returns whether those readers may read this message, too. If not, its record has no such header."""


SPEC_OF: dict[type, MessageSpec] = {}
"""Type of a message -> its declaration, for the imported modules. `messages` imports all of them."""


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def message(contract: str, **facts: Any) -> Callable[[type[M]], type[M]]:
    """Make a frozen struct from the class below, and declare it. `facts` are the fields of its `MessageSpec`."""

    def declare(cls: type[M]) -> type[M]:
        made: type[M] = struct_of(cls)
        SPEC_OF[made] = MessageSpec(type=made, contract=contract, **facts)
        return made

    return declare
