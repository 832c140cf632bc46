"""The check of a whole message: the rules of its parts, and the conditions that follow from the types of their
fields.

It is put together once for each type, at import, and asked at every encode and decode. From the types it follows that
every float is finite, except in `metrics`; every value of type Any is plain (None, bool, int, float, str, list, dict
with string keys), not nested deeper than MAX_DEPTH. Types and ranges of fields are checked elsewhere: by msgspec, when
`codec` converts. So are sizes: by `limits`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from rftstream.contracts.messages import MESSAGES
from rftstream.contracts.rules import RULES, Check, Violation, show

MAX_DEPTH = 32
"""The deepest nesting of lists and maps in a value of type Any; the types fix the depth of everything else."""


def first_violation(message: object) -> Violation | None:
    """Return the first violation in a message or a part of a message; None if there is none."""
    check = _CHECKS[type(message)]
    return None if check is None else check(message)


@functools.cache
def _check_part(cls: type) -> Check | None:
    """Return the whole check of a message or part, derived from its annotations; None if there is nothing to check."""
    hints = get_type_hints(cls)
    kinds = {field.name: _without_none(hints[field.name]) for field in dataclasses.fields(cls)}
    inside = tuple((name, check) for name, kind in kinds.items() if name != "metrics" and (check := _check_of(kind)))
    floats = [name for name, kind in kinds.items() if kind is float]
    numbers = _check_floats(tuple(name for name in floats if hints[name] is float))
    optional = [functools.partial(_check_optional, name) for name in floats if hints[name] is not float]
    rule = RULES[cls].check if cls in RULES else None
    own = tuple(check for check in (numbers, *optional, rule) if check is not None)
    if not inside and len(own) < 2:
        return own[0] if own else None

    return _compiled([*((None, check) for check in own), *inside])


def _compiled(checks: Sequence[tuple[str | None, Check]]) -> Check:
    """Return one check of all of these, each of the whole part or of what a field holds. It is put together as text,
    since it runs for each record as often as it is written and read, and a loop over names takes twice as long."""
    lines = ["def check_part(part):"]
    for number, (name, _) in enumerate(checks):
        if name is None:
            lines += [f"    if (found := check_{number}(part)) is not None:", "        return found"]
        else:
            lines += [
                f"    if (value := part.{name}) and (found := check_{number}(value)) is not None:",
                f"        return '.{name}' + found[0], found[1]",
            ]
    names: dict[str, Any] = {f"check_{number}": check for number, (_, check) in enumerate(checks)}
    exec("\n".join([*lines, "    return None"]), names)  # the names of fields are identifiers
    compiled: Check = names["check_part"]
    return compiled


def _check_floats(names: tuple[str, ...]) -> Check | None:
    """Return a check of numbers that are never None. A valid message takes two passes in C."""
    if not names:
        return None
    get_floats = operator.attrgetter(*names, names[0])  # named twice, so that it returns a tuple even for a single name

    def check_floats(part: object) -> Violation | None:
        if math.isfinite(sum(get_floats(part))):
            return None
        return next((found for name in names if (found := _check_optional(name, part)) is not None), None)

    return check_floats


def _check_optional(name: str, part: object) -> Violation | None:
    number = getattr(part, name)
    if number is not None and not math.isfinite(number):
        return f".{name}", f"got {number}, expected a finite number"
    return None


def _check_of(kind: Any) -> Check | None:
    """Return the check of the contents of a value of this type; None if there is nothing to check."""
    origin, arguments = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _check_part(kind)  # type: ignore[arg-type]  # a class, as annotations hold no instances
    if origin is dict and arguments[1] is Any:
        return _plain
    if origin is dict and arguments[1] is float:
        return _finite_values
    if origin is dict and (check := _check_of(arguments[1])) is not None:
        return functools.partial(_each_value, check)
    if origin is tuple and get_origin(arguments[0]) is dict:
        return _plain
    if origin is tuple and arguments[-1] is ... and (check := _check_of(arguments[0])) is not None:
        return functools.partial(_each_item, check)
    return None


def _each_item(check: Check, parts: tuple[object, ...]) -> Violation | None:
    for i, part in enumerate(parts):
        if (found := check(part)) is not None:
            return f"[{i}]{found[0]}", found[1]
    return None


def _each_value(check: Check, parts: dict[str, object]) -> Violation | None:
    for name, part in parts.items():
        if (found := check(part)) is not None:
            return f"[{show(name)}]{found[0]}", found[1]
    return None


def _finite_values(numbers: dict[str, float]) -> Violation | None:
    for name, number in numbers.items():
        if not math.isfinite(number):
            return f"[{show(name)}]", f"got {number}, expected a finite number"
    return None


def _plain(value: Any, depth: int = 0) -> Violation | None:
    """Return why a value is not plain data, or None. A field of type Any holds data, not objects: the decoded value
    must equal the encoded one."""
    kind = type(value)
    if kind is str or kind is int or kind is float or kind is bool or value is None:
        return None
    if kind is not list and kind is not tuple and kind is not dict:
        return "", f"got {kind.__name__}, expected a plain value (none, bool, int, float, str, list, map)"
    if depth == MAX_DEPTH:
        return "", f"got more than {MAX_DEPTH} levels of lists and maps, expected at most that"
    if kind is not dict:
        for i, item in enumerate(value):
            if (found := _plain(item, depth + 1)) is not None:
                return f"[{i}]{found[0]}", found[1]
        return None
    for name, item in value.items():
        if type(name) is not str:
            return "", f"got a key of type {type(name).__name__}, expected str"
        if (found := _plain(item, depth + 1)) is not None:
            return f"[{show(name)}]{found[0]}", found[1]
    return None


def _without_none(kind: Any) -> Any:
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (argument for argument in get_args(kind) if argument is not NoneType)
    return kind


def parts_of(classes: list[type]) -> list[type]:
    """Return these dataclasses and every dataclass inside them, each once, in order of first use."""
    return [cls for cls in types_of(classes) if dataclasses.is_dataclass(cls)]


def types_of(classes: list[type]) -> list[type]:
    """Return these dataclasses and every dataclass and enumeration inside them, each once, in order of first use."""
    found: dict[type, None] = {}
    queue = list(classes)
    while queue:
        cls = queue.pop(0)
        if not isinstance(cls, type) or cls in found:
            continue
        if issubclass(cls, Enum):
            found[cls] = None
        elif dataclasses.is_dataclass(cls):
            found[cls] = None
            for hint in get_type_hints(cls).values():
                queue.extend(_inside(hint))
    return list(found)


def _inside(hint: Any) -> list[Any]:
    arguments = get_args(hint)
    return [kind for argument in arguments for kind in _inside(argument)] if arguments else [hint]


_CHECKS = {cls: _check_part(cls) for cls in parts_of([spec.type for spec in MESSAGES.values()])}
