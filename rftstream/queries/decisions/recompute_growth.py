"""Growing tasksets as they were when each group was drawn, for computing the draws again."""

from __future__ import annotations

from collections.abc import Sequence

from rftstream.contracts.messages import Message
from rftstream.contracts.records import Record
from rftstream.data.tasksets.growing import GrowingTasksets
from rftstream.queries.decisions.recomputation import Recomputation


class Growth:
    """The growing tasksets at the moments of draws, one after the other. The recomputation makes it and calls `grow`
    before each draw."""

    def __init__(
        self, growing: GrowingTasksets, records: Sequence[tuple[Record, Message | None]], found: Recomputation
    ) -> None:
        self._growing, self._records, self._found = growing, records, found
        self._num_folded = 0

    def __bool__(self) -> bool:
        return bool(self._growing)

    def grow(self, where: str, end: int | None) -> bool:
        """Bring the tasksets to the records below the offset `end`. Return whether that could be done."""
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
