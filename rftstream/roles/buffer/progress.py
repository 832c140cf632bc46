"""The buffer's progress, derived from `outcomes` and the positions that the buffer commits."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping

from rftstream.contracts.batches import BatchManifest
from rftstream.contracts.outcomes import DecidedSequences, GroupOutcome, GroupResult
from rftstream.contracts.records import TopicPartition
from rftstream.contracts.summaries import OutcomesSummary
from rftstream.roles.buffer.demonstrations import Cursor
from rftstream.roles.buffer.tally import Tally
from rftstream.transport.base import Position

log = logging.getLogger(__name__)


class BufferProgress:
    """The buffer's progress: everything decided, written and read so far.

    The step makes it at each recovery. It calls `begin` with a summary if there is one, `recall` for each outcome after
    the summary, and `restore` for the committed positions. While the step works, it stores its read positions in
    `read`, asks `positions` for each transaction, and calls `batch_written` once a batch is on the log."""

    def __init__(self) -> None:
        self.decided = DecidedSequences()
        """Groups that have an outcome, with those of the next transaction."""
        self._missing: dict[int, set[int] | None] = {}
        """Group sequence -> siblings that had not arrived when the group was decided; None if the outcome does not name
        them. Groups that were decided when complete are left out."""
        self.tally = Tally()
        """Rewards and lengths of the groups decided since the last batch of rollouts."""
        self.filtered: Counter[str] = Counter()
        """Filtered groups since the last batch of rollouts, by reason."""
        self.next_batch = 0
        """Sequence of the next batch."""
        self.total_groups = 0
        """Groups in all batches so far."""
        self.is_last_written = False
        """Whether the run's last batch is on the log."""
        self.read: dict[TopicPartition, int] = {}
        """The next offset of each partition of `verified`."""
        self._read_before: dict[TopicPartition, int] = {}
        """Value of `read` in the committed positions from which this process began."""

    def begin(self, summary: OutcomesSummary) -> None:
        """Begin after the records of a summary. Their last one is an outcome of a batch, so no group was decided since
        then."""
        self.decided = DecidedSequences(summary.below, summary.above)
        self._missing = {one.sequence: set(one.siblings) for one in summary.missing}
        self.total_groups = summary.groups.get(GroupResult.batched, 0)
        self.next_batch = summary.next_batch

    def recall(self, outcome: GroupOutcome) -> None:
        """Apply an outcome from the log."""
        present = outcome.siblings()
        if outcome.late:
            for sibling in present:
                self.came_late(outcome.sequence, sibling)
            return
        self.decide(outcome.sequence, outcome.group_size, present)
        if outcome.result is GroupResult.batched:
            self.total_groups += 1
            if self.next_batch != (outcome.batch_sequence or 0) + 1:
                self.next_batch = (outcome.batch_sequence or 0) + 1
                self.tally, self.filtered = Tally(), Counter()
            return
        if outcome.result is GroupResult.filtered:
            self.filtered[outcome.reason] += 1
        self.tally.group(outcome.taskset, outcome.result, outcome.rollouts)

    def decide(self, sequence: int, size: int, present: Collection[int]) -> None:
        """Record that a group has an outcome, and which of its siblings were present. `size` is 0 if the number of
        siblings is unknown."""
        self.decided.add(sequence)
        if size == 0 or not present:
            self._missing[sequence] = None
        elif missing := set(range(size)).difference(present):
            self._missing[sequence] = missing

    def came_late(self, sequence: int, sibling: int) -> bool:
        """Record that a sibling of a decided group has arrived. Return False for a copy of a sibling that arrived
        before."""
        if sequence not in self._missing:
            return False
        missing = self._missing[sequence]
        if missing is None:
            return True
        is_new = sibling in missing
        missing.discard(sibling)
        if not missing:
            del self._missing[sequence]
        return is_new

    def restore(self, committed: Mapping[TopicPartition, Position], begins: Mapping[TopicPartition, int]) -> Cursor:
        """Begin to read at the committed positions. Return the state of the passes through the demonstrations.

        The buffer's own positions have metadata. A position without metadata, other than the one from the run's
        creation, was set by somebody else. Its partition is read from the beginning (`begins`), and decided groups are
        skipped."""
        passes: tuple[int, ...] = ()
        for place, position in committed.items():
            if not position.metadata and position.offset > begins.get(place, position.offset):
                log.warning(
                    "%s: the buffer's position (%d) was set by somebody else, for it has no metadata; reading from %d, "
                    "and passing over what is decided",
                    place,
                    position.offset,
                    begins[place],
                )
                position = Position(begins[place])
            self.read[place] = position.offset
            read, next_batch, last, *numbers = map(int, (position.metadata or f"{position.offset} 0 0").split())
            self._read_before[place] = read
            self.next_batch = max(self.next_batch, next_batch)
            self.is_last_written = self.is_last_written or bool(last)
            passes = max(passes, tuple(numbers))
        return Cursor.of(passes)

    def is_new(self, place: TopicPartition, offset: int) -> bool:
        """Whether a record of `verified` was still unread at the committed positions."""
        return offset >= self._read_before.get(place, 0)

    def positions(
        self, low_waters: Mapping[TopicPartition, int], cursor: Cursor, *, next_batch: int, last: bool = False
    ) -> dict[TopicPartition, Position]:
        """Return the positions of all partitions for a transaction. `low_waters` are the first offsets of the oldest
        open groups. `next_batch` and `last` are the values after the transaction.

        The metadata holds what outcomes do not tell: for example, an empty last batch has no outcomes."""
        passes = f" {cursor.to_text()}" if cursor.begun else ""
        return {
            place: Position(min(low_waters.get(place, read), read), f"{read} {next_batch} {int(last)}{passes}")
            for place, read in self.read.items()
        }

    def batch_written(self, manifest: BatchManifest, *, of_rollouts: bool) -> None:
        """Move on to the next batch, since this one is on the log."""
        self.next_batch += 1
        self.total_groups = manifest.total_groups
        self.is_last_written = manifest.last
        if of_rollouts:
            self.tally, self.filtered = Tally(), Counter()
