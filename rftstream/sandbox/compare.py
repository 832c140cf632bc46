"""Compares the output of a sandbox with what was expected. Only this module judges."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from decimal import Decimal
from typing import Any

_NUMBER = re.compile(r"[+-]?((0|[1-9]\d{0,59})(\.\d{0,60})?|\.\d{1,60})([eE][+-]?\d{1,3})?")
"""A number that may be written in different ways. A number with leading zeros, such as 007, is a name."""

MAX_SHOWN = 200
"""The most characters of a value that people are shown."""


def same_text(found: str, expected: str, *, tolerance: float = 0.0) -> bool:
    """Return whether a program printed the expected text. White space at line ends and empty lines at the end are
    ignored, and numbers may be written in different ways. Numbers may differ by `tolerance`, relative or absolute."""
    found_lines, expected_lines = _lines(found), _lines(expected)
    if found_lines == expected_lines:
        return True
    if len(found_lines) != len(expected_lines):
        return False
    return all(_same_line(one, other, tolerance) for one, other in zip(found_lines, expected_lines, strict=True))


def text_difference(found: str, expected: str, *, tolerance: float = 0.0) -> str:
    """Return how two texts that are not the same differ: both, shortened, from their first difference on."""
    ours, theirs = _lines(found), _lines(expected)
    pairs = enumerate(zip(ours, theirs, strict=False))
    first = next((line for line, pair in pairs if not _same_line(*pair, tolerance)), min(len(ours), len(theirs)))
    one, other = ("\n".join(lines[first : first + MAX_SHOWN]) for lines in (ours, theirs))
    pairs_of_characters = enumerate(zip(one, other, strict=False))
    common = next((at for at, pair in pairs_of_characters if pair[0] != pair[1]), min(len(one), len(other)))
    cut = common - MAX_SHOWN // 10 if common > MAX_SHOWN // 2 else 0
    where = f"in line {first + 1}, from character {cut + 1} on, " if cut else f"from line {first + 1} on "
    return f"{where if cut or first else ''}got {shown(one[cut:])}, expected {shown(other[cut:])}"


def value_difference(found: Any, expected: Any, *, tolerance: float = 0.0) -> str:
    """Return how two values that are not the same differ: both, shortened; long lists from their first difference."""
    where = ""
    if isinstance(found, list | tuple) and isinstance(expected, list | tuple):
        pairs = enumerate(zip(found, expected, strict=False))
        least = min(len(found), len(expected))
        first = next((place for place, pair in pairs if not same_value(*pair, tolerance=tolerance)), least)
        if first >= MAX_SHOWN // 20:
            where, found, expected = f"from item {first} on ", found[first:], expected[first:]
    return f"{where}got {shown(found)}, expected {shown(expected)}"


def shown(value: Any) -> str:
    """Return a plain value or a text as people may read it, shortened."""
    try:
        text = repr(value[: MAX_SHOWN + 1] if isinstance(value, str | bytes | list | tuple) else value)
    except ValueError:
        return "a number with too many digits to show"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_line(found: str, expected: str, tolerance: float) -> bool:
    ours, theirs = found.split(), expected.split()
    return len(ours) == len(theirs) and all(_same_word(*pair, tolerance) for pair in zip(ours, theirs, strict=True))


def _same_word(found: str, expected: str, tolerance: float) -> bool:
    if found == expected:
        return True
    if not (_NUMBER.fullmatch(found) and _NUMBER.fullmatch(expected)):
        return False
    if Decimal(found) == Decimal(expected):
        return True
    return tolerance > 0 and math.isclose(float(found), float(expected), rel_tol=tolerance, abs_tol=tolerance)


def same_value(found: Any, expected: Any, *, tolerance: float = 0.0, depth: int = 0) -> bool:
    """Return whether a plain value is the expected one. A tuple equals a list with the same items, since tests are
    stored as JSON. A bool is never equal to a number, and NaN equals NaN. Floats may differ by `tolerance`, relative or
    absolute."""
    if depth > 200:
        return False
    if isinstance(expected, bool) or isinstance(found, bool) or expected is None or found is None:
        return type(found) is type(expected) and bool(found == expected)
    if isinstance(expected, int | float) and isinstance(found, int | float):
        return _same_number(found, expected, tolerance)
    if isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        return len(found) == len(expected) and all(
            same_value(one, other, tolerance=tolerance, depth=depth + 1)
            for one, other in zip(found, expected, strict=True)
        )
    if isinstance(expected, dict) and isinstance(found, dict):
        return _same_keys(found, expected) and all(
            same_value(found[key], value, tolerance=tolerance, depth=depth + 1) for key, value in expected.items()
        )
    if isinstance(expected, set | frozenset) and isinstance(found, set | frozenset):
        return _same_keys(found, expected)
    return type(found) is type(expected) and bool(found == expected)


def _same_keys(found: Collection[Any], expected: Collection[Any]) -> bool:
    """Return whether the keys are the same. Unlike in Python, a bool key never equals a number."""
    own = {key: key for key in found}
    return len(own) == len(expected) and all(key in own and same_value(own[key], key) for key in expected)


def _same_number(found: float, expected: float, tolerance: float) -> bool:
    if found == expected:
        return True
    if isinstance(found, float) and isinstance(expected, float) and math.isnan(found) and math.isnan(expected):
        return True
    if tolerance <= 0:
        return False
    try:
        return math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:
        return False
