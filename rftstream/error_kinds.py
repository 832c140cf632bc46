"""Kinds of errors. Two errors are of one kind if only numbers and addresses differ between them."""

from __future__ import annotations

import re
from collections.abc import Collection

MAX_KINDS = 1000
"""Most kinds that are remembered. One more, and all are forgotten."""

_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
_QUOTED = re.compile(r"""(?<!\w)(['"`])(?:(?!\1)[^\n]){0,1000}\1(?!\w)""")


def kind_of(text: str) -> str:
    """Return the text without its numbers and addresses. It is the same for all errors of one kind."""
    return _NUMBER.sub("0", text)


def rough_kind_of(text: str) -> str:
    """Return the text without its numbers, addresses and quoted parts, which errors about data often bring."""
    return kind_of(_QUOTED.sub("''", text))


def shown_for_all(text: str, num_texts: int) -> str:
    """Return what to show for all errors of the text's kind, which has `num_texts` different ones: with several, N
    stands for each number and address."""
    return text if num_texts == 1 else _NUMBER.sub("N", text)


def common_text(texts: Collection[str]) -> str:
    """Return what to show for different errors of one kind: N stands for each number and address that differs."""
    differing = [len(set(found)) > 1 for found in zip(*map(_NUMBER.findall, texts), strict=True)]
    places = iter(differing)
    return _NUMBER.sub(lambda found: "N" if next(places) else found[0], min(texts))


def last_line(detail: str) -> str:
    """Return the last line of an error's text. For a traceback this is the error itself."""
    return detail.strip().rpartition("\n")[2].strip()


class Kinds:
    """The kinds of errors that this process has reported. Its owner calls `is_new` for each error, and shows the
    traceback only of new ones."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def is_new(self, text: str) -> bool:
        """Return whether this is the first error of its kind."""
        kind = kind_of(text)
        if kind in self._seen:
            return False
        if len(self._seen) >= MAX_KINDS:
            self._seen.clear()
        self._seen.add(kind)
        return True
