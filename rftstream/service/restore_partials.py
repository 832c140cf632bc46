"""What former owners of partitions saved, read before their work is begun.

The order matters. First the stable positions: from then on nobody else can commit anything for these partitions. Then
the ends of what was saved, past all transactions that are still open. Whatever was committed lies below them.
"""

from __future__ import annotations

from collections.abc import Mapping

from rftstream.contracts.records import TopicPartition
from rftstream.service.role import SavingStep
from rftstream.transport.base import Member, Position, Reader, Transport


class PartialsRestore:
    """Reads what former owners of some partitions have saved. ConcurrentService makes it when it comes to own them,
    calls `advance` until that returns True, takes `positions`, and calls `close`; it makes another if the partitions
    change meanwhile. `places`: the partitions, with the numbers of their assignments."""

    def __init__(
        self, transport: Transport, member: Member, places: Mapping[TopicPartition, int], topic: str | None = None
    ) -> None:
        """`topic`: where what is not finished was saved, if the role does so."""
        self.places = dict(places)
        self.positions: Mapping[TopicPartition, Position] = member.committed(list(places))
        self.reader: Reader | None = None
        self._ends: dict[TopicPartition, int] = {}
        self._has_begun = False
        if topic is not None:
            numbers = {place.partition for place in places}
            self._ends = transport.admin.end_offsets(topic, settled=True, partitions=numbers)
            self.reader = transport.reader(dict.fromkeys(self._ends, 0))

    def advance(self, step: SavingStep) -> bool:
        """Hand the step some of it; return whether that was all. It may fail for now, and go on later."""
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
