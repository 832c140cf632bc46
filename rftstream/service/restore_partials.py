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
    """For partitions that this worker owns, by the number of their assignment."""

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
        """Some of it; whether that was all. May fail for now, and go on later."""
        if self.reader is None:
            return True
        if not self._has_begun:
            step.forget([place.partition for place in self._ends])
            self._has_begun = True
        step.restore_partials([one for one in self.reader.poll() if one.offset < self._ends[one.place]])
        return all(self.reader.position(place) >= end for place, end in self._ends.items())

    def close(self) -> None:
        if self.reader is not None:
            self.reader.close()
