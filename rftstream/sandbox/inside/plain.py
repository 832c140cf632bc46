"""Plain values as bytes, with their exact types: None, bool, int, float, complex, str, bytes, list, tuple, set,
frozenset, dict.

Both sides of the sandbox use this module. A hostile program may have written the bytes, so reading has limits: bytes,
depth, digits, and keys with the same hash (they would make a dict slow). Reading builds only plain values.

The form is JSON. None, bool, small int, str and list are written as JSON; any other value is an object with one key:
`{"f": float.hex}`, `{"i": hex}`, `{"c": [hex, hex]}`, `{"b": hex}`, `{"t": [...]}`, `{"s": [...]}` (set), `{"z":
[...]}` (frozenset), `{"d": [[key, value], ...]}`.
"""

from __future__ import annotations

import collections
import json
from typing import Any

MAX_DEPTH = 100
"""Largest nesting depth of a value."""
MAX_INT_BITS = 1 << 20
MAX_SAME_HASH = 16
"""Largest number of keys of one dict or set with the same hash."""

_SMALL = 1 << 53
_Atom = (type(None), bool, str)


class NotPlain(ValueError):
    """A value that cannot be encoded, or bytes that encode no value. `encode` and `decode` raise it."""


def encode(value: Any) -> bytes:
    """Return the bytes of a value. Subclasses of plain types become the plain type. NotPlain if the value cannot be
    encoded."""
    try:
        return json.dumps(_to_json(value, 0), separators=(",", ":"), check_circular=False).encode("ascii")
    except RecursionError:
        raise NotPlain("the value is nested too deeply") from None


def decode(data: bytes) -> Any:
    """Return the value of the bytes. NotPlain if they encode no value. The bytes may come from a hostile program."""
    try:
        return _from_json(json.loads(data.decode("ascii"), parse_float=_refuse, parse_constant=_refuse), 0)
    except NotPlain:
        raise
    except RecursionError:
        raise NotPlain("the value is nested too deeply") from None
    except Exception as error:
        raise NotPlain(f"no plain value: {type(error).__name__}") from None


def _to_json(value: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise NotPlain(f"the value is nested more than {MAX_DEPTH} deep")
    kind = type(value)
    if kind in _Atom:
        return value
    if kind is int:
        return value if -_SMALL < value < _SMALL else _big(value)
    if kind is float:
        return {"f": value.hex()}
    if kind is list:
        return [_to_json(item, depth + 1) for item in value]
    if kind is tuple:
        return {"t": [_to_json(item, depth + 1) for item in value]}
    if kind is dict:
        return {"d": [[_to_json(key, depth + 1), _to_json(item, depth + 1)] for key, item in value.items()]}
    if kind is set or kind is frozenset:
        return {"s" if kind is set else "z": [_to_json(item, depth + 1) for item in value]}
    if kind is bytes:
        return {"b": value.hex()}
    if kind is complex:
        return {"c": [value.real.hex(), value.imag.hex()]}
    return _to_json(_as_plain(value), depth)


def _as_plain(value: Any) -> Any:
    """Return a value of a subclass as its plain type. numpy's scalars and arrays convert themselves."""
    base: Any
    for base in (bool, int, float, str, list, tuple, dict, set, frozenset, bytes, complex):
        if isinstance(value, base):
            return _copied(base, value)
    if isinstance(value, collections.UserDict | collections.UserList):
        return value.data
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    raise NotPlain(f"a value of type {type(value).__name__} is no plain data")


def _copied(base: type, value: Any) -> Any:
    """Return a copy of the content, read with the plain type's methods. The value's own methods may be overridden."""
    match base.__name__:
        case "dict":
            return dict(dict.items(value))
        case "bool" | "int":
            return base(int.__int__(value))
        case "float":
            return float.fromhex(float.hex(value))
        case "complex":
            return complex.__add__(value, -0.0)
        case "str":
            return str.__str__(value)
        case "bytes":
            return bytes.__getitem__(value, slice(None))
    return base(base.__iter__(value))  # type: ignore[attr-defined]


def _big(value: int) -> dict[str, str]:
    if value.bit_length() > MAX_INT_BITS:
        raise NotPlain(f"an int of {value.bit_length()} bits")
    return {"i": hex(value)}


def _refuse(text: str) -> Any:
    raise NotPlain(f"a bare number {text[:40]}")


def _from_json(value: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise NotPlain(f"the value is nested more than {MAX_DEPTH} deep")
    kind = type(value)
    if kind in _Atom or kind is int:
        return value
    if kind is list:
        return [_from_json(item, depth + 1) for item in value]
    if len(value) != 1:
        raise NotPlain("an object with more than one key")
    ((tag, body),) = value.items()
    match tag, body:
        case "f", str():
            return float.fromhex(body)
        case "i", str():
            return int(body, 16)
        case "b", str():
            return bytes.fromhex(body)
        case "c", [str(real), str(imaginary)]:
            return complex(float.fromhex(real), float.fromhex(imaginary))
        case "t", list():
            return tuple(_from_json(item, depth + 1) for item in body)
        case (("s" | "z"), list()):
            items = [_from_json(item, depth + 1) for item in body]
            _check_hashes(items)
            return set(items) if tag == "s" else frozenset(items)
        case "d", list():
            pairs = [(_from_json(key, depth + 1), _from_json(item, depth + 1)) for key, item in body]
            _check_hashes([key for key, _ in pairs])
            return dict(pairs)
    raise NotPlain(f"no such kind: {tag[:10]!r}")


def _check_hashes(items: list[Any]) -> None:
    hashes = sorted(map(hash, items))
    far = hashes[MAX_SAME_HASH:]
    if any(here == there for here, there in zip(hashes, far, strict=False)):
        raise NotPlain(f"more than {MAX_SAME_HASH} keys of one hash")
