"""Read a log up to ends that are known beforehand. All such readers use this loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing

from rftstream.contracts.records import Record, TopicPartition
from rftstream.transport.base import Reader, Transport

WAIT_S = 0.05
"""Seconds to wait for records after an empty poll. A reader that is woken earlier polls earlier."""

MAX_RECORDS = 1000
"""Most records in one poll, unless the caller passes another limit."""


def read_to_ends(
    transport: Transport, reader: Reader, ends: Mapping[TopicPartition, int], *, max_records: int = MAX_RECORDS
) -> Iterator[list[Record]]:
    """Yield the records of each poll (possibly none), until the reader has reached `ends` in all these partitions.

    A poll may also return records of other partitions of the reader, and records at or above `ends`. The caller decides
    what to do with them. The reader stays open."""
    while any(reader.position(place) < end for place, end in ends.items()):
        records = reader.poll(max_records=max_records)
        yield records
        if not records:
            transport.wait([reader], WAIT_S)


def read_between(
    transport: Transport,
    starts: Mapping[TopicPartition, int],
    ends: Mapping[TopicPartition, int],
    *,
    bodies: bool = True,
) -> Iterator[Record]:
    """Yield the records of these partitions from their starts up to their ends, with a reader of its own."""
    wanted = sum(max(0, ends[place] - start) for place, start in starts.items())
    if not wanted:
        return  # a reader costs connections on Kafka
    reader = transport.reader(starts, bodies=bodies)
    try:
        for records in read_to_ends(transport, reader, ends, max_records=min(wanted, MAX_RECORDS)):
            yield from (record for record in records if record.offset < ends[record.place])
    finally:
        reader.close()


def begin_positions(transport: Transport, topics: Sequence[str]) -> dict[TopicPartition, int]:
    """Return the first offsets of all partitions of some topics."""
    positions: dict[TopicPartition, int] = {}
    for topic in topics:
        positions.update(transport.admin.begin_offsets(topic))
    return positions


def read_records(transport: Transport, place: TopicPartition, offsets: Collection[int]) -> dict[int, Record]:
    """Return the records at these offsets, by offset. Deleted or missing records are left out."""
    return {record.offset: record for record in each_record(transport, place, offsets)}


def each_record(transport: Transport, place: TopicPartition, offsets: Collection[int]) -> Iterator[Record]:
    """Yield the records at these offsets one after the other, so that only one of them is in memory. Deleted or missing
    records are left out."""
    admin = transport.admin
    begin, end = admin.begin_offsets(place.topic).get(place, 0), admin.end_offsets(place.topic).get(place, 0)
    wanted = sorted(offset for offset in offsets if begin <= offset < end)
    if not wanted:
        return
    reader = transport.reader({place: wanted[0]})
    try:
        for offset in wanted:
            if reader.position(place) != offset:
                reader.seek(place, offset)
            for records in read_to_ends(transport, reader, {place: offset + 1}, max_records=1):
                yield from (record for record in records if record.offset == offset)
    finally:
        reader.close()


SPARSE = 8
"""Offsets for each wanted one from which on a reader seeks them instead of reading all."""


class PlaceReader:
    """Reads records of a topic whose places are known, again and again, with one reader. A reader costs connections on
    Kafka. Its owner calls `read` as often as it likes, and `close` last."""

    def __init__(self, transport: Transport, topic: str) -> None:
        self._transport = transport
        self._topic = topic
        self._reader: Reader | None = None

    def read(self, places: Iterable[tuple[TopicPartition, int]]) -> Iterator[Record]:
        """Yield the records at these places, those of a partition in order. Deleted or missing records are left out."""
        admin, wanted = self._transport.admin, dict[TopicPartition, deque[int]]()
        for place, offset in sorted(places):
            wanted.setdefault(place, deque()).append(offset)
        if not wanted:
            return
        begins, ends = admin.begin_offsets(self._topic), admin.end_offsets(self._topic)
        for place, offsets in list(wanted.items()):
            wanted[place] = deque(offset for offset in offsets if begins.get(place, 0) <= offset < ends.get(place, 0))
        try:
            yield from self._read({place: offsets for place, offsets in wanted.items() if offsets}, ends)
        except BaseException:
            self.close()  # nobody knows where it stands
            raise

    def _read(self, wanted: dict[TopicPartition, deque[int]], ends: Mapping[TopicPartition, int]) -> Iterator[Record]:
        if self._reader is None:
            self._reader = self._transport.reader(ends)
            self._reader.pause(ends.keys())
        reader = self._reader
        for place, offsets in wanted.items():
            reader.seek(place, offsets[0])
        reader.resume(wanted.keys())
        while wanted:
            records = reader.poll(min(MAX_RECORDS, sum(map(len, wanted.values()))))
            for record in records:
                offsets = wanted.get(record.place, deque())
                while offsets and offsets[0] < record.offset:
                    offsets.popleft()  # it was deleted meanwhile
                if offsets and offsets[0] == record.offset:
                    offsets.popleft()
                    yield record
            for place, offsets in list(wanted.items()):
                position = reader.position(place)
                while offsets and offsets[0] < position:
                    offsets.popleft()
                if not offsets:
                    reader.pause([place])
                    reader.seek(place, position)  # so that it holds nothing that was fetched ahead
                    del wanted[place]
                elif offsets[0] - position >= SPARSE:
                    reader.seek(place, offsets[0])
            if not records and wanted:
                self._transport.wait([reader], WAIT_S)

    def close(self) -> None:
        """Close the reader. The next `read` opens another one."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()


def read_places(
    transport: Transport, places: Iterable[tuple[TopicPartition, int]]
) -> dict[tuple[TopicPartition, int], Record]:
    """Return the records at these places of one topic. Deleted or missing records are left out."""
    found: dict[tuple[TopicPartition, int], Record] = {}
    places = list(places)
    if places:
        with closing(PlaceReader(transport, places[0][0].topic)) as reader:
            found = {(record.place, record.offset): record for record in reader.read(places)}
    return found


def read_many(transport: Transport, place: TopicPartition, offsets: Collection[int]) -> Iterator[Record]:
    """Yield the records at these offsets, as `each_record` does, but as fast as the log can be read where they are
    dense."""
    begin = max(min(offsets, default=0), transport.admin.begin_offsets(place.topic).get(place, 0))
    end = min(max(offsets, default=-1) + 1, transport.admin.end_offsets(place.topic).get(place, 0))
    if end - begin > SPARSE * len(offsets):
        yield from each_record(transport, place, offsets)
    elif begin < end:
        records = read_between(transport, {place: begin}, {place: end})
        yield from (record for record in records if record.offset in offsets)


def search_by_halves(
    transport: Transport,
    place: TopicPartition,
    offsets: tuple[int, int],
    is_before: Callable[[Record], bool | None],
    *,
    within: int,
) -> tuple[int, int]:
    """Return two of the offsets, at most `within` apart: what is before them is before the wanted record, and what is
    behind them is not. `is_before` tells that of a record by its headers, or None for a record that says nothing. The
    records have to be in order; if one is not, the answer may be wrong."""
    low, high = offsets
    reader = transport.reader({place: low}, bodies=False)
    try:
        while high - low > within:
            middle = (low + high) // 2
            reader.seek(place, middle)
            found = None
            for records in read_to_ends(transport, reader, {place: high}, max_records=1):
                found = next((one for one in records if one.offset < high and is_before(one) is not None), None)
                if found is not None:
                    break
            if found is not None and is_before(found):
                low = found.offset + 1
            else:
                high = middle
    finally:
        reader.close()
    return low, high
