"""Reading what former owners of partitions saved, before the work of these partitions is begun.

The order matters. First the stable positions are asked for: from then on nobody else can commit anything for these
partitions. Then the ends of what was saved are asked for, when no transaction is open. Whatever was committed lies
below them.
"""

from __future__ import annotations

from collections.abc import Mapping

from rftstream.contracts.records import TopicPartition
from rftstream.service.records.moved_positions import own_positions
from rftstream.service.role import SavingStep
from rftstream.transport.base import Member, Position, Reader, Transport


class PartialsRestore:
    """Reads the partial rollouts that former owners of some partitions have saved. OwnedPartitions makes it when the
    worker comes to own them, calls `advance` until that returns True, takes `positions`, and calls `close`. It makes
    another if the partitions change meanwhile. `places` are the partitions, with the numbers of their assignments."""

    def __init__(
        self, transport: Transport, member: Member, places: Mapping[TopicPartition, int], topic: str | None = None
    ) -> None:
        """Ask for positions and ends. `topic` holds what was saved; None if the role saves nothing."""
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
        """Pass the step some of the saved records; return whether these were all. If it raises, it is called again."""
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
