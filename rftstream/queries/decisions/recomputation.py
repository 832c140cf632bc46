"""The result of recomputing the decisions of operators, as counts, JSON and text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rftstream.contracts.messages import Message
from rftstream.contracts.records import Record
from rftstream.data.tasksets.growing import GrowingTasksets
from rftstream.queries.formatting import plural
from rftstream.queries.plain import Report

MAX_DIFFERENCES = 10
"""Most sentences about differences that are kept; all differences are counted."""


@dataclass(slots=True)
class Recomputation(Report):
    """The counts of a recomputation of all decisions."""

    JSON = (
        "equal=fine draws=num_draws groups=num_groups rollouts=num_rollouts reuse=num_choices deleted=num_unknown "
        "num_differences differences"
    )

    num_draws: int = 0
    """Problems for which the operators of the task side decided again."""
    num_groups: int = 0
    """Groups for which the operators of the experience side decided again."""
    num_rollouts: int = 0
    """Rollouts of batches whose rewards and masks were compared."""
    num_choices: int = 0
    """Batches whose choice of reused groups was recomputed."""
    num_unknown: int = 0
    """Groups whose records are deleted, so that decisions about them cannot be recomputed."""
    num_differences: int = 0
    differences: list[str] = field(default_factory=list)
    """The first differences, a sentence each."""

    @property
    def fine(self) -> bool:
        """Whether everything that could be recomputed equals the log."""
        return not self.num_differences

    def differs(self, sentence: str) -> None:
        """Note a difference."""
        self.num_differences += 1
        if len(self.differences) < MAX_DIFFERENCES:
            self.differences.append(sentence)

    def expect(self, where: str, what: str, found: Any, expected: Any) -> None:
        """Note a difference if the values differ."""
        if found != expected:
            self.differs(f"{where}: {what} {shown(found)}, computed again {shown(expected)}")

    def to_text(self) -> str:
        """Return the counts as text for people."""
        asked = (
            f"{plural(self.num_draws, 'draw')}, {plural(self.num_groups, 'group')} and "
            f"{plural(self.num_rollouts, 'rollout')} of batches"
        )
        if self.num_choices:
            asked += f", {plural(self.num_choices, 'choice')} of what to reuse"
        found = "all equal" if self.fine else plural(self.num_differences, "difference")
        lines = [f"decisions of operators computed again: {asked}: {found}"]
        if self.num_unknown:
            lines.append(f"not computed again, since their records are deleted: {plural(self.num_unknown, 'group')}")
        lines += [f"  {sentence}" for sentence in self.differences]
        if (more := self.num_differences - len(self.differences)) > 0:
            lines.append(f"  and {more:,} more")
        return "\n".join(lines)


def shown(value: Any) -> str:
    """Return the value's repr, cut to 300 characters."""
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:297]}..."


# ------------------------------ growing tasksets at the time when each group was drawn, for recomputing the draws


class Growth:
    """The growing tasksets at the times of successive draws. The recomputation makes it and calls `grow` before each
    draw."""

    def __init__(
        self, growing: GrowingTasksets, records: Sequence[tuple[Record, Message | None]], found: Recomputation
    ) -> None:
        self._growing, self._records, self._found = growing, records, found
        self._num_folded = 0

    def __bool__(self) -> bool:
        return bool(self._growing)

    def grow(self, where: str, end: int | None) -> bool:
        """Extend the tasksets to the records below the offset `end`. Return whether that was possible."""
        if not self._growing and end is None:
            return True
        if end is None or end < self._growing.end:
            self._found.differs(f"{where}: problems_end = {end}, expected {self._growing.end} or more")
            return False
        while self._num_folded < len(self._records) and self._records[self._num_folded][0].offset < end:
            record, message = self._records[self._num_folded]
            self._growing.absorb(message, record.offset)
            self._num_folded += 1
        return True
