"""A writer on topics that belong to others. It imitates a broken tool or a stray process on a live log."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random
from typing import TypeVar

import msgspec

from rftstream.contracts import codec
from rftstream.contracts.batches import BatchManifest, Experience
from rftstream.contracts.control import Claim, RunFinished, RunManifest, TasksEnded, Trimmed
from rftstream.contracts.messages import Message
from rftstream.contracts.outcomes import GroupOutcome, GroupResult
from rftstream.contracts.records import NewRecord, Record
from rftstream.contracts.role_names import RoleName
from rftstream.contracts.tasks import Task
from rftstream.contracts.versions import EvalResult, StepRecord, VersionName, WeightsAnnounced, WeightsKind
from rftstream.runs.writes.additions import commit_once
from rftstream.service.records.in_force import writer_epoch
from rftstream.service.role import Log
from rftstream.transport.base import Transport

MAX_EPOCH = 2**63 - 1
TRANSACTIONAL_ID = "foreign"

M = TypeVar("M")
B = TypeVar("B", BatchManifest, Experience)


class _NothingYet(Exception):
    """The log has no record from which this one could be made."""


class _LogSample:
    """Draws records from a log, and makes other records from them."""

    def __init__(self, transport: Transport, run: str, random: Random) -> None:
        self._transport = transport
        self._run = run
        self._random = random

    def _some(self, topic: str, kind: type[M]) -> tuple[Record, M]:
        """Return any valid record of ours on the topic."""
        found = [
            (record, message)
            for record, message in Log(self._transport).in_force(topic)
            if message is not None and isinstance(message, kind)
        ]
        if not found:
            raise _NothingYet
        return self._random.choice(found)

    def _raw(self, message: Message, topic: str, epoch: int, partition: int = 0) -> NewRecord:
        return codec.to_record(message, topic, partition, run=self._run, writer_epoch=epoch)

    def _some_record(self, topics: Sequence[str]) -> NewRecord:
        """Return a record of one of the topics, to be written again."""
        topic = self._random.choice(topics)
        record, _ = self._some(topic, object)
        return NewRecord(topic, record.partition, record.key, record.value, record.headers)

    def _strange_epoch(self) -> int:
        return self._random.choice([0, 1000, 2**40, MAX_EPOCH])

    def _strange_name(self, name: VersionName) -> VersionName:
        epoch = self._strange_epoch()
        return VersionName(trainer_epoch=epoch, version=name.version + self._random.randint(0, 3))

    def _changed(self, kind: type[B], change: Callable[[B, Random], B]) -> NewRecord:
        """Return a changed copy of a record of `batches`."""
        record, message = self._some("batches", kind)
        return self._raw(change(message, self._random), "batches", writer_epoch(record), record.partition)


class ForeignWriter(_LogSample):
    """Writes foreign records, one at a time, on any topic. A FaultInjector makes it.

    Each record is made from records on the log. No role would write it, under any fault. On topics with several writers
    it has no contract, or is a copy without effect, since nothing shows which writers are allowed there.
    """

    def __init__(self, transport: Transport, run: str, random: Random) -> None:
        super().__init__(transport, run, random)
        self._num_bytes = 0
        """Number of records without headers that were written."""

    def write(self) -> str:
        """Write one record, and return its description."""
        kinds: list[Callable[[], NewRecord]] = [
            self._noise,
            self._noise,
            self._copy,
            self._copy,
            self._bytes,
            self._bytes,
            self._task,
            self._outcome,
            self._outcome,
            self._result,
            self._jump,
            self._claim,
            self._finished,
            self._trimmed,
            self._end,
            self._manifest,
            self._announcement,
            self._step,
            self._batch_manifest,
            self._batch_manifest,
            self._experience,
        ]
        self._random.shuffle(kinds)
        for make in kinds:
            with suppress(_NothingYet):
                record = make()
                commit_once(self._transport, TRANSACTIONAL_ID, [record])
                return f"{make.__name__.strip('_')} on {record.topic}[{record.partition}]"
        return "nothing, for there is nothing yet"

    # ------------------------------------------------------------------------------------------ on any of them

    def _noise(self) -> NewRecord:
        """Return random bytes with the headers of a record of the topic, or with those of a future release."""
        record = self._some_record(
            ["batches", "weights", "steps", "control", "outcomes", "outcomes", "evals", "summaries"]
        )
        noise, headers = self._random.randbytes(40), record.headers
        if noise[0] % 2:
            headers = tuple((name, b"99" if name == "contract_version" else value) for name, value in headers)
        return msgspec.structs.replace(record, value=noise, headers=headers)

    def _copy(self) -> NewRecord:
        """Return a copy of a record on the log."""
        topics = ["batches", "batches", "weights", "steps", "outcomes", "outcomes", "verified", "summaries"]
        return self._some_record(topics)

    def _bytes(self) -> NewRecord:
        """Return random bytes without headers, on each topic of the run in turn."""
        topics = self._transport.admin.topics()
        topic = sorted(topics)[self._num_bytes % len(topics)]
        self._num_bytes += 1
        partition = self._random.randrange(topics[topic].partitions)
        return NewRecord(topic, partition, self._random.randbytes(4), self._random.randbytes(20), ())

    # ------------------------------------------------------------------------------------------ control

    def _claim(self) -> NewRecord:
        role = self._random.choice([RoleName.feeder, RoleName.buffer, RoleName.trainer])
        epoch = self._random.choice([MAX_EPOCH, 2**40, 1000])
        claim = Claim(role=role, epoch=epoch, host="elsewhere", pid=1, process="foreign", claimed_at=0.0)
        return self._raw(claim, "control", epoch)

    def _finished(self) -> NewRecord:
        epoch = self._strange_epoch()
        name = VersionName(trainer_epoch=epoch, version=1)
        return self._raw(RunFinished(reason="foreign", name=name, finished_at=0.0), "control", epoch)

    def _trimmed(self) -> NewRecord:
        """Return a deletion under the trainer's epoch: beyond the end of the log, or within it for a checkpoint that
        does not exist."""
        self._some("control", Claim)
        newest = max(
            (
                one.epoch
                for _, one in Log(self._transport).in_force("control")
                if isinstance(one, Claim) and one.role == RoleName.trainer
            ),
            default=0,
        )
        ends = [end for _, end in sorted(self._transport.admin.end_offsets("tasks").items())]
        beyond, version = (1000, 0) if sum(ends) % 2 else (0, 10_000)  # not drawn: other records stay the same
        said = Trimmed(
            name=VersionName(trainer_epoch=newest, version=version),
            checkpoints=(),
            offsets={"tasks": tuple(end + beyond for end in ends)},
            version=5,
            sequence=50,
        )
        return self._raw(said, "control", newest)

    def _end(self) -> NewRecord:
        return self._raw(TasksEnded(admitted=0, reason="foreign"), "control", self._strange_epoch())

    def _manifest(self) -> NewRecord:
        """Return a second manifest, valid or not decodable."""
        _, manifest = self._some("control", RunManifest)
        record = self._raw(dataclasses.replace(manifest, seed=12345, partitions=99), "control", 1)
        return record if self._random.random() < 0.5 else msgspec.structs.replace(record, value=b"\xc1")

    # ------------------------------------------------------------------------------------------ weights and steps

    def _announcement(self) -> NewRecord:
        _, announced = self._some("weights", WeightsAnnounced)
        name = self._strange_name(announced.name)
        changed = dataclasses.replace(
            announced, name=name, kind=WeightsKind.full, parent=None, delta=None, resumed=True
        )
        return self._raw(changed, "weights", name.trainer_epoch)

    def _step(self) -> NewRecord:
        _, step = self._some("steps", StepRecord)
        name = self._strange_name(step.name)
        return self._raw(dataclasses.replace(step, name=name, trained_groups=1000), "steps", name.trainer_epoch)

    def _jump(self) -> NewRecord:
        """Return an announcement or a step of the right epoch with a version that is far ahead."""
        topic = self._random.choice(["weights", "steps"])
        record, message = self._some(topic, object)
        assert isinstance(message, WeightsAnnounced | StepRecord)
        far = dataclasses.replace(message.name, version=message.name.version + 1000)
        return self._raw(dataclasses.replace(message, name=far), topic, writer_epoch(record))

    # ------------------------------------------------------------------------------------------ tasks, outcomes, evals

    def _task(self) -> NewRecord:
        """Return a task of a group that was never admitted."""
        record, task = self._some("tasks", Task)
        rollout = f"no/0/0/0/{task.ids.sibling}"
        ids = dataclasses.replace(task.ids, group_id="no/0/0/0", taskset="no", rollout_id=rollout, sequence=10**6)
        return self._raw(dataclasses.replace(task, ids=ids), "tasks", self._strange_epoch(), record.partition)

    def _outcome(self) -> NewRecord:
        """Return an outcome of an undecided group under an unclaimed epoch, or a second outcome of a decided group."""
        record, outcome = self._some("outcomes", GroupOutcome)
        changed = dataclasses.replace(outcome, result=GroupResult.dead, batch_sequence=None, late=False)
        if self._random.random() < 0.5 and not outcome.late:
            return self._raw(changed, "outcomes", writer_epoch(record))
        group = dataclasses.replace(
            changed, group_id="no/0/0/0", taskset="no", sequence=outcome.sequence + self._random.randint(0, 9)
        )
        return self._raw(group, "outcomes", self._strange_epoch() or 1000)

    def _result(self) -> NewRecord:
        """Return a result of an evaluation that was never done."""
        _, result = self._some("evals", EvalResult)
        changed = dataclasses.replace(result, metrics={"mean": 1e9}, best=True)
        return self._raw(changed, "evals", self._strange_epoch())

    # ------------------------------------------------------------------------------------------ batches

    def _batch_manifest(self) -> NewRecord:
        """Return a manifest with a wrong field, for a batch in the past, or in the near or far future."""
        return self._changed(BatchManifest, _wrong_manifest)

    def _experience(self) -> NewRecord:
        """Return an experience in another batch or in another place."""
        return self._changed(Experience, _wrong_experience)


def _wrong_manifest(manifest: BatchManifest, random: Random) -> BatchManifest:
    changed = dataclasses.replace(
        manifest,
        batch_sequence=manifest.batch_sequence + random.choice([0, 1, 1, 2, 1000]),
        count=manifest.count + random.choice([0, 0, 1]),
        total_groups=10**6,
    )
    if changed.batch_sequence > manifest.batch_sequence and changed.count == 0:
        changed = dataclasses.replace(changed, count=1)
    return changed


def _wrong_experience(experience: Experience, random: Random) -> Experience:
    batch = experience.batch_sequence + random.choice([0, 1, 1, 1, 2])
    return dataclasses.replace(
        experience, batch_sequence=batch, position=experience.position + random.choice([0, 0, 1])
    )
