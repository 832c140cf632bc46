"""The content of a record's headers, and how a log is read on from the last position."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from hashlib import blake2b

from rftstream.contracts.outcomes import GroupResult
from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.topics import TOPICS
from rftstream.service.reading import read_to_ends
from rftstream.transport.base import Transport

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


def new_records(
    transport: Transport,
    topic: str,
    marks: dict[TopicPartition, Mark],
    ends: Mapping[TopicPartition, int],
    *,
    bodies: bool = False,
    max_polled: int = MAX_POLLED,
) -> Generator[list[Record], None, None]:
    """Yield the records of a topic from its marks up to these ends, and advance the marks. LogChanged if the marks
    belong to another log."""
    begins = transport.admin.begin_offsets(topic)
    for place, mark in marks.items():
        if place.topic == topic and mark.end > ends.get(place, -1):
            raise LogChanged(f"{place} ends before {mark.end}, up to where it was read")
    own = {place: mark for place in ends if (mark := marks.get(place, Mark(0))).end < ends[place]}
    if not own:
        return
    # Start with the last record seen, not after it: it shows whether this is still the same log.
    unseen = {place: mark for place, mark in own.items() if mark.last >= begins[place]}
    starts = {place: mark.last if place in unseen else max(begins[place], mark.end) for place, mark in own.items()}
    reader = transport.reader(starts, bodies=bodies)
    try:
        there = {place: ends[place] for place in own}
        for records in read_to_ends(transport, reader, there, max_records=max_polled):
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
            for place, record in {record.place: record for record in fresh}.items():
                marks[place] = Mark(record.offset + 1, record.offset, fingerprint(record))
            if fresh:
                yield fresh
    finally:
        reader.close()
    if unseen:
        place = min(unseen)
        raise LogChanged(f"{place}@{unseen[place].last} is there no more")
    for place in own:
        known = marks.get(place, Mark(0))
        marks[place] = Mark(ends[place], known.last, known.fingerprint)
