"""Kinds of errors. Two errors are of one kind if they differ in nothing but numbers and addresses."""

from __future__ import annotations

import re

MAX_KINDS = 1000
"""Largest number of kinds that are remembered; at one more, all are forgotten."""

_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")


def kind_of(text: str) -> str:
    """Return the text without its numbers and addresses. Errors of one kind have the same."""
    return _NUMBER.sub("0", text)


def last_line(detail: str) -> str:
    """Return the last line of an error's text. For a traceback this is the error itself."""
    return detail.strip().rpartition("\n")[2].strip()


class Kinds:
    """The kinds of errors that this process has reported. Its owner asks `is_new` for each error, and shows the
    traceback only if it is."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def is_new(self, text: str) -> bool:
        """Return whether this was never asked about an error of its kind."""
        kind = kind_of(text)
        if kind in self._seen:
            return False
        if len(self._seen) >= MAX_KINDS:
            self._seen.clear()
        self._seen.add(kind)
        return True
