"""The recorded batches one after the other, share by share, so that whatever is damaged belongs to one batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rftstream import codec
from rftstream.messages import BatchManifest
from rftstream.roles.assembly import Batch, BatchAssembly
from rftstream.runtime.role import Received
from rftstream.transport.base import Record, TopicPartition, Transport


class RecordedBatches:
    """Reads `batches` by position, never more than a poll of each share ahead."""

    def __init__(self, transport: Transport, positions: Sequence[int], first: int) -> None:
        """From batch `first` on, which begins at these positions of the shares."""
        self._transport = transport
        ends = transport.admin.end_offsets("batches")
        self._shares = [self._read(place, start, ends[place])
                        for place, start in zip(sorted(ends), positions, strict=True)]  # fmt: skip
        self._assembly = BatchAssembly(len(self._shares), first)

    def next(self) -> Batch | None:
        """The next batch; None at the end of the log. ContractError if it cannot be read, or is not what it was."""
        for share in self._shares:
            for record in share:
                message = codec.from_record(record)
                self._assembly.add(Received(record, message))
                if isinstance(message, BatchManifest):
                    break
            else:
                return None
        batch = self._assembly.take()
        assert batch is not None, "a manifest of each share"
        return batch

    def close(self) -> None:
        for share in self._shares:
            share.close()  # type: ignore[attr-defined]

    def _read(self, place: TopicPartition, start: int, end: int) -> Iterator[Record]:
        reader = self._transport.reader({place: start})
        try:
            while reader.position(place) < end:
                records = reader.poll()
                yield from (one for one in records if one.offset < end and not codec.is_foreign(one))
                if not records:
                    self._transport.wait([reader], 0.05)
        finally:
            reader.close()
