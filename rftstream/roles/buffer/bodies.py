"""Rollout bodies of the buffer's open groups. They are in memory up to a limit; the others are read from the log when
needed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from rftstream.contracts import codec
from rftstream.contracts.records import TopicPartition
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.errors import PositionMissing
from rftstream.roles.buffer.groups import Group
from rftstream.service.reading import PlaceReader
from rftstream.transport.base import Transport

PART_BYTES = 16 << 20
"""Bytes of bodies that are read from the log at once, unless those of one group are more."""


class Bodies:
    """The bodies of rollouts in open groups. The step makes it at each recovery. It calls `hold` for each body that it
    reads, `get` or `get_all` when a batch needs bodies, `forget` once a group's outcome is on the log, and `close`
    last."""

    def __init__(self, transport: Transport, max_bytes: int) -> None:
        self._reader = PlaceReader(transport, "verified")
        self._max_bytes = max_bytes
        self._held: dict[tuple[TopicPartition, int], tuple[VerifiedRollout, int]] = {}
        self._elsewhere: dict[tuple[TopicPartition, int], int] = {}
        """Bytes of bodies that are on the log alone."""
        self.num_bytes = 0

    def hold(self, place: TopicPartition, offset: int, verified: VerifiedRollout, num_bytes: int) -> None:
        """Keep the body if there is room. The oldest bodies are kept, since batches take groups in order and need the
        newest ones last."""
        if self.num_bytes + num_bytes <= self._max_bytes:
            self._held[place, offset] = (verified, num_bytes)
            self.num_bytes += num_bytes
        else:
            self._elsewhere[place, offset] = num_bytes

    def in_parts(self, groups: Iterable[Group]) -> Iterator[list[Group]]:
        """Yield the groups in order, some at a time: so many that what must be read for them is little."""
        some, num_bytes = list[Group](), 0
        for group in groups:
            added = sum(self._elsewhere.get(sibling.place_offset, 0) for sibling in group.kept)
            if some and num_bytes + added > PART_BYTES:
                yield some
                some, num_bytes = [], 0
            some.append(group)
            num_bytes += added
        if some:
            yield some

    def get(self, place: TopicPartition, offset: int) -> VerifiedRollout:
        """Return the rollout at this place. PositionMissing if the record is gone from the log."""
        return self.get_all([(place, offset)])[place, offset]

    def get_all(
        self, places: Collection[tuple[TopicPartition, int]]
    ) -> dict[tuple[TopicPartition, int], VerifiedRollout]:
        """Return the rollouts at these places. PositionMissing if a record is gone from the log."""
        found = {place: self._held[place][0] for place in places if place in self._held}
        for record in self._reader.read(place for place in places if place not in found):
            message = codec.from_record(record)
            assert isinstance(message, VerifiedRollout)
            found[record.place, record.offset] = message
        for partition, offset in places:
            if (partition, offset) not in found:
                raise PositionMissing(
                    f"{partition}@{offset}: the record of an open group is gone from the log; "
                    "retention deleted what was still needed"
                )
        return found

    def forget(self, place: TopicPartition, offset: int) -> None:
        """Drop a body that is no longer needed."""
        self._elsewhere.pop((place, offset), None)
        held = self._held.pop((place, offset), None)
        if held is not None:
            self.num_bytes -= held[1]

    def close(self) -> None:
        """Close the reader of bodies that are not in memory."""
        self._reader.close()
