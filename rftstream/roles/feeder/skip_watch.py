"""The rule for operators that skip everything: the run ends, with their names, instead of standing still."""

from __future__ import annotations

from rftstream.errors import StopRule
from rftstream.roles.feeder.cursor import FeederCursor


class SkipWatch:
    """Counts problems that operators skipped since a group was admitted, all by the same facts. The feeder's step makes
    it at each recovery, asks `may_draw` before it draws, and calls `committed` for each transaction on the log."""

    def __init__(self, limit: int, groups_per_batch: int) -> None:
        """`limit`: problems that may be skipped in a row."""
        self._limit = limit
        self._groups_per_batch = groups_per_batch
        self._in_a_row = 0
        self._seen = 0

    def may_draw(self, cursor: FeederCursor, seen: int, undecided: int) -> bool:
        """Return whether to ask the operators about more problems. If not, they have skipped all there are by the same
        facts, and outcomes may still change these; `seen` is then the same number. StopRule if no outcome can be
        expected: the `undecided` groups do not make a batch."""
        if seen != self._seen:
            self._in_a_row, self._seen = 0, seen
        if self._in_a_row < self._limit:
            return True
        if undecided >= self._groups_per_batch:
            return False
        raise StopRule(
            "no_signal",
            f"feeder: operators skipped all of the last {self._in_a_row:,} problems, so there is nothing to admit; "
            f"skipped in all: {cursor.counts.to_text()}; let them keep more, let solve_rate explore, or change the "
            "tasksets",
        )

    def committed(self, skipped: int | None) -> None:
        """Count the problems of a transaction without a group; None: it has one."""
        self._in_a_row = 0 if skipped is None else self._in_a_row + skipped
