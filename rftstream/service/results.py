"""What a concurrent role has finished or saved, until it is on the log: which of it goes into the next transaction, and
with which positions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rftstream.contracts.records import NewRecord, TopicPartition
from rftstream.service.output_lookup import OutputLookup
from rftstream.service.tracker import PartitionTracker
from rftstream.transport.base import Member, Position, Transport

MAX_TRANSACTION_BYTES = 8 << 20
MAX_TRANSACTION_RECORDS = 512


@dataclass(slots=True)
class InHand:
    """A record that was given to the step: where it stands, and by which assignment it was taken."""

    place: TopicPartition
    assignment: int
    offset: int


@dataclass(slots=True)
class PendingResult:
    """What came of a record in hand: to be published together with its position."""

    number: int
    work: InHand
    records: list[NewRecord]
    num_bytes: int
    finishes: bool = True
    """False: it is saved, and in hand as before."""
    leaves: bool = False
    """It is saved, and given back."""


def choose_results(results: Sequence[PendingResult], assignment: Mapping[TopicPartition, int]) -> list[PendingResult]:
    """Return the results of one transaction: the oldest whose partitions are still under the assignment that they were
    taken by. The next look at the assignment drops the others."""
    chosen: list[PendingResult] = []
    num_bytes = 0
    for result in results:
        if assignment.get(result.work.place) != result.work.assignment:
            continue
        if chosen and num_bytes + result.num_bytes > MAX_TRANSACTION_BYTES:
            break
        chosen.append(result)
        num_bytes += result.num_bytes
    return chosen


def positions_with(
    chosen: Sequence[PendingResult], trackers: Mapping[TopicPartition, tuple[int, PartitionTracker]], member: Member
) -> tuple[dict[TopicPartition, Position], list[PendingResult]]:
    """Return what to commit for these results, and those of them that fit into the metadata."""
    by_place: dict[TopicPartition, list[PendingResult]] = {}
    for result in chosen:
        by_place.setdefault(result.work.place, []).append(result)
    positions: dict[TopicPartition, Position] = {}
    taken: list[PendingResult] = []
    for place, results in by_place.items():
        tracker = trackers[place][1]
        offsets = [result.work.offset for result in results if result.finishes]
        position, held = tracker.position_after(offsets, member.position(place))
        fitting = [result for result in results if not result.finishes or result.work.offset not in set(held)]
        if fitting:
            # With nothing finished the position as it stands: with it the log sees whose the partition is.
            positions[place] = position if any(result.finishes for result in fitting) else tracker.position
            taken.extend(fitting)
    return positions, taken


class SavedRecords:
    """Looks up whether saved results are on the log, after a commit whose result is not known. The service calls
    `look_at_ends` before each commit, and `there` when it has to settle one."""

    def __init__(self, transport: Transport, topic: str | None) -> None:
        """`topic`: where what is not finished is saved, if the role does so."""
        self._topic = topic
        self._lookup = OutputLookup(transport)

    def look_at_ends(self, results: Collection[PendingResult]) -> None:
        """Note where the topic ends now, if some of the results are to be saved there."""
        partitions = {result.work.place.partition for result in results if not result.finishes}
        if partitions and self._topic is not None:
            self._lookup.note_ends({TopicPartition(self._topic, partition) for partition in partitions})

    def there(self, results: Collection[PendingResult]) -> set[tuple[int, bytes | None]]:
        """Return partition and key of what stands on the log since it was tried last to save something."""
        if all(result.finishes for result in results):
            return set()
        return {(record.partition, record.key) for record in self._lookup.find()}
