"""Splits cleaned texts at places outside brackets."""

from __future__ import annotations

import re
from collections.abc import Iterator

OPENING = ("(", "[", "{", r"\{", r"\langle", r"\lfloor", r"\lceil", r"\begin")
CLOSING = (")", "]", "}", r"\}", r"\rangle", r"\rfloor", r"\rceil", r"\end")
_PIECE = re.compile(r"\\(?:[a-zA-Z]+|.)|[\s\S]")


def pieces(text: str) -> Iterator[tuple[int, int, str, int]]:
    """Yield the start, end, text and bracket depth of each command and character. A bracket has the depth outside it.
    Round and square brackets may close each other, as intervals need."""
    depth = 0
    for match in _PIECE.finditer(text):
        piece = match.group()
        if piece in CLOSING:
            depth -= 1
        yield match.start(), match.end(), piece, depth
        if piece in OPENING:
            depth += 1


def is_balanced(text: str) -> bool:
    """Return whether every bracket is matched. Round and square brackets may match each other."""
    last = 0
    for _, _, piece, depth in pieces(text):
        if depth < 0:
            return False
        last = depth + (piece in OPENING)
    return last == 0


def split_outside(text: str, separator: re.Pattern[str]) -> list[str]:
    """Return the parts of a text between matches of `separator` outside all brackets."""
    depths = [0] * (len(text) + 1)
    for start, end, piece, depth in pieces(text):
        for place in range(start, end):
            depths[place] = depth + (1 if place > start and piece not in OPENING and piece not in CLOSING else 0)
    parts = []
    begin = 0
    for match in separator.finditer(text):
        if depths[match.start()] == 0 and match.start() >= begin:
            parts.append(text[begin : match.start()])
            begin = match.end()
    parts.append(text[begin:])
    return parts


def whole_brackets(text: str) -> tuple[str, str, str] | None:
    """Return the left bracket, the content and the right bracket, if one pair encloses the whole text; else None."""
    left = next((one for one in (r"\langle", r"\{", "(", "[", "{") if text.startswith(one)), None)
    if left is None:
        return None
    found = list(pieces(text))
    if found[-1][2] not in CLOSING or found[-1][3] != 0:
        return None
    if any(depth == 0 for _, _, _, depth in found[1:-1]):
        return None
    return left, text[len(left) : found[-1][0]].strip(), found[-1][2]
