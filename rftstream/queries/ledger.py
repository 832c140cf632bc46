"""What the audit counts, from the tables of the topics (rows.py): who is on which, in whose batch, with which fate.

Array names end in their rows: R records of rollouts, G outcomes of groups, N rollouts named by outcomes.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rftstream.contracts.outcomes import GroupResult
from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.versions import StepRecord
from rftstream.errors import ContractError
from rftstream.queries.rows import (
    DEMONSTRATION,
    LATE,
    MANIFEST,
    NAMED,
    OUTCOME,
    REJECTED,
    RESULT_MASK,
    RESULTS,
    ROLLOUT,
    SCORED,
    UNREADABLE,
    RowArray,
    TopicTable,
    column,
    digest,
    headers_of,
    twin_key,
)
from rftstream.service.role import Log
from rftstream.service.tracker import decode_finished
from rftstream.transport.base import Position

Digests = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Fates = npt.NDArray[np.int8]

PENDING, BATCHED, TRAINED, EXPIRED, FILTERED, DEAD = range(6)
"""Fates of rollouts and groups. BATCHED is pending too: its batch is not trained yet."""

_FATES = {
    GroupResult.batched: BATCHED,
    GroupResult.expired: EXPIRED,
    GroupResult.filtered: FILTERED,
    GroupResult.dead: DEAD,
}


# --------------------------------------------------------------------------------------------- rollouts


@dataclass(frozen=True, slots=True)
class RolloutRows:
    """The records of a topic that speak of a rollout."""

    topic: str
    rollout_R: Digests
    group_R: Digests
    number_R: Numbers
    """One integer header, -1 where there is none."""
    passed_R: Flags
    """The readers of the topic have committed that they are done with it."""
    twins: Digests
    """Keys that occur more than once, as often as they do too much."""
    num_unreadable: int
    """Records without id headers, or of no contract of the topic; nobody can say what they belong to."""
    num_keyed: int = 0
    """Different keys."""


def rows_of(topic: str, table: TopicTable, passed: Mapping[TopicPartition, Position] | None = None) -> RolloutRows:
    """`passed`: committed positions of the group that reads the topic."""
    rows = table.rows
    readable = rows["kind"] != UNREADABLE
    keys = rows["key"][readable]
    twins = repeated(keys)
    some = rows[rows["kind"] == ROLLOUT]
    return RolloutRows(
        topic=topic,
        rollout_R=column(some, "rollout"),
        group_R=column(some, "group"),
        number_R=column(some, "number"),
        passed_R=_passed(some, {place: one for place, one in (passed or {}).items() if place.topic == topic}),
        twins=twins,
        num_unreadable=len(rows) - len(keys),
        num_keyed=len(keys) - len(twins),
    )


def _passed(rows: RowArray, positions: Mapping[TopicPartition, Position]) -> Flags:
    """Whether the readers of the topic are done with a record, by their committed positions."""
    partition_R, offset_R = rows["partition"], rows["offset"]
    size = 1 + max([int(partition_R.max(initial=0)), *(place.partition for place in positions)])
    low_water_P = np.full(size, -1, np.int64)
    finished: dict[int, set[int]] = {}
    for place, position in positions.items():
        low_water_P[place.partition] = position.offset
        try:
            finished[place.partition] = decode_finished(position)
        except ContractError:  # metadata of another kind: the position alone says enough
            continue
    passed_R: Flags = offset_R < low_water_P[partition_R]
    for partition, offsets in finished.items():
        if offsets:
            passed_R |= (partition_R == partition) & np.isin(offset_R, np.fromiter(offsets, np.int64))
    return passed_R


@dataclass(slots=True)
class Shares:
    """The contents of batches, by (share, batch sequence)."""

    counted: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Experiences on the topic."""
    announced: dict[tuple[int, int], int] = field(default_factory=dict)
    """Experiences as the manifest says."""
    demonstrations: dict[int, int] = field(default_factory=dict)
    """By batch sequence: demonstrations up to it, as the manifest says."""


def shares_of(table: TopicTable) -> Shares:
    """Return what batches hold, from the table of `batches`."""
    kind = table.rows["kind"]
    manifests = table.rows[kind == MANIFEST]
    places = zip(manifests["share"].tolist(), manifests["number"].tolist(), strict=True)
    announced = dict(zip(places, manifests["count"].tolist(), strict=True))
    experiences = table.rows[(kind != MANIFEST) & (kind != UNREADABLE)]
    batches, batch_R = np.unique(experiences["number"], return_inverse=True)
    shares, share_R = np.unique(experiences["share"], return_inverse=True)
    pairs, counts = np.unique(share_R.astype(np.int64) * max(1, len(batches)) + batch_R, return_counts=True)
    share_U, batch_U = np.divmod(pairs, max(1, len(batches)))
    counted = Counter(
        dict(zip(zip(shares[share_U].tolist(), batches[batch_U].tolist(), strict=True), counts.tolist(), strict=True))
    )
    return Shares(
        counted, announced, dict(zip(manifests["number"].tolist(), manifests["sequence"].tolist(), strict=True))
    )


@dataclass(frozen=True, slots=True)
class Uses:
    """The uses of demonstrations in batches that are kept: each is a group of one record or, for a pair, of two."""

    group_U: Digests
    """Each once."""
    number_U: Numbers
    """Number of the demonstration."""
    batch_U: Numbers
    num_double: int
    """Uses that stand in two batches."""


def uses_of(table: TopicTable) -> Uses:
    rows = table.rows[table.rows["kind"] == DEMONSTRATION]
    groups, first = np.unique(rows["group"], return_index=True)
    places = np.unique(rows[["group", "number"]])
    return Uses(groups, rows["count"][first].astype(np.int64), rows["number"][first], len(places) - len(groups))


# --------------------------------------------------------------------------------------------- steps, outcomes


@dataclass(frozen=True, slots=True)
class TrainingInForce:
    """Where training stands: the last record of the newest trainer."""

    trainer_epoch: int = 0
    version: int = 0
    trained_groups: int = 0
    twins: Digests = field(default_factory=lambda: np.empty(0, np.uint64))


def read_steps(log: Log, see: Callable[[int, tuple[int, int, int]], object] = lambda *_: None) -> TrainingInForce:
    """A newer trainer that starts from version b takes what older ones wrote beyond b out of force. `see` is given each
    offset and trainer epoch, version and trained groups as of the step there."""
    newest = (0, 0, 0)
    keys = array("Q")
    for record, step in log.in_force("steps"):
        key = twin_key("steps", headers_of(record))
        if key is None or not isinstance(step, StepRecord):
            continue
        keys.append(digest(key))
        if step.name.trainer_epoch >= newest[0]:
            newest = (step.name.trainer_epoch, step.name.version, step.trained_groups)
        see(record.offset, newest)
    return TrainingInForce(*newest, twins=repeated(np.frombuffer(keys, np.uint64)))


@dataclass(frozen=True, slots=True)
class Outcomes:
    group_G: Digests
    fate_G: Fates
    batch_G: Numbers
    """Batch sequence, -1 where the group is in none."""
    rollout_N: Digests
    fate_N: Fates
    batch_N: Numbers
    """Batch sequence of the rollouts that are in a batch, else -1."""
    tokens_N: Numbers
    """-1 where none was sampled."""
    twins: Digests
    broken: tuple[str, ...]
    """Records that cannot be decoded."""


def outcomes_of(table: TopicTable, version: int) -> Outcomes:
    """The fate of each group and of the rollouts it names, given the version in force. The first of several twins
    counts."""
    outcomes = table.rows[table.rows["kind"] == OUTCOME]
    _, first = np.unique(outcomes["key"], return_index=True)
    counts = np.zeros(len(outcomes), np.bool_)
    counts[first] = True
    twins = column(outcomes[~counts], "key")
    outcomes = outcomes[counts]
    named = table.rows[table.rows["kind"] == NAMED]
    if len(twins):
        named = named[isin(named["offset"], outcomes["offset"])]  # `outcomes` has one partition
    groups = outcomes[outcomes["code"] & LATE == 0]
    fate_N = _fates(named, version)
    late_N, scored_N = named["code"] & LATE != 0, named["code"] & SCORED != 0
    rejected_N = named["code"] & REJECTED != 0
    in_batch_N = (fate_N == BATCHED) | (fate_N == TRAINED)
    # Of the siblings of a batched group a latecomer is expired, one without a reward dead, one that an operator
    # rejected filtered.
    fate_N[in_batch_N & ~scored_N] = DEAD
    fate_N[in_batch_N & rejected_N] = FILTERED
    fate_N[in_batch_N & late_N] = EXPIRED
    return Outcomes(
        group_G=column(groups, "group"),
        fate_G=_fates(groups, version),
        batch_G=column(groups, "number"),
        rollout_N=column(named, "rollout"),
        fate_N=fate_N,
        batch_N=np.where(scored_N & ~late_N & ~rejected_N, named["number"], -1),
        tokens_N=column(named, "count").astype(np.int64),
        twins=twins,
        broken=tuple(text for _, text in table.broken),
    )


def _fates(rows: RowArray, version: int) -> Fates:
    fates: Fates = np.array([_FATES[result] for result in RESULTS], np.int8)[rows["code"] & RESULT_MASK]
    fates[(fates == BATCHED) & (rows["number"] >= 0) & (rows["number"] < version)] = TRAINED
    return fates


# --------------------------------------------------------------------------------------------- arrays


def repeated(keys: Digests) -> Digests:
    """Return the keys that are too many: a key that occurs n times is returned n - 1 times."""
    ordered = np.sort(keys)
    too_many: Digests = ordered[1:][ordered[1:] == ordered[:-1]]
    return too_many


def in_batch(rollouts: Digests, batches: Numbers) -> Digests:
    """Return digests of (rollout, batch sequence)."""
    return rollouts + batches.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def missing(digests: Digests, known: Digests) -> Digests:
    """Return the digests that are not known, each once."""
    unique = distinct(digests)
    found: Digests = unique[~isin(unique, known)]
    return found


def distinct(values: Digests) -> Digests:
    """Return each value once, sorted. np.unique counts by a hash table and is a hundred times slower [measured, numpy
    2.3]."""
    ordered = np.sort(values)
    keep = np.ones(len(ordered), np.bool_)
    keep[1:] = ordered[1:] != ordered[:-1]
    found: Digests = ordered[keep]
    return found


def isin(values: Digests, known: Digests) -> Flags:
    """Return what np.isin does, computed by sorting."""
    if not len(known):
        return np.zeros(len(values), np.bool_)
    ordered = np.sort(known)
    places = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    found: Flags = ordered[places] == values
    return found


def named(
    records: Iterable[Record], wanted: Collection[int], key: Callable[[Mapping[str, bytes]], bytes | None]
) -> Iterator[tuple[str, Record]]:
    """The names behind digests, and where they stand: a second look, for when something is wrong."""
    found = frozenset(wanted)
    for record in records:
        headers = headers_of(record)
        text = key(headers)
        if text is not None and digest(text) in found:
            yield text.replace(b"\0", b" ").decode("ascii", "backslashreplace"), record
