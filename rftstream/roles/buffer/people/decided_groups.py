"""What became of each group, for votes that come after its outcome: 20 bytes a group."""

from __future__ import annotations

from array import array
from hashlib import blake2b

from rftstream.contracts.outcomes import GroupResult
from rftstream.data.feedback.fold import GroupStatus

RESULTS = tuple(GroupResult)


class DecidedGroups:
    """The fate of every decided group, by sequence. FeedbackIntake makes it, calls `add` for each outcome, and asks
    `find`."""

    def __init__(self) -> None:
        self._digests = array("Q")
        """Digests of group ids, by sequence; 0 where the group is not known."""
        self._batches = array("q")
        """Batch sequence, or -1."""
        self._facts = array("I")
        """Siblings times the number of results, plus the result."""

    def add(self, sequence: int, group_id: str, size: int, result: GroupResult, batch: int | None) -> None:
        """Take a group that has an outcome."""
        missing = sequence + 1 - len(self._digests)
        if missing > 0:
            self._digests.extend([0] * missing)
            self._batches.extend([-1] * missing)
            self._facts.extend([0] * missing)
        self._digests[sequence] = _digest(group_id)
        self._batches[sequence] = -1 if batch is None else batch
        self._facts[sequence] = size * len(RESULTS) + RESULTS.index(result)

    def __contains__(self, sequence: int) -> bool:
        return sequence < len(self._digests) and self._digests[sequence] != 0

    def find(self, sequence: int, group_id: str, siblings: list[int]) -> GroupStatus | None:
        """Return the result of the group with this sequence; None if that is another group, or has no such siblings."""
        size, result = divmod(self._facts[sequence], len(RESULTS))
        if self._digests[sequence] != _digest(group_id) or max(siblings) >= size:
            return None
        batch = self._batches[sequence]
        return GroupStatus(RESULTS[result], None if batch < 0 else batch)


def _digest(group_id: str) -> int:
    return int.from_bytes(blake2b(group_id.encode(), digest_size=8).digest(), "little") or 1
