"""A topic as a table: a row of 64 bytes for each record that says what it belongs to, made from its headers.

Ids become 64-bit digests, the same in every process, so that tables can be kept (index.py); with ten million ids two
share a digest once in 300,000 audits. A row depends on its record alone: what changes afterwards (the version in
force, committed positions, deleted records) is looked up when rows are counted.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from rftstream.contracts import codec
from rftstream.contracts.messages import CONTRACTS_ON
from rftstream.contracts.outcomes import BatchReuse, GroupOutcome, GroupResult, ReuseKind
from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.topics import TOPICS
from rftstream.errors import ContractError
from rftstream.service.in_force import writer_epoch
from rftstream.service.reading import read_to_ends
from rftstream.service.role import Log

RowArray = npt.NDArray[np.void]

UNREADABLE, KEYED, ROLLOUT, MANIFEST, OUTCOME, NAMED, DEMONSTRATION, USE, USED = range(9)
"""Kinds of rows: without id headers; with a twin key only; of a rollout; a batch manifest; an outcome; a rollout that
the outcome before it names; an experience from a demonstration; a group that a batch has once more; a rollout of it."""

RESULTS = (GroupResult.batched, GroupResult.expired, GroupResult.filtered, GroupResult.dead)
KINDS = (ReuseKind.replay, ReuseKind.hindsight)
"""`code` of USE and USED: index into these."""
RESULT_MASK, LATE, SCORED, REJECTED = 3, 4, 8, 16
"""`code` of OUTCOME and NAMED: index into RESULTS, and flags."""

ROW = np.dtype(
    [
        ("rollout", "<u8"),
        ("group", "<u8"),
        ("key", "<u8"),  # digests; key: what must be unique on the topic
        ("number", "<i8"),  # the topic's own (NUMBERS), -1 where there is none
        ("offset", "<i8"),
        ("sequence", "<i8"),  # of the group, -1 where there is none; total_experts of a manifest
        ("partition", "<i4"),
        ("share", "<i4"),  # on batches; elsewhere the epoch of the writer
        ("count", "<i4"),  # on batches; count: as a manifest says; tokens of NAMED ones, -1 if unsampled;
        # the number of the demonstration of a DEMONSTRATION, of the use of a USE
        ("kind", "u1"),
        ("code", "u1"),
        ("", "V2"),
    ]
)
_from_bytes = int.from_bytes
_pack = struct.Struct("<QQQqqqiiiBBxx").pack

NUMBERS = {
    "tasks": "group_size",
    "rollouts": "num_tokens",
    "verified": "num_tokens",
    "batches": "batch_sequence",
    "partials": "piece",
    "experts": "number",
}
"""Topic -> header of the column `number`; `version` on others. On outcomes: the batch sequence."""

UNSAMPLED = {b"skipped", b"undecodable"}
"""Statuses of rollouts for which no token was sampled: they have no length."""

MAX_POLLED = 8192
MAX_DIGITS = 9


class LogChanged(Exception):
    """The log is not the one that rows were read from."""


@dataclass(slots=True)
class Mark:
    """How far a partition was read, and by what it is recognised."""

    end: int
    last: int = -1
    """Offset of the last record seen, -1 if there was none."""
    fingerprint: int = 0
    """Fingerprint of the last record seen."""


@dataclass(slots=True)
class TopicTable:
    rows: RowArray = field(default_factory=lambda: np.empty(0, ROW))
    marks: dict[int, Mark] = field(default_factory=dict)
    """By partition."""
    broken: list[tuple[int, str]] = field(default_factory=list)
    """Outcomes that cannot be decoded: offset, and why."""

    def where(self, wanted: Callable[[RowArray], Any]) -> TopicTable:
        """Return the table with only the rows that `wanted` chooses."""
        return TopicTable(self.rows[wanted(self.rows)], self.marks, self.broken)

    def kept(self, begins: Mapping[TopicPartition, int]) -> TopicTable:
        """Return the table without rows of records that were deleted at the beginning."""
        if not any(begins.values()):
            return self
        begin_P = np.zeros(1 + max(place.partition for place in begins), np.int64)
        for place, begin in begins.items():
            begin_P[place.partition] = begin
        rows = self.rows[self.rows["offset"] >= begin_P[self.rows["partition"]]]
        return TopicTable(rows, self.marks, [one for one in self.broken if one[0] >= begin_P[0]])


def digest(text: bytes) -> int:
    """Return the 64-bit digest of a text, the same in every process."""
    return _from_bytes(blake2b(text, digest_size=8).digest(), "little")


def fingerprint(record: Record) -> int:
    """Return a number by which a record is recognised."""
    return digest(repr((record.key, record.timestamp_s, record.headers)).encode())


def headers_of(record: Record) -> dict[str, bytes]:
    """By name; of several with the same the first counts, as in Record.header."""
    return dict(reversed(record.headers))


def twin_key(topic: str, headers: Mapping[str, bytes]) -> bytes | None:
    """Return what must be unique on the topic; None if one of its headers is missing."""
    try:
        return b"\0".join([headers[name] for name in TOPICS[topic].twin or ()])
    except KeyError:
        return None


def integer(text: bytes | None) -> int:
    """-1 for what is no number, or none that a count could reach."""
    return int(text) if text is not None and text.isdigit() and len(text) <= MAX_DIGITS else -1


# --------------------------------------------------------------------------------------------- reading


def read_table(log: Log, topic: str, known: TopicTable | None = None) -> TopicTable:
    """The topic up to its end now; `known`: what was read of it before. LogChanged if that was another log."""
    known = known or TopicTable()
    ends = {place.partition: end for place, end in log.ends(topic).items()}
    begins = {place.partition: begin for place, begin in log.transport.admin.begin_offsets(topic).items()}
    if shorter := [p for p, mark in known.marks.items() if mark.end > ends.get(p, -1)]:
        raise LogChanged(f"{topic}[{shorter[0]}] ends before {known.marks[shorter[0]].end}, up to where it was read")
    marks = {p: known.marks.get(p, Mark(0)) for p in ends}
    # From the last record seen, not behind it: it tells whether this is still the same log.
    unseen = {p: mark for p, mark in marks.items() if mark.last >= begins[p] and mark.end < ends[p]}
    starts = {p: mark.last if p in unseen else max(begins[p], mark.end) for p, mark in marks.items()}
    encode, broken = _encoder(topic)
    buffer, last = bytearray(), dict[int, Record]()
    reader = log.transport.reader(
        {TopicPartition(topic, p): start for p, start in starts.items()}, bodies=topic == "outcomes"
    )
    try:
        places = {TopicPartition(topic, p): end for p, end in ends.items()}
        for records in read_to_ends(log.transport, reader, places, max_records=MAX_POLLED):
            for record in records:
                partition = record.partition
                if record.offset >= ends[partition]:
                    continue
                if unseen and (mark := unseen.pop(partition, None)) is not None:
                    if record.offset != mark.last or fingerprint(record) != mark.fingerprint:
                        raise LogChanged(f"{topic}[{partition}]@{mark.last} is not the record that was read")
                    continue
                last[partition] = record
                buffer += encode(record)
    finally:
        reader.close()
    if unseen:
        raise LogChanged(f"{topic}[{min(unseen)}]@{unseen[min(unseen)].last} is there no more")
    rows = np.frombuffer(buffer, ROW)
    if len(known.rows):
        rows = np.concatenate([known.rows, rows]) if len(rows) else known.rows
    for partition, mark in marks.items():
        there = last.get(partition)
        marks[partition] = (
            Mark(ends[partition], mark.last, mark.fingerprint)
            if there is None
            else Mark(ends[partition], there.offset, fingerprint(there))
        )
    return TopicTable(rows, marks, known.broken + broken)


def _encoder(topic: str) -> tuple[Callable[[Record], bytes], list[tuple[int, str]]]:
    """Return the function that makes packed rows of a record, and the list to which it adds records that it could not
    decode."""
    broken: list[tuple[int, str]] = []
    if topic == "outcomes":
        return (lambda record: _outcome_rows(record, broken)), broken
    return _record_encoder(topic), broken


def _record_encoder(topic: str) -> Callable[[Record], bytes]:
    contracts = {name.encode() for name in CONTRACTS_ON[topic]}
    twin = TOPICS[topic].twin or ()
    by_rollout = twin == ("rollout_id",)
    number_name, has_shares = NUMBERS.get(topic, "version"), topic == "batches"
    last_group: tuple[bytes, int] = (b"", 0)

    def encode(record: Record) -> bytes:  # called for every record: 4 million times for a million rollouts
        nonlocal last_group
        headers = dict(reversed(record.headers))
        contract = headers.get("contract")
        rollout_id = headers.get("rollout_id")
        text = None if contract not in contracts else rollout_id if by_rollout else twin_key(topic, headers)
        if text is None:
            # Without any headers: the tombstone of a partial.
            return _pack(0, 0, 0, -1, record.offset, -1, record.partition, -1, -1, UNREADABLE, 0) if headers else b""
        key = digest(text)
        group_id = headers.get("group_id")
        rollout = group = 0
        kind = MANIFEST if contract == b"batch_manifest" else KEYED
        if rollout_id is not None and group_id is not None and kind != MANIFEST:
            kind = ROLLOUT
            rollout = key if by_rollout else digest(rollout_id)
            if group_id != last_group[0]:
                last_group = (group_id, digest(group_id))
            group = last_group[1]
        number = -1 if headers.get("status") in UNSAMPLED else integer(headers.get(number_name))
        place = (record.offset, integer(headers.get("sequence")), record.partition)
        if not has_shares:
            return _pack(rollout, group, key, number, *place, integer(headers.get("writer_epoch")), -1, kind, 0)
        share, count = integer(headers.get("share")), integer(headers.get("count"))
        if kind == MANIFEST:
            place = (record.offset, max(0, integer(headers.get("total_experts"))), record.partition)
        elif "expert" in headers and kind == ROLLOUT:
            kind, count = DEMONSTRATION, integer((group_id or b"").rpartition(b"/")[0].rpartition(b"/")[2])
        return _pack(rollout, group, key, number, *place, share, count, kind, 0)

    return encode


def _outcome_rows(record: Record, broken: list[tuple[int, str]]) -> bytes:
    if codec.is_foreign(record):
        return b""
    try:
        outcome = codec.from_record(record)
        if isinstance(outcome, BatchReuse):
            return _reuse_rows(record, outcome)
        assert isinstance(outcome, GroupOutcome)
    except ContractError as error:
        broken.append((record.offset, str(error)))
        return b""
    epoch = min(writer_epoch(record), (1 << 31) - 1)
    place = (record.offset, min(outcome.sequence, 1 << 62), record.partition, epoch)
    key = digest(twin_key("outcomes", headers_of(record)) or str(record).encode())
    group = digest(outcome.group_id.encode())
    batch = -1 if outcome.batch_sequence is None else min(outcome.batch_sequence, 1 << 62)
    code = RESULTS.index(outcome.result) | (LATE if outcome.late else 0)
    found = _pack(0, group, key, batch, *place, -1, OUTCOME, code)
    for one in outcome.rollouts:
        flags = code | (SCORED if one.reason is None and one.reward is not None else 0)
        flags |= REJECTED if one.rejected is not None else 0
        tokens = -1 if one.status.encode() in UNSAMPLED else min(one.num_tokens, (1 << 31) - 1)
        found += _pack(digest(one.rollout_id.encode()), group, key, batch, *place, tokens, NAMED, flags)
    return found


def _reuse_rows(record: Record, reuse: BatchReuse) -> bytes:
    """Return a row for the record, and one for each use and each of its rollouts."""
    key = digest(twin_key("outcomes", headers_of(record)) or str(record).encode())
    batch = min(reuse.batch_sequence, 1 << 62)
    found = _pack(0, 0, key, batch, record.offset, -1, record.partition, -1, -1, KEYED, 0)
    for use in reuse.uses:
        place = (record.offset, min(use.sequence, 1 << 62), record.partition, use.operator)
        group, count = digest(use.group_id.encode()), min(use.use, (1 << 31) - 1)
        found += _pack(0, group, key, batch, *place, count, USE, KINDS.index(use.kind))
        for rollout_id in use.rollouts:
            found += _pack(digest(rollout_id.encode()), group, key, batch, *place, count, USED, KINDS.index(use.kind))
    return found


def column(rows: RowArray, name: str) -> Any:
    """A copy that is in order, and does not hold the rows."""
    return np.ascontiguousarray(rows[name])
