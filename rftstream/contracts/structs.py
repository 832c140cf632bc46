"""`message_part`: messages and their parts are declared as frozen dataclasses, and made as structs of msgspec.

A struct is made and decoded in a third of a dataclass's time, and a record has tens of them. It can do what the package
asks of a dataclass: `dataclasses.fields`, `replace`, `asdict` and `is_dataclass` work on it."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import msgspec

__all__ = ["message_part", "struct_of"]

T = TypeVar("T")

if TYPE_CHECKING:
    from dataclasses import dataclass as message_part  # so that type checkers know the fields, and that they are frozen
else:

    def message_part(*, frozen: bool, slots: bool, kw_only: bool, order: bool = False) -> Callable[[type[T]], type[T]]:
        """Make a struct from the class below. Every struct is frozen, has slots, and takes its fields by keyword."""
        if not (frozen and slots and kw_only):
            raise TypeError("a part of a message is declared with frozen, slots and kw_only")
        return lambda cls: struct_of(cls, order=order)


def struct_of(cls: type[T], *, order: bool = False) -> type[T]:
    """Return the frozen struct with the fields, defaults and methods of a class that is declared like a dataclass."""
    body = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__", "__slots__")}
    copy = type(cls.__name__, cls.__bases__, dict(body))
    declared = {one.name: one for one in dataclasses.fields(dataclasses.dataclass(kw_only=True)(copy))}
    for name, field in declared.items():
        if field.default_factory is not dataclasses.MISSING:
            body[name] = msgspec.field(default_factory=field.default_factory)
        elif isinstance(body.get(name), dataclasses.Field):
            body[name] = field.default
    bases = (*(base for base in cls.__bases__ if base is not object), msgspec.Struct)
    # No cycle can lead through a message, which holds plain data, so that the garbage collector may skip it.
    settings = {"frozen": True, "kw_only": True, "order": order, "gc": False}
    made = types.new_class(cls.__name__, bases, settings, lambda namespace: namespace.update(body))
    made.__dataclass_fields__ = declared  # type: ignore[attr-defined]
    return made
