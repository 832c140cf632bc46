"""Types and defaults of settings, in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from msgspec import inspect as kinds


def in_words(kind: Any) -> str:
    """Return a type as text: `integer >= 1`, `text`, one of `wait` or `drop`, ..."""
    if get_origin(kind) is Literal:
        return " or ".join(f"`{toml(value)}`" for value in get_args(kind))  # in their own order
    found = kind if isinstance(kind, kinds.Type) else kinds.type_info(kind)
    match found:
        case kinds.Metadata(type=inner):
            return in_words(inner)
        case kinds.UnionType(types=types):
            words = [in_words(one) for one in types if not isinstance(one, kinds.NoneType)]
            return " or ".join(words)
        case kinds.LiteralType(values=values):
            return " or ".join(f"`{toml(value)}`" for value in values)
        case kinds.IntType():
            return f"integer{_range(found)}"
        case kinds.FloatType():
            return f"number{_range(found)}"
        case kinds.BoolType():
            return "`true` or `false`"
        case kinds.StrType():
            return "text"
        case kinds.VarTupleType(item_type=item) | kinds.ListType(item_type=item):
            return f"list of {_plural(in_words(item))}"
        case kinds.TupleType(item_types=items):
            return f"list of {len(items)} {_plural(in_words(items[0]))}"
        case kinds.DictType():
            return "table"
        case kinds.DataclassType(cls=cls) | kinds.StructType(cls=cls):
            return f"{{ {', '.join(item.name for item in dataclasses.fields(cls))} }}"
    raise TypeError(f"no words for {found}")


def toml(value: Any) -> str:
    """Return a default in the form of the run file."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        quote = "'" if "\\" in value else '"'
        return f"{quote}{value}{quote}"
    if isinstance(value, float):
        return f"{value!r}".replace("e-0", "e-")
    if isinstance(value, Mapping):
        return "{}" if not value else str(dict(value))
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(toml, value))}]"
    return str(value)


def _range(kind: Any) -> str:
    if kind.ge is not None and kind.le is not None:
        return f" from {kind.ge:g} to {kind.le:g}"
    if kind.gt is not None and kind.lt is not None:
        return f" between {kind.gt:g} and {kind.lt:g}"
    if kind.gt is not None and kind.le is not None:
        return f" in ({kind.gt:g}, {kind.le:g}]"
    if kind.ge is not None and kind.lt is not None:
        return f" in [{kind.ge:g}, {kind.lt:g})"
    for bound, sign in ((kind.ge, ">="), (kind.gt, ">"), (kind.le, "<="), (kind.lt, "<")):
        if bound is not None:
            return f" {sign} {bound}"
    return ""


def _plural(words: str) -> str:
    first, space, rest = words.partition(" ")
    return words if first in ("text", "table", "{") or first.startswith("`") else f"{first}s{space}{rest}"
