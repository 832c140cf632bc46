"""A long run, made up: `python -m benchmarks._longrun FOLDER [ROLLOUTS] [SERVERS]`.

What the roles would have written, record for record, with lawful headers and bodies, straight through a producer in
transactions of many records: an eighth of the groups rejected, the last ones still on their way.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]  # it has no stubs
import msgspec

from rftstream import __version__
from rftstream.config import loader
from rftstream.contracts import codec, ids
from rftstream.contracts.arrays import Array
from rftstream.contracts.batches import BatchManifest, Experience, LossKind
from rftstream.contracts.control import Claim, RunManifest
from rftstream.contracts.messages import Message
from rftstream.contracts.outcomes import GroupOutcome, GroupResult, RolloutSummary
from rftstream.contracts.records import Headers, NewRecord, TopicPartition
from rftstream.contracts.role_names import RoleName
from rftstream.contracts.rollouts import Rollout, RolloutStatus, Segment, Turn, VersionSpan
from rftstream.contracts.tasks import ChatMessage, Problem, RolloutIds, Sampling, Task
from rftstream.contracts.topics import TOPICS
from rftstream.contracts.verdicts import Verdict, VerifiedRollout
from rftstream.contracts.versions import StepRecord, VersionName
from rftstream.runs.folder import OpenRun, RunFolder, create_log, open_transport
from rftstream.transport.base import Position

NUM_PARTITIONS = 64
NUM_SHARES = 2
GROUP_SIZE = 8
GROUPS_PER_BATCH = 8
BATCHES_PER_TRANSACTION = 32
NUM_TOKENS = 16
_ID_HEADERS = ("group_id", "rollout_id", "sibling", "group_size", "sequence", "min_version", "taskset")

PROBLEM = Problem(messages=(ChatMessage(role="user", content="12+30="),), answer="42")
SAMPLING = Sampling()
SEGMENT = Segment(
    token_ids=Array.of(range(3 + NUM_TOKENS), "int32"),
    behavior_logprobs=Array.of([0.0] * 3 + [-0.5] * NUM_TOKENS, "float32"),
    loss_mask=Array.of([0] * 3 + [1] * NUM_TOKENS, "uint8"),
    versions=(VersionSpan(start=3, count=NUM_TOKENS, trainer_epoch=1, version=0),),
)
TURN = Turn(role="assistant", content="42", num_tokens=NUM_TOKENS, finish_reason="stop")
VERDICT = Verdict(reward=1.0, scorer="exact", scorer_version="1")
REJECTED = {3: GroupResult.filtered, 11: GroupResult.dead}
"""By sequence modulo 16."""


@dataclass(frozen=True, slots=True)
class Sibling:
    """A rollout's ids, packed once for the four records that carry them."""

    ids: RolloutIds
    packed: bytes
    headers: Headers

    @staticmethod
    def of(one: RolloutIds) -> Sibling:
        fields = msgspec.to_builtins(one)
        return Sibling(one, msgpack.packb(fields), tuple((name, str(fields[name]).encode()) for name in _ID_HEADERS))


class Form:
    """A message encoded once; for each rollout only its ids are put in."""

    def __init__(self, topic: str, message: Task | Rollout | VerifiedRollout | Experience, run: str) -> None:
        record = codec.to_record(message, topic, 0, run=run, writer_epoch=_epoch(topic))
        assert record.value is not None
        self._topic = topic
        self._values = record.value.split(Sibling.of(message.ids).packed)
        names = [name for name, _ in record.headers]
        first, last = names.index("id"), max(map(names.index, _ID_HEADERS))
        assert set(names[first + 1 : last + 1]) == set(_ID_HEADERS)
        self._before, self._after = record.headers[:first], record.headers[last + 1 :]

    def record(self, partition: int, one: Sibling, key: bytes | None = None) -> NewRecord:
        rollout_id = one.ids.rollout_id.encode()
        headers = (*self._before, ("id", rollout_id), *one.headers, *self._after)
        value = one.packed.join(self._values)
        return NewRecord(self._topic, partition, rollout_id if key is None else key, value, headers)


class LongRun:
    """Groups 0, 1, ... go the whole way in order; the newest GROUPS_PER_BATCH of each `extend` stay on theirs."""

    def __init__(self, run: OpenRun) -> None:
        self.run = run
        self._producer = run.transport.producer("longrun")
        self._producer.start()
        self._next_sequence = 0
        self._undecided: list[int] = []
        self._num_batches = 0
        self._trained_groups = 0
        self._offsets: dict[TopicPartition, int] = {}
        self._records: list[NewRecord] = []
        self._forms = flow_forms(run.run_id)
        manifest = RunManifest(
            run=run.run_id,
            created_at=1.0,
            config="",
            digests={"taskset.sums": ""},
            partitions=NUM_PARTITIONS,
            shares=NUM_SHARES,
            seed=0,
            rftstream_version=__version__,
        )
        for role in (RoleName.feeder, RoleName.buffer, RoleName.trainer):
            self._add("control", 0, Claim(role=role, epoch=1, host="bench", pid=1, process=f"{role}-0", claimed_at=1.0))
        self._add("control", 0, manifest)
        self._add("steps", 0, self._step(resumed=True))
        self._commit()

    def extend(self, num_rollouts: int) -> None:
        groups = range(self._next_sequence, self._next_sequence + num_rollouts // GROUP_SIZE)
        self._next_sequence = groups.stop
        for start in range(groups.start, groups.stop, BATCHES_PER_TRANSACTION * GROUPS_PER_BATCH):
            some = range(start, min(start + BATCHES_PER_TRANSACTION * GROUPS_PER_BATCH, groups.stop))
            for sequence in some:
                self._flow(sequence)
            ready = self._undecided + list(some)
            if some.stop == groups.stop:
                ready, self._undecided = ready[:-GROUPS_PER_BATCH], ready[-GROUPS_PER_BATCH:]
            else:
                self._undecided = []
            self._decide(ready)
            self._commit()

    def _flow(self, sequence: int) -> None:
        place = sequence % NUM_PARTITIONS
        for one in map(Sibling.of, _siblings(sequence)):
            self._records += [form.record(place, one) for form in self._forms]

    def _decide(self, sequences: list[int]) -> None:
        """Rejections, and a batch of every GROUPS_PER_BATCH others, trained at once."""
        groups = [sequence for sequence in sequences if sequence % 16 not in REJECTED]
        num_left = len(groups) % GROUPS_PER_BATCH
        self._undecided = sorted(groups[len(groups) - num_left :] + self._undecided)
        for sequence in sequences:
            if (result := REJECTED.get(sequence % 16)) is not None:
                self._add("outcomes", 0, _outcome(sequence, result, None))
        for first in range(0, len(groups) - num_left, GROUPS_PER_BATCH):
            self._batch(groups[first : first + GROUPS_PER_BATCH])

    def _batch(self, sequences: list[int]) -> None:
        batch, per_share = self._num_batches, GROUPS_PER_BATCH // NUM_SHARES
        for share in range(NUM_SHARES):
            own = sequences[share * per_share : (share + 1) * per_share]
            siblings = [Sibling.of(one) for sequence in own for one in _siblings(sequence)]
            form = self._experience(siblings[0].ids, batch, share)
            self._records += [form.record(share, one, b"%d" % batch) for one in siblings]
            self._count("batches", share, len(siblings))
            self._add(
                "batches",
                share,
                BatchManifest(
                    batch_sequence=batch,
                    share=share,
                    num_shares=NUM_SHARES,
                    count=per_share * GROUP_SIZE,
                    digest="sha256:" + "0" * 64,
                    groups=tuple(_group(sequence) for sequence in own),
                    num_groups=GROUPS_PER_BATCH,
                    total_groups=self._trained_groups + GROUPS_PER_BATCH,
                ),
            )
        for sequence in sequences:
            self._add("outcomes", 0, _outcome(sequence, GroupResult.batched, batch))
        self._num_batches += 1
        self._trained_groups += GROUPS_PER_BATCH
        self._add("steps", 0, self._step())

    def _experience(self, one: RolloutIds, batch: int, share: int) -> Form:
        """All of one batch and share say position 0: nobody who counts looks."""
        experience = Experience(
            ids=one,
            batch_sequence=batch,
            share=share,
            position=0,
            loss_kind=LossKind.rl,
            segments=(SEGMENT,),
            reward=1.0,
            sampling=SAMPLING,
        )
        return Form("batches", experience, self.run.run_id)

    def _step(self, *, resumed: bool = False) -> StepRecord:
        return StepRecord(
            name=VersionName(trainer_epoch=1, version=self._num_batches),
            batch_sequence=None if resumed else self._num_batches - 1,
            positions=tuple(self._offsets.get(TopicPartition("batches", share), 0) for share in range(NUM_SHARES)),
            trained_groups=self._trained_groups,
            trained_rollouts=self._trained_groups * GROUP_SIZE,
            weights_digest=None,
            metrics={"reward": 0.5},
            resumed=resumed,
        )

    def _add(self, topic: str, partition: int, message: Message) -> None:
        self._count(topic, partition, 1)
        record = codec.to_record(message, topic, partition, run=self.run.run_id, writer_epoch=_epoch(topic))
        self._records.append(record)

    def _count(self, topic: str, partition: int, num_records: int) -> None:
        place = TopicPartition(topic, partition)
        self._offsets[place] = self._offsets.get(place, 0) + num_records

    def _commit(self) -> None:
        self._producer.commit(self._records)
        self._records = []
        for group, topic in (("explorer", "tasks"), ("verifier", "rollouts")):
            ends = self.run.transport.admin.end_offsets(topic)
            self._producer.commit([], positions={place: Position(end) for place, end in ends.items()}, group=group)


def flow_forms(run_id: str) -> list[Form]:
    """Task, rollout and verified rollout of any sibling."""
    one = next(_siblings(0))
    rollout = Rollout(
        ids=one,
        status=RolloutStatus.completed,
        problem=PROBLEM,
        num_tokens=NUM_TOKENS,
        sampling=SAMPLING,
        turns=(TURN,),
        segments=(SEGMENT,),
    )
    return [
        Form("tasks", Task(ids=one, problem=PROBLEM, sampling=SAMPLING, seed=7), run_id),
        Form("rollouts", rollout, run_id),
        Form("verified", VerifiedRollout(ids=one, rollout=rollout, verdict=VERDICT), run_id),
    ]


def _epoch(topic: str) -> int:
    """The epoch under which a topic's single role writes; 0 for topics that anybody writes."""
    return int(topic == "control" or TOPICS[topic].writer is not None)


def _group(sequence: int) -> str:
    return ids.group_id("sums", 0, sequence, 0)


def _siblings(sequence: int) -> Iterator[RolloutIds]:
    group = _group(sequence)
    for sibling in range(GROUP_SIZE):
        yield RolloutIds(
            rollout_id=ids.rollout_id(group, sibling),
            group_id=group,
            taskset="sums",
            sibling=sibling,
            group_size=GROUP_SIZE,
            sequence=sequence,
            min_version=0,
        )


def _outcome(sequence: int, result: GroupResult, batch: int | None) -> GroupOutcome:
    return GroupOutcome(
        group_id=_group(sequence),
        taskset="sums",
        sequence=sequence,
        result=result,
        reason="made up",
        batch_sequence=batch,
        rollouts=tuple(
            RolloutSummary(
                rollout_id=one.rollout_id,
                num_tokens=NUM_TOKENS,
                status=RolloutStatus.completed,
                reward=float(one.sibling % 2),
                reason=None,
            )
            for one in _siblings(sequence)
        ),
    )


def make(folder: Path, num_rollouts: int, *, servers: str | None = None) -> LongRun:
    """A run in a new folder, or one on a broker."""
    transport: dict[str, Any] = {"partitions": NUM_PARTITIONS}
    if servers is not None:
        transport |= {"kind": "kafka", "servers": servers}
    config = loader.from_dict(
        {
            "run": {"name": folder.name, "steps": 1_000_000_000},
            "model": {"path": "fake"},
            "tasksets": {"sums": {"source": "arithmetic"}},
            "transport": transport,
            "trainer": {"shares": NUM_SHARES},
        }
    )
    run_folder = RunFolder(folder)
    folder.mkdir(parents=True)
    run_folder.config_file.write_text(loader.to_toml(config), encoding="utf-8")
    log = open_transport(config, run_folder, create=True)
    create_log(log, config)
    made = LongRun(OpenRun(run_folder, config, log))
    made.extend(num_rollouts)
    return made


if __name__ == "__main__":
    path, count, *rest = [*sys.argv[1:], "100000"] if len(sys.argv) == 2 else sys.argv[1:]
    make(Path(path), int(count), servers=rest[0] if rest else None).run.transport.close()
