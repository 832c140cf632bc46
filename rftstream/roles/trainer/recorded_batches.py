"""Reads the recorded batches one after the other, share by share, so that a damaged record belongs to exactly one
batch."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from rftstream.contracts import codec
from rftstream.contracts.records import Record, TopicPartition
from rftstream.errors import ContractError, ForeignRecord
from rftstream.roles.trainer.assembly import Batch, BatchAssembly, CommittedBatches
from rftstream.service.reading import read_between
from rftstream.service.role import Log, Received
from rftstream.transport.base import Transport


class RecordedBatches:
    """Reads `batches` by position, at most one poll of each share ahead. A replay makes it and calls `next` until that
    returns None. `rest` reads on to the end, and `close` comes last."""

    def __init__(self, transport: Transport, positions: Sequence[int], first: int) -> None:
        """Read from batch `first` on, which begins at these positions of the shares."""
        self._log = Log(transport)
        ends = transport.admin.end_offsets("batches")
        self._shares = [
            read_between(transport, {place: start}, {place: ends[place]})
            for place, start in zip(sorted(ends), positions, strict=True)
        ]
        self._committed = CommittedBatches(self._log)
        self._assembly = BatchAssembly(len(self._shares), first, self._committed)
        self.foreign: set[tuple[TopicPartition, int]] = set()
        """Place and offset of records that belong to no batch."""

    def next(self) -> Batch | None:
        """Return the next batch; None at the end of the log. ContractError if the batch cannot be read or contradicts
        its manifest."""
        for number, share in enumerate(self._shares):
            num_closed = self._assembly.num_closed(number)
            while self._assembly.num_closed(number) == num_closed:
                record = next(share, None)
                if record is None:
                    return None
                self._add(record)
        batch = self._assembly.take()
        assert batch is not None, "a manifest of each share"
        return batch

    def _add(self, record: Record) -> None:
        if codec.is_foreign(record):
            self.foreign.add((record.place, record.offset))
            return
        try:
            received = Received(record, self._log.rule.decode(record))
        except ContractError as error:
            self.foreign.add((record.place, record.offset))
            if not isinstance(error, ForeignRecord):
                self._assembly.undecodable(record, error)
            return
        self.foreign.update((foreign.record.place, foreign.record.offset) for foreign in self._assembly.add(received))

    def rest(self) -> None:
        """Read the remaining records to the end. ContractError as for `next`."""
        while self.next() is not None:
            pass
        for share in self._shares:
            for record in share:
                self._add(record)
        # Records that were committed meanwhile are complete in the shares that were read last, and not in the others.
        records = self._assembly.open_records()
        places = [(record.place, record.offset) for record in records if not self._is_committed(record)]
        self.foreign.update(places)

    def _is_committed(self, record: Record) -> bool:
        sequence = record.number("batch_sequence")
        return sequence is not None and self._committed.is_committed(sequence)

    def close(self) -> None:
        """Close the readers."""
        for share in self._shares:
            share.close()  # type: ignore[attr-defined]


def foreign_places(transport: Transport, positions: Sequence[int], first: int) -> set[tuple[TopicPartition, int]]:
    """Return place and offset of all records of `batches` that belong to no batch, from batch `first` on, which begins
    at these positions. After a damaged record, which is not foreign, the rest of the log is not examined."""
    batches = RecordedBatches(transport, positions, first)
    with contextlib.suppress(ContractError):
        batches.rest()
    batches.close()
    return batches.foreign
