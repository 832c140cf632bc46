"""The content of a record's headers, and how a log is read on from the last position."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

from rftstream.contracts.outcomes import GroupResult
from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.topics import TOPICS
from rftstream.service.reading import read_to_ends
from rftstream.transport.base import Reader, Transport

RESULTS = (GroupResult.batched, GroupResult.expired, GroupResult.filtered, GroupResult.dead)
"""The results in a fixed order. A result is stored as its index."""

MAX_POLLED = 8192
MAX_DIGITS = 9


class LogChanged(Exception):
    """The log is not the one that the rows were made from."""


@dataclass(slots=True)
class Mark:
    """The position up to which a partition was read, with a fingerprint to recognise the log."""

    end: int
    last: int = -1
    """Offset of the last record seen, -1 if there was none."""
    fingerprint: int = 0
    """Fingerprint of the last record seen."""


def digest(text: bytes) -> int:
    """Return the 64-bit digest of a text, the same in every process."""
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little", signed=True)


def fingerprint(record: Record) -> int:
    """Return a number that identifies a record."""
    return digest(repr((record.key, record.timestamp_s, record.headers)).encode())


def headers_of(record: Record) -> dict[str, bytes]:
    """Return the headers by name. Of several with the same name the first counts, as in Record.header."""
    return dict(reversed(record.headers))


def twin_key(topic: str, headers: Mapping[str, bytes]) -> bytes | None:
    """Return the headers that must be unique on the topic; None if one of them is missing."""
    try:
        return b"\0".join([headers[name] for name in TOPICS[topic].twin or ()])
    except KeyError:
        return None


def integer(text: bytes | None) -> int:
    """Return the header's number; -1 if it is no number, or too large for a count."""
    return int(text) if text is not None and text.isdigit() and len(text) <= MAX_DIGITS else -1


class NewRecords:
    """Reads topics on from the last position, again and again, with one reader. A reader costs connections on Kafka, so
    it is kept. Its owner calls `read` as often as it likes, `rest` when there is nothing new, and `rest` last."""

    def __init__(self, transport: Transport, *, bodies: bool = False) -> None:
        self._transport, self._bodies = transport, bodies
        self._reader: Reader | None = None
        self._places: frozenset[TopicPartition] = frozenset()
        self._left: dict[TopicPartition, tuple[Mark, int]] = {}
        """Marks and positions of the reader in a topic of which the caller wanted no more for now. It goes on there,
        with what it has fetched ahead: sought anew, it would fetch it all again at each call."""

    def read(
        self,
        topic: str,
        marks: dict[TopicPartition, Mark],
        ends: Mapping[TopicPartition, int],
        *,
        max_polled: int = MAX_POLLED,
    ) -> Generator[list[Record], None, None]:
        """Yield the records of a topic from its marks up to these ends, and advance the marks. LogChanged if the marks
        belong to another log. The ends may be those of other topics, too, which are to be read next."""
        begins = self._transport.admin.begin_offsets(topic)
        there = {place: end for place, end in ends.items() if place.topic == topic}
        for place, mark in marks.items():
            if place.topic == topic and mark.end > there.get(place, -1):
                raise LogChanged(f"{place} ends before {mark.end}, up to where it was read")
        own = {place: mark for place in there if (mark := marks.get(place, Mark(0))).end < there[place]}
        if not own:
            return
        goes_on = {place for place, mark in own.items() if self._stands_at(place, mark)}
        self._left.clear()
        # Start with the last record seen, not after it: it shows whether this is still the same log.
        unseen = {place: mark for place, mark in own.items() if mark.last >= begins[place] and place not in goes_on}
        starts = {place: mark.last if place in unseen else max(begins[place], mark.end) for place, mark in own.items()}
        reader, passed = self._standing(starts, ends, goes_on), set[TopicPartition]()
        try:
            for records in read_to_ends(
                self._transport, reader, {place: there[place] for place in own}, max_records=max_polled
            ):
                fresh = _fresh(records, there, unseen)
                passed.update(record.place for record in records if record.offset >= there[record.place])
                for place, record in {record.place: record for record in fresh}.items():
                    marks[place] = Mark(record.offset + 1, record.offset, fingerprint(record))
                if fresh:
                    yield fresh
        except GeneratorExit:
            reader.pause(own.keys())
            self._left = {
                place: (marks.get(place, Mark(0)), reader.position(place)) for place in own.keys() - unseen - passed
            }
            raise
        except BaseException:
            self.rest()  # nobody knows where it stands
            raise
        for place in own:
            reader.pause([place])
            reader.seek(place, reader.position(place))  # so that it holds nothing that was fetched ahead
        if unseen:
            place = min(unseen)
            raise LogChanged(f"{place}@{unseen[place].last} is there no more")
        for place in own:
            known = marks.get(place, Mark(0))
            marks[place] = Mark(there[place], known.last, known.fingerprint)

    def _stands_at(self, place: TopicPartition, mark: Mark) -> bool:
        left = self._left.get(place)
        return self._reader is not None and left == (mark, self._reader.position(place))

    def _standing(
        self,
        starts: Mapping[TopicPartition, int],
        ends: Mapping[TopicPartition, int],
        goes_on: Collection[TopicPartition],
    ) -> Reader:
        """Return the reader, which gives records of these partitions alone, from these positions on, or where it
        stands."""
        if self._reader is None or not ends.keys() <= self._places:
            self.rest()
            self._places = frozenset(ends)
            self._reader = self._transport.reader({**ends, **starts}, bodies=self._bodies)
            self._reader.pause(ends.keys() - starts.keys())
            return self._reader
        for place, start in starts.items():
            if place not in goes_on:
                self._reader.seek(place, start)
        self._reader.resume(starts.keys())
        return self._reader

    def rest(self) -> None:
        """Close the reader. The next `read` opens another one."""
        reader, self._reader = self._reader, None
        self._left.clear()
        if reader is not None:
            reader.close()


def _fresh(
    records: Iterable[Record], there: Mapping[TopicPartition, int], unseen: dict[TopicPartition, Mark]
) -> list[Record]:
    """Return the new records. LogChanged unless the first of a partition is the last one that was seen."""
    fresh = []
    for record in records:
        if record.offset >= there[record.place]:
            continue
        if record.place in unseen:
            mark = unseen.pop(record.place)
            if record.offset != mark.last or fingerprint(record) != mark.fingerprint:
                raise LogChanged(f"{record.place}@{mark.last} is not the record that was read")
            continue
        fresh.append(record)
    return fresh
