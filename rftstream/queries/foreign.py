"""Tables of `weights`, `outcomes` and `batches` without records that are not in force (service/in_force.py), and twins
without copies.

Tables know headers alone, and bodies tell what is foreign. So they are read only where something looks wrong.

A twin is a record that a role wrote for something that has one already: its times, and so its bytes, differ from those
of the first. A record that is the same, byte for byte, is a copy: whoever mirrors topics or plays records again leaves
such ones. One with the headers of another and no message in it is noise. Readers pass over it, or it has the same
effect once more: another rollout for a task's copy. That is its echo, and no twin either.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b

import numpy as np

from rftstream.contracts import codec
from rftstream.contracts.control import Claim, Trimmed
from rftstream.contracts.records import Record, TopicPartition
from rftstream.errors import ContractError
from rftstream.queries.ledger import Digests, Flags, isin, repeated
from rftstream.queries.rows import (
    KEYED,
    LATE,
    MANIFEST,
    OUTCOME,
    ROLLOUT,
    UNREADABLE,
    RowArray,
    TopicTable,
    digest,
    headers_of,
    twin_key,
)
from rftstream.roles.buffer import BUFFER
from rftstream.roles.feeder import FEEDER
from rftstream.roles.trainer.recorded_batches import foreign_places
from rftstream.service.control_view import read_control
from rftstream.service.role import Log


def announcements_in_force(log: Log, table: TopicTable) -> TopicTable:
    """`weights`: what stands there twice may be a copy that somebody else wrote."""
    if not len(repeated(table.rows["key"])):
        return table
    offsets = np.array([record.offset for record, _ in log.in_force("weights")], np.int64)
    return table.where(lambda rows: np.isin(rows["offset"], offsets))


def tasks_in_force(log: Log, table: TopicTable) -> TopicTable:
    """`tasks`: what names an epoch that no feeder has claimed. In an imported run they are another feeder's."""
    control = read_control(log.transport)
    claim = control.claims.get(FEEDER.name)
    if claim is None or (control.ended is not None and control.ended.reason == "imported"):
        return table
    return table.where(lambda rows: (rows["kind"] != ROLLOUT) | _is_claimed(rows, claim))


def _is_claimed(rows: RowArray, claim: Claim | None) -> Flags:
    claimed: Flags = (rows["share"] >= 1) & (rows["share"] <= (0 if claim is None else claim.epoch))
    return claimed


def outcomes_in_force(log: Log, table: TopicTable) -> TopicTable:
    """`outcomes`: what is there twice, cannot be decoded, or names an epoch that no buffer has claimed."""
    rows = table.rows[(table.rows["kind"] == OUTCOME) & (table.rows["code"] & LATE == 0)]
    claimed = _is_claimed(rows, read_control(log.transport).claims.get(BUFFER.name))
    singles = np.isin(table.rows["kind"], (OUTCOME, KEYED))
    if not table.broken and claimed.all() and not len(repeated(table.rows["key"][singles])):
        return table
    offsets = np.array([record.offset for record, _ in log.in_force("outcomes")], np.int64)
    kept = table.where(lambda rows: np.isin(rows["offset"], offsets))
    return replace(kept, broken=[one for one in table.broken if one[0] in offsets])


def records_of(table: TopicTable) -> int:
    """Return how many records of `outcomes` the table has."""
    return int(np.isin(table.rows["kind"], (OUTCOME, KEYED)).sum()) + len(table.broken)


def without_copies(log: Log, twins: Mapping[str, Digests]) -> tuple[dict[str, Digests], dict[str, int]]:
    """Return the twins without copies and their echoes, and how many of these each topic has."""
    left: dict[str, Digests] = {}
    foreign: dict[str, int] = {}
    copied = np.empty(0, np.uint64)
    for topic in sorted(twins, key=lambda name: FLOW.index(name) if name in FLOW else -1):
        keys = twins[topic]
        if len(keys):
            echoes = isin(keys, copied) if topic in FLOW else np.zeros(len(keys), np.bool_)
            copies = _copies(log, topic, keys[~echoes])
            if topic in FLOW:
                copied = np.concatenate([copied, keys[echoes], copies])
            left[topic] = _less(keys[~echoes], copies)
            if num := len(keys) - len(left[topic]):
                foreign[topic] = num
        else:
            left[topic] = keys
    return left, foreign


FLOW = ("tasks", "rollouts", "verified")
"""Topics on which a rollout has one record each, from the first to the last."""


def _copies(log: Log, topic: str, keys: Digests) -> Digests:
    """Return the keys of records that are the same, byte for byte, as one before them, or cannot be read, as often as
    there are such records."""
    wanted = frozenset(keys.tolist())
    seen: set[tuple[int, bytes]] = set()
    begun: set[int] = set()
    copies = array("Q")
    for record in log.read(topic) if wanted else ():
        text = twin_key(topic, headers_of(record))
        if text is None or (key := digest(text)) not in wanted:
            continue
        content = blake2b(repr((record.key, record.value, record.headers)).encode(), digest_size=16).digest()
        if (key, content) in seen or (key in begun and not _is_readable(record)):
            copies.append(key)
        seen.add((key, content))
        begun.add(key)
    return np.frombuffer(copies, np.uint64)


def _is_readable(record: Record) -> bool:
    try:
        codec.from_record(record)
    except ContractError:
        return False
    return True


def _less(keys: Digests, less: Digests) -> Digests:
    """Return the keys without those of `less`, each as often as it stands there."""
    counts = Counter(keys.tolist())
    counts.subtract(less.tolist())
    return np.array(sorted(counts.elements()), np.uint64)


def batches_in_force(log: Log, table: TopicTable, said: Trimmed) -> TopicTable:
    """`batches` from the first batch on that `said` has not deleted."""
    if all(_is_chain(table.rows[table.rows["partition"] == share]) for share in np.unique(table.rows["partition"])):
        return table
    begins = [begin for _, begin in sorted(log.transport.admin.begin_offsets("batches").items())]
    kept = said.offsets.get("batches") or tuple(begins)
    starts = [max(pair) for pair in zip(begins, kept, strict=True)]
    foreign = foreign_places(log.transport, starts, said.version)
    return table.where(
        lambda rows: [
            offset >= starts[partition] and (TopicPartition("batches", partition), offset) not in foreign
            for partition, offset in zip(rows["partition"].tolist(), rows["offset"].tolist(), strict=True)
        ]
    )


def _is_chain(rows: RowArray) -> bool:
    """Whether the records of a share are whole batches, one after the other, as far as headers tell."""
    rows = rows[np.argsort(rows["offset"])]
    is_manifest = rows["kind"] == MANIFEST
    ends = np.flatnonzero(is_manifest)
    if not len(rows) or not is_manifest[-1] or (rows["kind"] == UNREADABLE).any():
        return False
    expected = rows["number"][ends[0]] + np.cumsum(is_manifest) - is_manifest
    sizes = np.diff(ends, prepend=-1) - 1
    follow = bool((rows["number"] == expected).all() and (sizes == rows["count"][ends]).all())
    return follow and not len(repeated(rows["key"]))
