"""Siblings that wait for each other, for a reward that compares them. They share a partition, so one verifier sees them
all.

Nothing is written while they wait: their positions are not committed, and a successor reads all of them again. The
records of the whole group are then published in one transaction. So a sibling is never judged twice, and none is judged
without a sibling whose verdict was lost.

If a group is not complete within `group_timeout_s`, those that are there are judged, provided that they are more than
half of the group. The others have no verdict, whenever they come: they are less than half. No record has to remember
that.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from msgspec import structs

from rftstream.clock import Clock
from rftstream.config.role_sections import VerifierSection
from rftstream.contracts import codec
from rftstream.contracts.tasks import RolloutIds
from rftstream.errors import TransportError
from rftstream.service.reading import PlaceReader
from rftstream.service.role import FOREVER, Item, Received
from rftstream.transport.base import Transport

MAX_GAP_S = 5.0
"""Most seconds between two slices that count as waiting. A process that stood still has not waited for siblings."""

MAX_EARLIER = 10_000
"""Most groups of which it is remembered who was judged. Siblings of a forgotten one wait for `group_timeout_s`."""


@dataclass(slots=True)
class WaitingSibling:
    """One rollout in hand."""

    item: Item
    """The item. Its record has no value, and its message is None, if the body lies on the log alone."""
    ids: RolloutIds
    absent: str | None = None
    """Why the rollout has nothing to compare; None if it has."""
    error: str | None = None
    """The error of a record that cannot be decoded, so that the item has no message."""
    num_bytes: int = 0
    """Bytes of the body in memory."""


@dataclass(slots=True)
class WaitingGroup:
    """The siblings of a group that are in hand."""

    group_id: str
    size: int
    siblings: dict[int, WaitingSibling] = field(default_factory=dict)
    """By their number in the group."""
    earlier: frozenset[int] = frozenset()
    """Siblings that have their records already, since the group was judged without those that are here."""
    since_s: float = 0.0
    """When the newest sibling came, in seconds of waiting."""

    @property
    def complete(self) -> bool:
        """Whether no further sibling will come."""
        return len(self.siblings) + len(self.earlier) >= self.size

    @property
    def is_majority(self) -> bool:
        """Whether those that are here are judged, whatever becomes of the others."""
        return 2 * len(self.siblings) > self.size

    @property
    def compared(self) -> list[tuple[int, WaitingSibling]]:
        """The siblings that have something to compare, in order, with their numbers."""
        return [(number, one) for number, one in sorted(self.siblings.items()) if one.absent is None]

    @property
    def absent(self) -> dict[int, str]:
        """The other siblings, and why they are missing."""
        found = {number: one.absent for number, one in self.siblings.items()}
        wanted = ((number, found.get(number, "late")) for number in range(self.size))
        return {number: why for number, why in wanted if why is not None}

    @property
    def numbers(self) -> list[int]:
        """Numbers of the items, in the order of the siblings."""
        return [one.item.number for _, one in sorted(self.siblings.items())]


class WaitingGroups:
    """Groups that are not complete. The verifier's step makes it. It calls `add` for each rollout, `waited` in each
    slice, `take_due` for the groups to judge, and `drop` for rollouts of lost partitions."""

    def __init__(self, transport: Transport, clock: Clock, settings: VerifierSection) -> None:
        self._reader = PlaceReader(transport, "rollouts")
        self._clock = clock
        self._timeout_s = math.inf if settings.group_timeout_s is None else settings.group_timeout_s
        self._max_bytes = settings.max_waiting_bytes
        self._groups: dict[str, WaitingGroup] = {}
        self._complete: dict[str, None] = {}
        self._earlier: OrderedDict[str, frozenset[int]] = OrderedDict()
        """Groups that were judged before they were complete -> siblings that have their records."""
        self._waited_s = 0.0
        self._seen_at = clock.now()
        self.num_bytes = 0
        """Bytes of bodies in memory."""

    def __len__(self) -> int:
        return sum(len(group.siblings) for group in self._groups.values())

    @property
    def numbers(self) -> list[int]:
        """Numbers of all waiting items."""
        return [number for group in self._groups.values() for number in group.numbers]

    def add(self, item: Item, ids: RolloutIds, *, absent: str | None = None, error: str | None = None) -> None:
        """Add a rollout. Its body stays in memory if there is room, and is otherwise read again later."""
        group = self._groups.get(ids.group_id)
        if group is None:
            earlier = self._earlier.pop(ids.group_id, frozenset[int]())
            group = self._groups[ids.group_id] = WaitingGroup(ids.group_id, ids.group_size, earlier=earlier)
        record, num_bytes = item.received.record, len(item.received.record.value or b"")
        if self.num_bytes + num_bytes > self._max_bytes:
            num_bytes = 0
            item = Item(item.number, Received(structs.replace(record, value=None), None))
        self.num_bytes += num_bytes
        group.siblings[ids.sibling] = WaitingSibling(item, ids, absent, error, num_bytes)
        group.since_s = self._waited_s
        if group.complete:
            self._complete[ids.group_id] = None

    def waited(self, *, has_room: bool) -> None:
        """Count the time since the last call as waiting. It does not count while the worker takes no records, since
        siblings may then lie on the log unread."""
        now = self._clock.now()
        self._waited_s += min(max(0.0, now - self._seen_at), MAX_GAP_S) if has_room else 0.0
        self._seen_at = now

    def take_due(self) -> list[WaitingGroup]:
        """Remove and return the groups that are complete, or have waited long enough, with all their bodies.
        TransportError if a record is gone from the log."""
        overdue = [] if self._timeout_s == math.inf else [
            group_id for group_id, group in self._groups.items() if self._waited_s - group.since_s >= self._timeout_s
        ]  # fmt: skip
        due = [self._groups[group_id] for group_id in dict.fromkeys((*self._complete, *overdue))]
        self._load(sibling for group in due for sibling in group.siblings.values())
        for group in due:
            self._remove(group)
            if not group.complete:
                self._earlier[group.group_id] = group.earlier | group.siblings.keys()
                if len(self._earlier) > MAX_EARLIER:
                    self._earlier.popitem(last=False)
        return due

    def drop(self, numbers: Collection[int]) -> None:
        """Forget rollouts. Their whole groups are in their partition."""
        gone = set(numbers)
        for group in [group for group in self._groups.values() if not gone.isdisjoint(group.numbers)]:
            self._remove(group)
        if gone:
            self._earlier.clear()  # a successor may have lost the verdicts of some, or have judged the others

    def close(self) -> None:
        """Close the reader of bodies that are not in memory."""
        self._reader.close()

    def due_in_s(self) -> float:
        """Return the seconds until the next group has waited long enough; 0 if a group is complete."""
        if self._complete:
            return 0.0
        since = min((group.since_s for group in self._groups.values()), default=FOREVER)
        return min(max(0.0, since + self._timeout_s - self._waited_s), MAX_GAP_S) if since < FOREVER else FOREVER

    def _remove(self, group: WaitingGroup) -> None:
        del self._groups[group.group_id]
        self._complete.pop(group.group_id, None)
        self.num_bytes -= sum(sibling.num_bytes for sibling in group.siblings.values())

    def _load(self, siblings: Iterable[WaitingSibling]) -> None:
        """Read the bodies that are not in memory."""
        wanted = [one for one in siblings if one.item.received.record.value is None]
        places = [(one.item.received.record.place, one.item.received.record.offset) for one in wanted]
        records = {(record.place, record.offset): record for record in self._reader.read(places)}
        for sibling, place in zip(wanted, places, strict=True):
            if place not in records:
                raise TransportError(  # if another worker owns the partition by now, this one will hear of it
                    f"{place[0]}@{place[1]}: the record of a waiting rollout is gone from the log; retention deleted "
                    "what was still needed"
                )
            record = records[place]
            message = None if sibling.error is not None else codec.from_record(record)
            sibling.item = Item(sibling.item.number, Received(record, message))
