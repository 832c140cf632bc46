"""Tasksets: ordered, addressable problems. An index is the same problem in every process and after every restart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from rftstream.contracts.tasks import ChatMessage, Problem


class Taskset(Protocol):
    """Problems by their index. `tasksets.open.open_taskset` makes it. The feeder and the evaluator read problems from
    it."""

    @property
    def digest(self) -> str:
        """Return `sha256:<hex>` of the problems' content. A resumed run refuses a taskset with another digest."""

    def __len__(self) -> int:
        """Return the number of problems in one pass. Generators have a configured size. A taskset that grows
        (growing.py) returns the number so far, which may be 0."""

    def problem(self, index: int) -> Problem:
        """Return the problem with this index. ConfigError, which names file and line, if there is none."""


def question_hash(messages: Iterable[ChatMessage]) -> int:
    """Return a number that is the same, in this process, for problems that ask the same."""
    return hash(tuple((message.role, message.content, message.media) for message in messages))
