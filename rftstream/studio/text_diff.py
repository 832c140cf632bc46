"""The difference between two texts, in pieces that a page can show."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Literal, NamedTuple

MAX_WORDS = 2_000
"""Most words of a text that is compared word by word; a longer text is compared line by line."""
MAX_LINES = 2_000
"""Most lines of a text that is compared, since the time grows with the square."""


class DiffPiece(NamedTuple):
    """A piece of text that is in both texts, or in one of the two."""

    kind: Literal["same", "removed", "added"]
    text: str


def diff_texts(before: str, after: str) -> list[DiffPiece]:
    """Return the differences between two texts: `same` and `removed` pieces together are the first text, `same` and
    `added` pieces the second."""
    for pattern, most in ((r"\s+|\w+|[^\w\s]", MAX_WORDS), (r"[^\n]*\n|[^\n]+", MAX_LINES)):
        first, second = re.findall(pattern, before), re.findall(pattern, after)
        if max(len(first), len(second)) <= most:
            return list(_pieces(first, second))
    return [piece for piece in (DiffPiece("removed", before), DiffPiece("added", after)) if piece.text]


def _pieces(first: list[str], second: list[str]) -> Iterator[DiffPiece]:
    for kind, begin, end, to_begin, to_end in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        if kind == "equal":
            yield DiffPiece("same", "".join(first[begin:end]))
            continue
        if end > begin:
            yield DiffPiece("removed", "".join(first[begin:end]))
        if to_end > to_begin:
            yield DiffPiece("added", "".join(second[to_begin:to_end]))
