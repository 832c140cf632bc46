"""Bodies of the buffer's open groups: in memory up to a limit, the rest read again from the log when needed."""

from __future__ import annotations

from collections import OrderedDict

from rftstream.contracts import codec
from rftstream.contracts.records import TopicPartition
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.errors import PositionMissing
from rftstream.transport.base import Transport


class Bodies:
    def __init__(self, transport: Transport, max_bytes: int) -> None:
        self._transport = transport
        self._max_bytes = max_bytes
        self._held: OrderedDict[tuple[TopicPartition, int], tuple[VerifiedRollout, int]] = OrderedDict()
        self.num_bytes = 0

    def hold(self, place: TopicPartition, offset: int, verified: VerifiedRollout, num_bytes: int) -> None:
        """Keeps the oldest: batches take groups in order, so the newest are needed last."""
        if self.num_bytes + num_bytes <= self._max_bytes:
            self._held[place, offset] = (verified, num_bytes)
            self.num_bytes += num_bytes

    def get(self, place: TopicPartition, offset: int) -> VerifiedRollout:
        held = self._held.get((place, offset))
        if held is not None:
            return held[0]
        reader = self._transport.reader({place: offset})
        try:
            records = reader.poll(max_records=1)
        finally:
            reader.close()
        if not records or records[0].offset != offset:
            raise PositionMissing(
                f"{place}@{offset}: the record of an open group is gone from the log; "
                "retention deleted what was still needed"
            )
        message = codec.from_record(records[0])
        assert isinstance(message, VerifiedRollout)
        return message

    def forget(self, place: TopicPartition, offset: int) -> None:
        held = self._held.pop((place, offset), None)
        if held is not None:
            self.num_bytes -= held[1]
