"""The partitions that a worker of a concurrent role owns. Partitions come and go, and their records finish in any
order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import cast

from rftstream import metrics
from rftstream.contracts.records import Record, TopicPartition
from rftstream.errors import PositionMissing, RecordsDeleted
from rftstream.service.control_view import read_control
from rftstream.service.loops.results import PendingResult
from rftstream.service.loops.tracker import PartitionTracker, encode_position
from rftstream.service.role import ConcurrentStep, Log, SavingStep
from rftstream.service.role_spec import RoleSpec
from rftstream.transport.base import Member, Position, Reader, Snapshot, Transport

log = logging.getLogger(__name__)


class OwnedPartitions:
    """A worker's membership in its role's consumer group. For each owned partition it knows which records are finished.

    ConcurrentService makes it when it joins the group. In each slice it calls `poll`, then `records` for the records to
    begin. For a transaction it calls `snapshot` and `positions_after`, and `committed` once the transaction is on the
    log. After a lost commit it calls `stable_positions`. `close` comes last and leaves the group.

    When a partition is lost, its work is dropped. When it comes back, it has another assignment number and starts
    afresh from its committed position."""

    def __init__(self, transport: Transport, spec: RoleSpec, step: ConcurrentStep, member: Member) -> None:
        self._transport, self._spec, self._step, self._member = transport, spec, step, member
        self._owned: dict[TopicPartition, tuple[int, PartitionTracker]] = {}
        """Number of the assignment, and the tracker, of each partition whose work may be begun."""
        self._restore: PartialsRestore | None = None
        """Reads what former owners of new partitions have saved; None if there are no new ones."""
        self._polled: list[Record] = []
        """Records that were delivered and not begun."""

    def __len__(self) -> int:
        return len(self._owned)

    def sources(self, *, has_room: bool) -> Sequence[Reader | Member]:
        """Return what to wait on: the member if there is room for more records, and what is being restored."""
        sources: list[Reader | Member] = [self._member] if has_room else []
        if self._restore is not None and self._restore.reader is not None:
            sources.append(self._restore.reader)
        return sources

    def working(self) -> AbstractContextManager[None]:
        """Return a context in which the membership lives on, however long the work in it takes."""
        return self._member.working()

    # ------------------------------------------------------------------------------------------ records

    def poll(self, room: int, drop: Callable[[TopicPartition], None]) -> bool:
        """Keep the membership alive, and poll up to `room` records. Return whether anything arrived or changed. `drop`
        is called for each lost partition."""
        self._polled += self._member.poll(max_records=max(0, room - len(self._polled)))
        changed = self._follow_assignment(drop)
        if changed:
            self._polled = [record for record in self._polled if record.place not in changed]
        return bool(self._polled or changed)

    def records(self) -> Iterator[tuple[Record, int]]:
        """Yield the polled records that still have to be processed, each with its assignment number.

        A record counts as begun when the next one is requested. If beginning a record raises, the next call yields it
        again, because the member does not deliver it twice."""
        while self._polled:
            record = self._polled[0]
            owned = self._owned.get(record.place)
            if owned is not None:
                number, tracker = owned
                if tracker.deliver(record.offset):
                    yield record, number
            del self._polled[0]

    def _follow_assignment(self, drop: Callable[[TopicPartition], None]) -> set[TopicPartition]:
        """Drop the partitions that were lost and begin the new ones. Return both."""
        assigned = self._member.assignment()
        lost = [place for place, (number, _) in self._owned.items() if assigned.get(place) != number]
        for place in lost:
            del self._owned[place]
            drop(place)
        new = self._begin({place: number for place, number in assigned.items() if place not in self._owned})
        if lost or new:
            metrics.REBALANCES.labels(self._spec.name).inc()
            metrics.PARTITIONS.labels(self._spec.name).set(len(self._owned))
            log.info("owns %d partitions (%d lost, %d new)", len(self._owned), len(lost), len(new))
        return {*lost, *new}

    def _begin(self, new: dict[TopicPartition, int]) -> Collection[TopicPartition]:
        """Set the positions of new partitions once all their saved work has been read. Return the partitions whose work
        may be begun now. The others deliver nothing yet."""
        if self._restore is not None and self._restore.places != new:
            self._restore.close()
            self._restore = None
        if not new:
            return ()
        if self._restore is None:
            self._restore = PartialsRestore(self._transport, self._member, new, self._spec.keeps)
        if not self._restore.advance(cast(SavingStep, self._step)):
            return ()
        for place, position in self._restore.positions.items():
            self._owned[place] = (new[place], PartitionTracker(position))
            self._member.seek(place, position.offset)
        self._restore.close()
        self._restore = None
        return new

    # ------------------------------------------------------------------------------------------ positions

    def snapshot(self) -> Snapshot:
        """Return the partitions that are owned now, for a transaction. The loop takes the snapshot before it chooses
        results."""
        return self._member.snapshot()

    def positions_after(
        self, chosen: Sequence[PendingResult]
    ) -> tuple[dict[TopicPartition, Position], list[PendingResult]]:
        """Return the positions to commit for these results, and the results that fit into the metadata."""
        by_place: dict[TopicPartition, list[PendingResult]] = {}
        for result in chosen:
            by_place.setdefault(result.work.place, []).append(result)
        positions: dict[TopicPartition, Position] = {}
        fitting: list[PendingResult] = []
        for place, results in by_place.items():
            _, tracker = self._owned[place]
            finished = [result.offsets for result in results if result.finishes]
            position, held = tracker.position_after(finished, self._member.position(place))
            fit = [result for result in results if not result.finishes or result.offsets not in held]
            if fit:
                # If nothing is finished, the unchanged position is committed, so that the log checks who owns the
                # partition.
                positions[place] = position if any(result.finishes for result in fit) else tracker.position
                fitting.extend(fit)
        return positions, fitting

    def committed(self, positions: Mapping[TopicPartition, Position], written: Sequence[PendingResult]) -> None:
        """Record that these positions are committed and that these results are on the log."""
        offsets: dict[TopicPartition, list[int]] = {place: [] for place in positions}
        for result in written:
            if result.finishes and result.work.place in offsets:
                offsets[result.work.place] += result.offsets
        for place, position in positions.items():
            self._owned[place][1].committed(position, offsets[place])

    def stable_positions(self) -> dict[TopicPartition, Position]:
        """Return the committed positions of all owned partitions, once no commit for them is pending."""
        return self._member.committed(list(self._owned))

    def low_water(self) -> dict[TopicPartition, int]:
        """Return for each owned partition the offset below which everything is finished."""
        return {
            # If nothing is open in a partition, only transaction markers can lie above the low-water offset.
            place: tracker.low_water if tracker.num_open else max(tracker.low_water, self._member.position(place))
            for place, (_, tracker) in self._owned.items()
        }

    def close(self) -> None:
        """Leave the group, and close the readers of saved work."""
        if self._restore is not None:
            self._restore.close()
        self._member.close()


# ------------------------------------------------------------------------------------------
#
# Reading the saved work of former owners, before work on their partitions is begun.
#
# The order matters. First the stable positions are requested: from then on no other member can commit for these
# partitions. Then the ends of the saved work are requested, when no transaction is open. All committed work is below
# these ends.


class PartialsRestore:
    """Reads the partial rollouts that former owners of some partitions have saved.

    OwnedPartitions makes it when the worker comes to own these partitions. It calls `advance` until that returns True,
    reads `positions`, and calls `close`. If the partitions change meanwhile, it makes a new one. `places` maps each
    partition to its assignment number."""

    def __init__(
        self, transport: Transport, member: Member, places: Mapping[TopicPartition, int], topic: str | None = None
    ) -> None:
        """Ask the log for positions and ends. `topic` holds the saved work; it is None if the role saves nothing."""
        self.places = dict(places)
        self.positions: Mapping[TopicPartition, Position] = own_positions(transport, member, list(places))
        self.reader: Reader | None = None
        self._ends: dict[TopicPartition, int] = {}
        self._has_begun = False
        if topic is not None:
            numbers = {place.partition for place in places}
            self._ends = transport.admin.end_offsets(topic, settled=True, partitions=numbers)
            self.reader = transport.reader(dict.fromkeys(self._ends, 0))

    def advance(self, step: SavingStep) -> bool:
        """Pass some of the saved records to the step. Return whether these were the last ones. If `advance` raises, it
        is called again."""
        if self.reader is None:
            return True
        if not self._has_begun:
            step.forget([place.partition for place in self._ends])
            self._has_begun = True
        step.restore_partials([record for record in self.reader.poll() if record.offset < self._ends[record.place]])
        return all(self.reader.position(place) >= end for place, end in self._ends.items())

    def close(self) -> None:
        """Close the reader."""
        if self.reader is not None:
            self.reader.close()


# ------------------------------------------------------------------------------------------
#
# Positions of a group that somebody else has set or deleted: an administrator has reset them to the newest or the
# earliest record, the group was deleted, or a broker has forgotten them.
#
# Every position that a worker commits has metadata (tracker.py). A position without metadata is from the creation of
# the run, or was set by somebody else, or by a release before this rule. The finished records are then found on the
# next topic, which has one record for each of them. So no record is skipped, and none is processed twice.


NEXT = {"tasks": "rollouts", "rollouts": "verified"}
"""Topic -> the topic that gets exactly one record for each record of the former. Both have the same partitions."""


def own_positions(
    transport: Transport, member: Member, places: Sequence[TopicPartition]
) -> dict[TopicPartition, Position]:
    """Return the positions of partitions that were just taken over, as `own_position` finds them. If the position of
    one partition is missing, all positions are derived from the next topic. PositionMissing if there is no next
    topic."""
    try:
        committed, is_missing = member.committed(places), False
    except PositionMissing as error:
        if any(place.topic not in NEXT for place in places):
            raise
        log.warning("%s; the group or its topic was deleted, or the positions expired; looking up what is done", error)
        committed, is_missing = dict.fromkeys(places, Position(0)), True
    return {
        place: own_position(transport, place, position, is_missing=is_missing) for place, position in committed.items()
    }


def own_position(
    transport: Transport, place: TopicPartition, position: Position, *, is_missing: bool = False
) -> Position:
    """Return the position of a partition that was just taken over.

    If somebody else has set the position, it is derived from the next topic. TransportError while an open transaction
    may hide finished records; the caller then asks again. RecordsDeleted if the position `is_missing` and the topic
    holds no record of the rollouts on the next topic: a broker forgets the positions of deleted topics."""
    after = NEXT.get(place.topic)
    if position.metadata or after is None:
        return position
    ends = transport.admin.end_offsets(after, settled=True, partitions=[place.partition])
    if not any(ends.values()) and position.offset == 0:
        return position  # of a new run
    reader, through = Log(transport), read_control(transport).deleted.sequence
    done = {record.header("rollout_id") for record in reader.read(after, bodies=False, partitions=[place.partition])}
    still_open, end, num_done = [], position.offset, 0
    for record in reader.read(place.topic, bodies=False, partitions=[place.partition]):
        end = record.offset + 1
        rollout, sequence = record.header("rollout_id"), record.header("sequence") or b""
        is_through = sequence.isdigit() and int(sequence) < through
        num_done += rollout in done
        if rollout is not None and rollout not in done and not is_through:
            still_open.append(record.offset)
    if is_missing and not num_done and not through and done - {None}:
        raise RecordsDeleted(
            f"{place}: holds no record of {len(done):,} rollouts that stand on {after}, expected all of them: the "
            "topic was deleted and made anew, and what it held is lost; begin a new run under another name, from what "
            "was trained (model.init_from)"
        )
    found = encode_position(still_open, set(), end)
    if found.offset != position.offset:
        log.warning(
            "%s: the position of its readers (%d) was set by somebody else, for it has no metadata; by %s, %d records "
            "are still to be done, the first at %d",
            place,
            position.offset,
            after,
            len(still_open),
            found.offset,
        )
    return found
