"""Reading the log for a single role: by position, with `control` first and always."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rftstream.contracts.records import Record, TopicPartition
from rftstream.errors import TransportError
from rftstream.service.reading import begin_positions, read_to_ends
from rftstream.transport.base import Reader, Transport


class SingleReader:
    """The reader of a single role. SingleService makes it together with itself, and calls:

    1. `read_control` as often as it claims the role. Before the first recovery the reader reads nothing but `control`.
    2. `read_from`, each time that the step has recovered: from then on it reads from the positions that the step named.
    3. `poll` in each slice, and `taking` around the handling of what came.
    4. `close`, last.
    """

    def __init__(self, transport: Transport, take_control: Callable[[Record], object]) -> None:
        """Open the reader; TransportError if the log does not answer. `take_control` is given what `read_control`
        reads."""
        self.reader: Reader = transport.reader(begin_positions(transport, ("control",)))
        self.is_paused = False
        """Whether the topics that the role consumes are left on the log for now."""
        self._transport = transport
        self._take_control = take_control
        self._consumed: list[TopicPartition] = []

    def read_control(self, *, settled: bool = False) -> None:
        """Read `control` to its end; `settled` as for `Admin.end_offsets`. Records of other topics are dropped, since
        the step recovers afterwards."""
        ends = self._transport.admin.end_offsets("control", settled=settled)
        for records in read_to_ends(self._transport, self.reader, ends):
            with self.taking(records) as taken:
                for record in records:
                    if record.topic == "control":
                        self._take_control(record)
                    taken.append(record)

    def read_from(self, positions: Mapping[TopicPartition, int], consumes: Sequence[str]) -> None:
        """Read from these positions on, and `control` from where it stands."""
        control = {place: self.reader.position(place) for place in self._transport.admin.end_offsets("control")}
        before, self.reader = self.reader, self._transport.reader({**control, **positions})
        before.close()
        self._consumed = [place for place in positions if place.topic in consumes]
        self.is_paused = False

    def poll(self, *, full: bool) -> list[Record]:
        """Return what is there now. While the step is `full`, the topics that it consumes bring nothing."""
        if full != self.is_paused:
            self.is_paused = full
            (self.reader.pause if full else self.reader.resume)(self._consumed)
        return self.reader.poll()

    @contextmanager
    def taking(self, records: Sequence[Record]) -> Iterator[list[Record]]:
        """Give a list to note each record in once it is taken. If the log does not answer in between, `control` is
        read again from the first record that was not taken."""
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
