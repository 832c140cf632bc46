"""Looking on the log for one's own output, after a commit whose result is unknown."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rftstream.contracts.records import NewRecord, Record, TopicPartition
from rftstream.service.role import Log
from rftstream.transport.base import Transport


class OutputLookup:
    """Finds out which records of a commit are on the log, when the commit raised ProducerLost.

    A loop calls `note_ends` before each commit. After a ProducerLost it closes or starts its producer again, so that
    nothing more of the lost commit can arrive, and asks `find` (or `holds`) before it writes anything else.
    """

    def __init__(self, transport: Transport, *, bodies: bool = False) -> None:
        """Look on this log; `bodies` says whether the records that are found have their values."""
        self._transport = transport
        self._bodies = bodies
        self._ends: dict[TopicPartition, int] = {}
        """The ends of the partitions before the commit that was tried last."""

    def note_ends(self, places: Collection[TopicPartition]) -> None:
        """Note the ends of these partitions, so that records written from now on can be found there."""
        ends: dict[TopicPartition, int] = {}
        for topic in sorted({place.topic for place in places}):
            partitions = {place.partition for place in places if place.topic == topic}
            ends |= self._transport.admin.end_offsets(topic, partitions=partitions)
        self._ends = ends

    def find(self) -> list[Record]:
        """Return the records that were written since `note_ends` to its partitions.

        Raises TransportError while a transaction in one of them is still open: it may be the lost one."""
        found: list[Record] = []
        for topic in sorted({place.topic for place in self._ends}):
            partitions = {place.partition for place in self._ends if place.topic == topic}
            log = Log(self._transport)
            found += log.read(topic, start=self._ends, bodies=self._bodies, settled=True, partitions=partitions)
        return found

    def holds(self, records: Sequence[NewRecord]) -> bool:
        """Return whether these records, which were one transaction, are on the log."""
        there = {(record.topic, record.partition, record.key, record.value) for record in self.find()}
        return all((record.topic, record.partition, record.key, record.value) in there for record in records)
