"""How far the buffer has come: a view of `outcomes` and of the positions that it commits."""

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
    """The buffer's progress: everything decided, written and read so far. The step makes it at each recovery, calls
    `begin` with a summary if there is one, `recall` for each outcome behind the summary, and `restore` for the
    committed positions. While the step works, it notes in `read` how far it has read, asks `positions` for each
    transaction, and calls `batch_written` once a batch is on the log."""

    def __init__(self) -> None:
        self.decided = DecidedSequences()
        """Groups that have an outcome, those of the next transaction included."""
        self._missing: dict[int, set[int] | None] = {}
        """Siblings, by number, that had not come when their group was decided; None where the outcome does not say. A
        group that was decided with all of them is not here."""
        self.tally = Tally()
        """Rewards and lengths of what was decided since the last batch of rollouts."""
        self.filtered: Counter[str] = Counter()
        """Filtered groups since the last batch of rollouts, by reason."""
        self.next_batch = 0
        """Sequence of the next batch."""
        self.total_groups = 0
        """Groups in all batches so far."""
        self.is_last_written = False
        """Whether the batch that was marked as the run's last is on the log."""
        self.read: dict[TopicPartition, int] = {}
        """The next offset of each partition of `verified`."""
        self._read_before: dict[TopicPartition, int] = {}
        """Value of `read` when the positions were committed from which this process began."""

    def begin(self, summary: OutcomesSummary) -> None:
        """Begin behind the records of a summary. The last of them is an outcome of a batch, so no group was decided
        since."""
        self.decided = DecidedSequences(summary.below, summary.above)
        self._missing = {one.sequence: set(one.siblings) for one in summary.missing}
        self.total_groups = summary.groups.get(GroupResult.batched, 0)
        self.next_batch = summary.next_batch

    def recall(self, outcome: GroupOutcome) -> None:
        """Take an outcome that stands on the log."""
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
        """Note that a group has an outcome, and which of its siblings were there; `size` 0: it is not known how many
        there are."""
        self.decided.add(sequence)
        if size == 0 or not present:
            self._missing[sequence] = None
        elif missing := set(range(size)).difference(present):
            self._missing[sequence] = missing

    def came_late(self, sequence: int, sibling: int) -> bool:
        """Note that a sibling of a decided group has come. Return False for a copy: the sibling was there before."""
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
        """Begin to read at the committed positions. Return where the passes through the demonstrations stand.

        The buffer's positions have metadata. One without any, beyond that of a run's creation, was set by somebody
        else: that partition is read from its beginning (`begins`), and what is decided there is passed over."""
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
        """Whether a record of `verified` was not read before the committed positions were."""
        return offset >= self._read_before.get(place, 0)

    def positions(
        self, low_waters: Mapping[TopicPartition, int], cursor: Cursor, *, next_batch: int, last: bool = False
    ) -> dict[TopicPartition, Position]:
        """Return the positions of all partitions that a transaction commits. `low_waters`: where the oldest open group
        of a partition begins. `next_batch`, `last`: what holds once the transaction is on the log.

        The metadata holds what outcomes do not tell: an empty last batch has none."""
        passes = f" {cursor.to_text()}" if cursor.begun else ""
        return {
            place: Position(min(low_waters.get(place, read), read), f"{read} {next_batch} {int(last)}{passes}")
            for place, read in self.read.items()
        }

    def batch_written(self, manifest: BatchManifest, *, of_rollouts: bool) -> None:
        """Go on to the next batch: this one is on the log."""
        self.next_batch += 1
        self.total_groups = manifest.total_groups
        self.is_last_written = manifest.last
        if of_rollouts:
            self.tally, self.filtered = Tally(), Counter()
