"""Reading the log for a single role: by position, and `control` before all other topics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rftstream.contracts.records import Record, TopicPartition
from rftstream.errors import TransportError
from rftstream.service.reading import read_to_ends
from rftstream.service.records.in_force import CONTROL, RecordsInForce
from rftstream.transport.base import Reader, Transport


class SingleReader:
    """The reader of a single role. SingleService makes it when it is made itself, and calls:

    1. `read_control` each time that it claims the role. Before the first recovery the reader reads only `control`.
    2. `read_from` after each recovery, with the positions that the step returned.
    3. `poll` in each slice, and `taking` around the handling of the polled records.
    4. `close`, last.
    """

    def __init__(self, transport: Transport, rule: RecordsInForce, take_control: Callable[[Record], object]) -> None:
        """Open the reader. TransportError if the log does not answer. `take_control` is called for each record that
        `read_control` reads. `rule` tells where `control` begins."""
        start = rule.begin_control()
        self._first = list(start.records)
        """Records of the summary of `control` that were not taken yet."""
        self.reader: Reader = transport.reader({CONTROL: start.offset})
        self.is_paused = False
        """Whether the reader delivers nothing from the consumed topics for now."""
        self._transport = transport
        self._take_control = take_control
        self._consumed: list[TopicPartition] = []

    def read_control(self, *, settled: bool = False) -> None:
        """Read `control` to its end. `settled` is as for `Admin.end_offsets`. Records of other topics are dropped,
        since the step recovers afterwards."""
        while self._first:
            self._take_control(self._first[0])
            del self._first[0]
        ends = self._transport.admin.end_offsets("control", settled=settled)
        for records in read_to_ends(self._transport, self.reader, ends):
            with self.taking(records) as taken:
                for record in records:
                    if record.topic == "control":
                        self._take_control(record)
                    taken.append(record)

    def read_from(self, positions: Mapping[TopicPartition, int], consumes: Sequence[str]) -> None:
        """Continue to read from these positions, and `control` from its current position."""
        control = {place: self.reader.position(place) for place in self._transport.admin.end_offsets("control")}
        before, self.reader = self.reader, self._transport.reader({**control, **positions})
        before.close()
        self._consumed = [place for place in positions if place.topic in consumes]
        self.is_paused = False

    def poll(self, *, full: bool) -> list[Record]:
        """Return the records that are available now. While the step is `full`, the consumed topics deliver nothing."""
        if full != self.is_paused:
            self.is_paused = full
            (self.reader.pause if full else self.reader.resume)(self._consumed)
        return self.reader.poll()

    @contextmanager
    def taking(self, records: Sequence[Record]) -> Iterator[list[Record]]:
        """Yield a list to which the caller adds each record once it is processed. If the log stops answering in
        between, `control` is read again from the first record that was not added."""
        taken: list[Record] = []
        try:
            yield taken
        except TransportError:
            left = next((record for record in records[len(taken) :] if record.topic == "control"), None)
            if left is not None:
                self.reader.seek(left.place, left.offset)
            raise

    def positions(self) -> dict[TopicPartition, int]:
        """Return the next offsets of the topics that the role consumes."""
        return {place: self.reader.position(place) for place in self._consumed}

    def close(self) -> None:
        """Close the reader."""
        self.reader.close()
