"""Errors by their kind: two that differ in nothing but numbers and addresses say the same."""

from __future__ import annotations

import re

MAX_KINDS = 1000
"""So many are remembered; then all are forgotten."""

_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")


def kind_of(text: str) -> str:
    """Return what is the same in all errors of the kind."""
    return _NUMBER.sub("0", text)


def last_line(detail: str) -> str:
    """Return what an error comes to: of a traceback, its end."""
    return detail.strip().rpartition("\n")[2].strip()


class Kinds:
    """Which kinds this process has told of: the first error of each is told with its traceback."""

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
