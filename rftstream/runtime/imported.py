"""A run whose groups come from another run's log: tasks and rollouts are copied as they are, in order, exactly once.

Each transaction holds records and how far the source was read (group `import`; the metadata is where the source ended
when the import began). All laws hold in the new run as they stand: each task has one record on each topic of its way.
What has no rollout in the source (it was pending there), or was put back there under another attempt, gets one that
says `skipped`. Last comes `end`: without it the import is not complete, and whoever does it again goes on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace

from rftstream import codec
from rftstream.errors import ConfigError, ContractError
from rftstream.ids import next_attempt
from rftstream.messages import (
    Message,
    Problem,
    Rollout,
    RolloutStatus,
    RunManifest,
    Sampling,
    Task,
    TasksEnded,
)
from rftstream.runtime.observer import read_control
from rftstream.runtime.role import Log
from rftstream.transport.base import NewRecord, Position, Record, TopicPartition, Transport

GROUP = "import"
STEPS = TopicPartition("steps", 0)
MAX_RECORDS, MAX_BYTES = 512, 4 << 20
"""Of one transaction."""

Say = Callable[[str], None]


class Import:
    def __init__(self, source: Transport, target: Transport, run_id: str, say: Say) -> None:
        self._source, self._target = source, target
        self._from, self._into = Log(source), Log(target)
        self._run_id = run_id
        self._say = say

    def run(self, manifest: Callable[[], RunManifest]) -> None:
        """Nothing, if it is complete."""
        if read_control(self._target).ended is not None:
            return
        self._producer = self._target.producer(f"{self._run_id}.{GROUP}")
        self._producer.start()
        try:
            if not self._into.committed(GROUP):
                self._begin(manifest())
            self._copy("tasks", self._as_it_is)
            put_back = self._put_back()
            self._copy("rollouts", lambda record: self._rollout(record, put_back))
            self._fill()
            self._end()
        finally:
            self._producer.close()

    def _begin(self, manifest: RunManifest) -> None:
        """Fixes how much there is to copy: whole groups, and no rollout without its task."""
        for topic in ("tasks", "rollouts"):
            if any(self._source.admin.begin_offsets(topic).values()):
                raise ConfigError(f"{topic}: the source's log was trimmed by retention, expected it whole")
        ends = {**self._from.ends("rollouts"), **self._from.ends("tasks")}
        self._producer.commit(
            [codec.to_record(manifest, "control", 0, run=self._run_id)],
            positions={place: Position(0, str(end)) for place, end in ends.items()},
            group=GROUP,
        )

    def _copy(self, topic: str, change: Callable[[Record], NewRecord | None]) -> None:
        committed = {place: one for place, one in self._into.committed(GROUP).items() if place.topic == topic}
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
        self._say(f"{topic}: {total + len(records):,} records copied")

    def _as_it_is(self, record: Record) -> NewRecord | None:
        """Under this run's name. What belongs to no rollout is not copied."""
        if codec.is_foreign(record) or codec.ids_from_headers(record) is None:
            return None
        headers = tuple((k, self._run_id.encode() if k == "run" else v) for k, v in record.headers)
        return NewRecord(record.topic, record.partition, record.key, record.value, headers)

    def _rollout(self, record: Record, put_back: set[str]) -> NewRecord | None:
        ids = codec.ids_from_headers(record)
        if ids is None or ids.group_id not in put_back:
            return self._as_it_is(record)
        return None  # `_fill` says what became of it

    # ------------------------------------------------------------------------------------------ what has no rollout

    def _put_back(self) -> set[str]:
        """Groups that have a newer attempt: their rollouts may stand there once more."""
        groups = {(record.header("group_id") or b"").decode() for record in self._into.read("tasks", bodies=False)}
        return {group for group in groups if next_attempt(group) in groups}

    def _fill(self) -> None:
        """Each task has a rollout then."""
        there = {record.header("rollout_id") for record in self._into.read("rollouts", bodies=False)}
        missing = {
            record.header("rollout_id") for record in self._into.read("tasks", bodies=False)
        } - there  # fmt: skip
        records: list[NewRecord] = []
        for record in self._into.read("tasks") if missing else ():
            if record.header("rollout_id") not in missing:
                continue
            records.append(codec.to_record(_skipped(record), "rollouts", record.partition, run=self._run_id))
            if len(records) >= MAX_RECORDS:
                self._producer.commit(records)
                records = []
        if records:
            self._producer.commit(records)
        if missing:
            self._say(f"rollouts: {len(missing):,} tasks were not sampled, or put back; they are skipped")

    def _end(self) -> None:
        admitted = len({record.header("group_id") for record in self._into.read("tasks", bodies=False)})
        cursor = self._from.committed("feeder").get(STEPS, Position(0))
        counts = json.loads(cursor.metadata or '{"drawn": {}, "left_out": {}}')
        metadata = json.dumps({**counts, "admitted": admitted}, separators=(",", ":"))
        end = TasksEnded(admitted=admitted, reason="imported")
        self._producer.commit(
            [codec.to_record(end, "control", 0, run=self._run_id)], positions={STEPS: Position(0, metadata)},
            group="feeder",
        )  # fmt: skip
        self._say(f"{admitted:,} groups imported")


def _skipped(record: Record) -> Rollout:
    """In the place of a rollout that is not to be had."""
    ids = codec.ids_from_headers(record)
    assert ids is not None, "others were not copied"
    task = _task(record)
    error = "not sampled in the run that it comes from, or put back there as another attempt"
    rollout = Rollout(
        ids=ids, status=RolloutStatus.skipped, problem=Problem(messages=()), turns=(), segments=(), num_tokens=0,
        sampling=Sampling(), error=error, finished_at=time.time(),
    )  # fmt: skip
    if task is None:
        return replace(rollout, status=RolloutStatus.undecodable, problem=None)
    return replace(rollout, problem=task.problem, sampling=task.sampling)


def _task(record: Record) -> Task | None:
    try:
        message: Message = codec.from_record(record)
    except ContractError:
        return None
    return message if isinstance(message, Task) else None
