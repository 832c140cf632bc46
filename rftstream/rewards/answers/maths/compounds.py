"""Reads quantities of more than one number: `2 h 30 min`, `5 ft 3 in`, 3元5角, `3 r 1`, "two and a half hours"."""

from __future__ import annotations

import re
from fractions import Fraction

from rftstream.rewards.answers.clean import bare_words
from rftstream.rewards.answers.maths.nodes import AnswerGroup, Form, Value, number
from rftstream.rewards.answers.maths.units import is_everyday, unit_name, unit_size
from rftstream.rewards.answers.maths.words import number_in_words

_PIECE = re.compile(
    r"\s*(?:,|and\b|又)?\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+|[\u4e00-\u9fff]+?)\.?(?=\s*(?:,|and\b|又)?\s*\d|\s*$)"
)
_FEET = re.compile(r"(\d+)\s*'\s*(\d+(?:\.\d+)?)\s*(?:\"|'')")
_REMAINDER = re.compile(r"(-?\d+)\s*(?:r\.?|rem\.?|remainder|余|(?:\\ldots\s*)+)\s*(\d+)", re.IGNORECASE)
_OPENED = re.compile(r"\\text\{([^{}]*)\}")
_SHORT = {"h": {"m": "min", "分": "min"}, "yuan": {"分": "fen"}, "jiao": {"分": "fen"}}
"""Name of the first unit -> short names of units that may follow it."""
_ALONE = {"时": "h", "点": "h", "分": "min"}
_MAX_CHARS = 80


def read_compound(text: str) -> list[Form]:
    """Return the readings of a cleaned text as such a quantity; empty if it is none."""
    if len(text) > _MAX_CHARS:
        return []
    text = _OPENED.sub(r" \1 ", text).strip()
    if (match := _REMAINDER.fullmatch(text)) is not None:
        parts = (Value(node=number(int(match[1]))), Value(node=number(int(match[2]))))
        return [AnswerGroup(kind="tuple", items=parts, left="r", right="r")]
    if (match := _FEET.fullmatch(text)) is not None:
        return [_summed([(Fraction(match[1]), "ft"), (Fraction(match[2]), "inch")])]
    return _pieces(text) or _pieces(_with_digits(text)) or _in_words(text)


def _pieces(text: str) -> list[Form]:
    """Read numbers with units of one kind, each smaller than the one before it."""
    place, found = 0, list[tuple[Fraction, str]]()
    while (match := _PIECE.match(text, place)) is not None:
        first = found[0][1] if found else ""
        name = _SHORT.get(first, {}).get(match[2]) or unit_name(match[2], marked=True) or _ALONE.get(match[2])
        if name is None:
            return []
        found.append((Fraction(match[1]), name))
        place = match.end()
    if len(found) < 2 or text[place:].strip():
        return []
    if not all(is_everyday(name) for _, name in found) or len({unit_size(name)[1] for _, name in found}) > 1:
        return []
    factors = [unit_size(name)[0] for _, name in found]
    return [_summed(found)] if factors == sorted(set(factors), reverse=True) else []


def _with_digits(text: str) -> str:
    """Return the text with digits instead of number words: `1 hour and 45 minutes`."""
    parts = [_in_words(part) for part in re.split(r"\s*(?:,|\band\b)\s*", text)]
    values = [part[0] for part in parts if part and isinstance(part[0], Value)]
    if len(values) != len(parts) or len(parts) < 2:
        return ""
    return " ".join(f"{float(value.node.number):g} {value.unit}" for value in values)


def _summed(found: list[tuple[Fraction, str]]) -> Value:
    total = sum((count * unit_size(name)[0] for count, name in found), Fraction(0))
    rounded = any(count.denominator > 1 for count, _ in found)
    return Value(node=number(total / unit_size(found[0][1])[0], rounded=rounded), unit=found[0][1])


def _in_words(text: str) -> list[Form]:
    head, _, last = bare_words(text).rpartition(" ")
    if not head or not head.isascii() or re.search(r"\d", head):
        return []
    value, name = number_in_words(head), unit_name(last, marked=False)
    return [Value(node=number(value), unit=name)] if value is not None and name is not None else []
