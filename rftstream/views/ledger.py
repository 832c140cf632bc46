"""What the audit remembers of each topic: a few numbers per record instead of its strings and bodies.

Ids become 64-bit digests, so that a rollout costs 33 bytes per topic and topics are compared as arrays; with ten
million ids two share a digest once in 300,000 audits. Array names end in their rows: R records of rollouts,
G outcomes of groups, N rollouts named by outcomes.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rftstream import codec
from rftstream.errors import ContractError
from rftstream.messages import GroupOutcome, GroupResult
from rftstream.runtime.role import Log
from rftstream.runtime.tracker import decode_finished
from rftstream.topics import TOPICS
from rftstream.transport.base import Position, Record, TopicPartition

Digests = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

PENDING, BATCHED, TRAINED, EXPIRED, FILTERED, DEAD = range(6)
"""Fates of rollouts and groups. BATCHED is pending too: its batch is not trained yet."""

UNSAMPLED = {b"skipped", b"undecodable"}
"""Statuses of rollouts for which no token was sampled: they have no length."""


def digest(text: bytes) -> int:
    """Python's own SipHash: quick, and good for as long as this process."""
    return hash(text) & 0xFFFF_FFFF_FFFF_FFFF


def headers_of(record: Record) -> dict[str, bytes]:
    """By name; of several with the same the first counts, as in Record.header."""
    return dict(reversed(record.headers))


def twin_key(topic: str, headers: Mapping[str, bytes]) -> bytes | None:
    """What must be unique on the topic; None if a header of it is missing."""
    try:
        return b"\0".join([headers[name] for name in TOPICS[topic].twin or ()])
    except KeyError:
        return None


# --------------------------------------------------------------------------------------------- rollouts


@dataclass(frozen=True, slots=True)
class Rows:
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


def read_rows(
    log: Log,
    topic: str,
    *,
    number: str,
    passed: Mapping[TopicPartition, Position] | None = None,
    look: Callable[[Record, Mapping[str, bytes]], None] | None = None,
) -> Rows:
    """`passed`: committed positions of the group that reads the topic. `look` sees every record, too."""
    rollouts, groups, numbers, flags, keys = array("Q"), array("Q"), array("q"), array("B"), array("Q")
    num_unreadable = 0
    is_passed = _Passed({place: position for place, position in (passed or {}).items() if place.topic == topic})
    for record in log.read(topic, bodies=False):
        headers = headers_of(record)
        key = None if codec.is_foreign(record) else twin_key(topic, headers)
        if key is None:
            num_unreadable += bool(headers)  # without any: the tombstone of a partial
            continue
        keys.append(digest(key))
        if look is not None:
            look(record, headers)
        if "rollout_id" in headers and "group_id" in headers:
            rollouts.append(digest(headers["rollout_id"]))
            groups.append(digest(headers["group_id"]))
            numbers.append(-1 if headers.get("status") in UNSAMPLED else integer(headers.get(number)))
            flags.append(is_passed(record))
    return Rows(
        topic=topic,
        rollout_R=np.frombuffer(rollouts, np.uint64),
        group_R=np.frombuffer(groups, np.uint64),
        number_R=np.frombuffer(numbers, np.int64),
        passed_R=np.frombuffer(flags, np.bool_),
        twins=repeated(np.frombuffer(keys, np.uint64)),
        num_unreadable=num_unreadable,
    )


class _Passed:
    """Whether the readers of one topic are done with a record, by their committed positions."""

    def __init__(self, positions: Mapping[TopicPartition, Position]) -> None:
        self._low_waters = {place.partition: position.offset for place, position in positions.items()}
        self._finished: dict[int, set[int]] = {}
        for place, position in positions.items():
            try:
                self._finished[place.partition] = decode_finished(position)
            except ContractError:  # metadata of another kind: the position alone says enough
                self._finished[place.partition] = set()

    def __call__(self, record: Record) -> bool:
        low_water = self._low_waters.get(record.partition)
        return low_water is not None and (
            record.offset < low_water or record.offset in self._finished[record.partition]
        )


@dataclass(slots=True)
class Shares:
    """What batches hold, by (share, batch sequence)."""

    counted: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Experiences on the topic."""
    announced: dict[tuple[int, int], int] = field(default_factory=dict)
    """Experiences as the manifest says."""

    def look(self, record: Record, headers: Mapping[str, bytes]) -> None:
        place = (integer(headers.get("share")), integer(headers.get("batch_sequence")))
        if headers.get("contract") == b"batch_manifest":
            self.announced[place] = integer(headers.get("count"))
        else:
            self.counted[place] += 1


# --------------------------------------------------------------------------------------------- steps, outcomes


@dataclass(frozen=True, slots=True)
class InForce:
    """Where training stands: the last record of the newest trainer."""

    trainer_epoch: int = 0
    version: int = 0
    trained_groups: int = 0
    twins: Digests = field(default_factory=lambda: np.empty(0, np.uint64))


def read_steps(log: Log) -> InForce:
    """A newer trainer that starts from version b takes what older ones wrote beyond b out of force."""
    newest = (0, 0, 0)
    keys = array("Q")
    for record in log.read("steps", bodies=False):
        headers = headers_of(record)
        key = None if codec.is_foreign(record) else twin_key("steps", headers)
        if key is None:
            continue
        keys.append(digest(key))
        epoch, version, groups = (integer(headers.get(name)) for name in ("trainer_epoch", "version", "trained_groups"))
        if epoch >= newest[0]:
            newest = (epoch, version, groups)
    return InForce(*newest, twins=repeated(np.frombuffer(keys, np.uint64)))


@dataclass(frozen=True, slots=True)
class Outcomes:
    group_G: Digests
    fate_G: npt.NDArray[np.int8]
    batch_G: Numbers
    """Batch sequence, -1 where the group is in none."""
    rollout_N: Digests
    fate_N: npt.NDArray[np.int8]
    batch_N: Numbers
    """Batch sequence of the rollouts that are in a batch, else -1."""
    twins: Digests
    broken: tuple[str, ...]
    """Records that cannot be decoded."""


def read_outcomes(log: Log, version: int) -> Outcomes:
    """The fate of each group and of the rollouts it names, given the version in force."""
    groups, group_fates, group_batches = array("Q"), array("b"), array("q")
    rollouts, fates, batches = array("Q"), array("b"), array("q")
    seen: set[int] = set()
    twins, broken = array("Q"), []
    for record in log.read("outcomes"):
        if codec.is_foreign(record):
            continue
        try:
            outcome = codec.from_record(record)
            assert isinstance(outcome, GroupOutcome)
        except ContractError as error:
            broken.append(str(error))
            continue
        key = digest(twin_key("outcomes", headers_of(record)) or str(record).encode())
        if key in seen:
            twins.append(key)
            continue
        seen.add(key)
        fate = fate_of(outcome, version)
        batch = -1 if outcome.batch_sequence is None else outcome.batch_sequence
        if not outcome.late:
            groups.append(digest(outcome.group_id.encode()))
            group_fates.append(fate)
            group_batches.append(batch)
        for rollout in outcome.rollouts:
            scored = rollout.reason is None and rollout.reward is not None
            rollouts.append(digest(rollout.rollout_id.encode()))
            fates.append(fate if fate not in (BATCHED, TRAINED) else _fate_in_batch(fate, scored, outcome.late))
            batches.append(batch if scored and not outcome.late else -1)
    return Outcomes(
        group_G=np.frombuffer(groups, np.uint64),
        fate_G=np.frombuffer(group_fates, np.int8),
        batch_G=np.frombuffer(group_batches, np.int64),
        rollout_N=np.frombuffer(rollouts, np.uint64),
        fate_N=np.frombuffer(fates, np.int8),
        batch_N=np.frombuffer(batches, np.int64),
        twins=np.frombuffer(twins, np.uint64),
        broken=tuple(broken),
    )


def fate_of(outcome: GroupOutcome, version: int) -> int:
    if outcome.result is GroupResult.batched:
        return TRAINED if outcome.batch_sequence is not None and outcome.batch_sequence < version else BATCHED
    return {GroupResult.expired: EXPIRED, GroupResult.filtered: FILTERED, GroupResult.dead: DEAD}[outcome.result]


def _fate_in_batch(fate: int, scored: bool, late: bool) -> int:
    """Of a sibling of a batched group: a latecomer is expired, one without a reward dead."""
    if late:
        return EXPIRED
    return fate if scored else DEAD


# --------------------------------------------------------------------------------------------- arrays


def integer(text: bytes | None) -> int:
    return int(text) if text is not None and text.isdigit() else -1


def repeated(keys: Digests) -> Digests:
    """What is too much: keys that occur n times, n - 1 times."""
    ordered = np.sort(keys)
    too_many: Digests = ordered[1:][ordered[1:] == ordered[:-1]]
    return too_many


def in_batch(rollouts: Digests, batches: Numbers) -> Digests:
    """Digests of (rollout, batch sequence)."""
    return rollouts + batches.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def missing(digests: Digests, known: Digests) -> Digests:
    """Those that are not known, each once."""
    found: Digests = np.setdiff1d(digests, known)
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
