"""Imports groups from another run's log: records are copied unchanged, in order, exactly once.

Each transaction holds records and the position in the source (group `import`; its metadata is the end of the source
when the import began). All laws hold in the new run: each task has one record on each topic of the flow. The last
record is `end`. Without it the import is incomplete, and the next call continues it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import ClassVar

from rftstream.contracts import codec
from rftstream.contracts.control import RunManifest, TasksEnded
from rftstream.contracts.ids import next_attempt
from rftstream.contracts.records import NewRecord, Record, TopicPartition
from rftstream.contracts.rollouts import Rollout, RolloutStatus
from rftstream.contracts.tasks import Sampling, Task
from rftstream.errors import ConfigError, ContractError
from rftstream.roles.explorer import EXPLORER
from rftstream.roles.feeder import FEEDER
from rftstream.runs.writes.additions import MAX_BYTES, MAX_RECORDS, Say, by_transaction
from rftstream.service.control_view import read_control
from rftstream.service.role import Log
from rftstream.transport.base import Position, Transport

GROUP = "import"
STEPS = TopicPartition("steps", 0)


class Import:
    """Copies records of one run into another. Subclasses choose the records: they implement `bounds` and `copy`. A
    caller makes one and calls `run`, which may be repeated after a kill."""

    def __init__(self, source: Transport, target: Transport, run_id: str, say: Say) -> None:
        self._source, self._target = source, target
        self._from, self._into = Log(source), Log(target)
        self._run_id = run_id
        self._say = say

    def run(self, manifest: Callable[[], RunManifest]) -> None:
        """Do the import, or the rest of it; do nothing if it is complete."""
        if read_control(self._target).ended is not None:
            return
        self._open()
        try:
            self._begun = self._into.committed(GROUP)
            if not self._begun:
                self._begin(manifest())
            self.copy()
        finally:
            self._producer.close()

    def _open(self) -> None:
        self._producer = self._target.producer(f"{self._run_id}.{GROUP}")
        self._producer.start()

    def settle(self) -> None:
        """Wait until everything committed can be read. A broker answers a commit before its records are visible. A new
        producer of the same name can start only when they are."""
        self._producer.close()
        self._open()

    def bounds(self) -> Mapping[TopicPartition, tuple[int, int]]:
        """Return the range to copy of each partition of the source, in its current state. ConfigError if records were
        deleted."""
        raise NotImplementedError

    def copy(self) -> None:
        """Copy everything and write `end`. Records that exist already are skipped."""
        raise NotImplementedError

    def _begin(self, manifest: RunManifest) -> None:
        """Fix the ranges to copy."""
        self._begun = {place: Position(start, str(end)) for place, (start, end) in self.bounds().items()}
        record = codec.to_record(manifest, "control", 0, run=self._run_id)
        self._producer.commit([record], positions=self._begun, group=GROUP)

    def to_the_ends(self, *topics: str) -> dict[TopicPartition, tuple[int, int]]:
        """Return the ranges of these topics of the source up to their current ends. Topics that depend on others come
        first."""
        return {place: (0, end) for topic in topics for place, end in self._from.ends(topic).items()}

    def check_whole(self, *topics: str) -> None:
        """Check again that no records were deleted, since the source may be live. ConfigError if some were."""
        check_whole(self._source, *topics)

    def copy_topic(self, topic: str, change: Callable[[Record], NewRecord | None]) -> None:
        """Copy a topic from where the import stopped. `change` returns the record for this run, or None for a record
        that is left out."""
        committed = {place: one for place, one in self._begun.items() if place.topic == topic}
        ends = {place: int(position.metadata) for place, position in committed.items()}
        starts = {place: position.offset for place, position in committed.items()}
        if all(starts[place] >= ends[place] for place in ends):
            return
        total = num_bytes = 0
        records: list[NewRecord] = []
        positions: dict[TopicPartition, Position] = {}
        for record in self._from.read(topic, start=starts):
            if record.offset >= ends[record.place]:
                continue
            if (changed := change(record)) is not None:
                records.append(changed)
                num_bytes += changed.num_bytes
            positions[record.place] = Position(record.offset + 1, str(ends[record.place]))
            if len(records) >= MAX_RECORDS or num_bytes >= MAX_BYTES:
                self._producer.commit(records, positions=positions, group=GROUP)
                total += len(records)
                records, positions, num_bytes = [], {}, 0
        whole = {place: Position(end, str(end)) for place, end in ends.items()}
        self._producer.commit(records, positions=whole, group=GROUP)
        self.settle()
        self.check_whole(topic)  # a live run may have deleted records in the range meanwhile
        self._say(f"{topic}: {total + len(records):,} records copied")

    def as_it_is(self, record: Record) -> NewRecord | None:
        """Return the record under this run's name; None if its contract is not one of its topic."""
        if codec.is_foreign(record):
            return None
        headers = tuple((k, self._run_id.encode() if k == "run" else v) for k, v in record.headers)
        return NewRecord(record.topic, record.partition, record.key, record.value, headers)

    def commit_all(self, records: Iterable[NewRecord]) -> int:
        """Write records that the import itself makes, and return their number."""
        total = 0
        for some in by_transaction(records, MAX_RECORDS):
            self._producer.commit(some)
            total += len(some)
        if total:
            self.settle()
        return total

    def pass_over(self, group: str, topic: str, metadata: str = "") -> None:
        """Commit positions at the end of a topic, because its records were processed in the other run. `{end}` in the
        metadata becomes the end of the partition."""
        ends = self._target.admin.end_offsets(topic)
        positions = {place: Position(end, metadata.replace("{end}", str(end))) for place, end in ends.items()}
        self._producer.commit([], positions=positions, group=group)

    def end(self) -> None:
        """Write the number of groups, after which no more will come."""
        admitted = len({record.header("group_id") for record in self._into.read("tasks", bodies=False)})
        cursor = self._from.committed(FEEDER.name).get(STEPS, Position(0))
        counts = json.loads(cursor.metadata or '{"drawn": {}, "left_out": {}}')
        metadata = json.dumps({**counts, "admitted": admitted}, separators=(",", ":"))
        end = TasksEnded(admitted=admitted, reason="imported")
        self._producer.commit(
            [codec.to_record(end, "control", 0, run=self._run_id)],
            positions={STEPS: Position(0, metadata)},
            group=FEEDER.name,
        )
        self.settle()
        self._say(f"{admitted:,} groups imported")


class RolloutImport(Import):
    """Copies tasks and rollouts for new scores. A task gets a `skipped` rollout if it has none in the source, or if it
    was put back there under another attempt."""

    copied: ClassVar[tuple[str, ...]] = ("rollouts",)
    """Topics that are copied after the tasks, each before those that depend on it."""

    def bounds(self) -> Mapping[TopicPartition, tuple[int, int]]:
        """Return ranges with whole groups, and no record without those that it depends on."""
        self.check_whole("tasks", *self.copied)
        return self.to_the_ends(*reversed(self.copied), "tasks", "experts")

    def copy(self) -> None:
        self.copy_topic("experts", self.as_it_is)
        self.copy_topic("tasks", self._of_a_rollout)
        put_back = self._put_back()
        for topic in self.copied:
            self.copy_topic(topic, lambda record: self._rollout(record, put_back))
        self.fill()
        self.pass_over(EXPLORER.name, "tasks")
        self.end()

    def fill(self) -> None:
        """Write the records that are missing among the copied ones."""
        if missing := self.commit_all(skipped_rollouts(self._into, self._run_id)):
            self._say(f"rollouts: {missing:,} tasks were not sampled, or put back; they are skipped")

    def _of_a_rollout(self, record: Record) -> NewRecord | None:
        return None if codec.ids_from_headers(record) is None else self.as_it_is(record)

    def _rollout(self, record: Record, put_back: set[str]) -> NewRecord | None:
        ids = codec.ids_from_headers(record)
        if ids is None or ids.group_id not in put_back:
            return self._of_a_rollout(record)
        return None  # it is skipped

    def _put_back(self) -> set[str]:
        """Return the groups with a newer attempt, whose rollouts may exist a second time."""
        groups = {record.text("group_id") for record in self._into.read("tasks", bodies=False)}
        return {group for group in groups if next_attempt(group) in groups}


def check_whole(source: Transport, *topics: str) -> None:
    """Check that no records of these topics were deleted. ConfigError if some were."""
    deleted = read_control(source).deleted
    if deleted.sequence or any(any(source.admin.begin_offsets(topic).values()) for topic in topics):
        raise ConfigError(
            f"the records of the first {deleted.sequence:,} groups, from before version {deleted.version}, were "
            "deleted by retention, expected all of them; a run that is to be scored or trained again keeps its "
            "log: leave [retention] out of its run file"
        )


def without(log: Log, topic: str, after: str) -> Iterator[Record]:
    """Yield the records of rollouts on `topic` that have no record on the topic `after`."""
    there = {record.header("rollout_id") for record in log.read(after, bodies=False)}
    if {record.header("rollout_id") for record in log.read(topic, bodies=False)} - there:
        yield from (record for record in log.read(topic) if record.header("rollout_id") not in there)


def skipped_rollouts(log: Log, run_id: str) -> Iterator[NewRecord]:
    """Yield a skipped rollout for each task that has no rollout."""
    for record in without(log, "tasks", "rollouts"):
        yield codec.to_record(_skipped(record), "rollouts", record.partition, run=run_id)


def _skipped(record: Record) -> Rollout:
    """Return a record for a rollout that does not exist."""
    ids = codec.ids_from_headers(record)
    assert ids is not None, "others were not copied"
    status, problem, sampling = RolloutStatus.undecodable, None, Sampling()
    with suppress(ContractError):
        task = codec.from_record(record)
        if isinstance(task, Task):
            status, problem, sampling = RolloutStatus.skipped, task.problem, task.sampling
    return Rollout(
        ids=ids,
        status=status,
        problem=problem,
        turns=(),
        segments=(),
        num_tokens=0,
        sampling=sampling,
        error="not sampled in the run that it comes from, or put back there as another attempt",
        finished_at=time.time(),
    )
