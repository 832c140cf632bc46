"""Positions of a group that somebody else has set or deleted: an administrator's reset, to the newest or to the
earliest record, a group that was deleted, positions that a broker has forgotten.

Every position that a worker commits has metadata beside it (tracker.py). One without any is that of a run's creation,
or was set by others, or by a release before this rule. What is done then stands on the next topic: a record there
for each that is finished. So nothing is passed over, and nothing is done twice.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rftstream.contracts.records import TopicPartition
from rftstream.errors import PositionMissing, RecordsDeleted
from rftstream.service.control_view import read_control
from rftstream.service.loops.tracker import encode_position
from rftstream.service.role import Log
from rftstream.transport.base import Member, Position, Transport

log = logging.getLogger(__name__)

NEXT = {"tasks": "rollouts", "rollouts": "verified"}
"""Topic -> the one on which each of its records has exactly one. They have the same partitions."""


def own_positions(
    transport: Transport, member: Member, places: Sequence[TopicPartition]
) -> dict[TopicPartition, Position]:
    """Return the positions of partitions that were just taken over, as `own_position` does. Where one is missing, all
    are looked up on the next topic. PositionMissing if there is no next topic."""
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
    """Return the position of a partition that was just taken over, as far as the log tells it. TransportError while an
    open transaction hides what is done; the caller asks again. RecordsDeleted if the position `is_missing`
    and the topic holds nothing of what was done: a broker forgets the positions of topics that are deleted."""
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
