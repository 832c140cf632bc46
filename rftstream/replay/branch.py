"""Builds the log of a run that trains another run's batches. It contains all records of the groups in these batches.

The new run is a branch. Up to the version that it begins with, it has the batches and steps of the other run, and that
version's state as a checkpoint. The batches after that version are on `batches` and wait to be trained. Versions keep
their numbers. The branch's trainers have higher epochs than those of the other run, so a version's full name belongs to
one of the two runs. All laws hold in the branch: each group was admitted, has one record on each topic for each
rollout, and was put into a batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rftstream.algorithms.learning_signal import STEPS_WITHOUT_SIGNAL
from rftstream.algorithms.reward_changes import changed_at, find_reward_changes
from rftstream.contracts import codec
from rftstream.contracts.batches import BatchManifest, Experience
from rftstream.contracts.messages import Message
from rftstream.contracts.outcomes import GroupOutcome
from rftstream.contracts.records import NewRecord, Record, TopicPartition
from rftstream.contracts.rollouts import Rollout, RolloutStatus
from rftstream.contracts.verdicts import UnscorableReason, VerifiedRollout
from rftstream.contracts.versions import StepRecord
from rftstream.errors import ConfigError, ContractError
from rftstream.replay.recorded import Recorded, next_batch
from rftstream.replay.without import LeftOut
from rftstream.roles.buffer import BUFFER
from rftstream.roles.buffer.groups import late_outcome
from rftstream.roles.explorer import EXPLORER
from rftstream.roles.trainer import TRAINER
from rftstream.roles.trainer.progress import TrainerProgress
from rftstream.roles.trainer.recorded_batches import RecordedBatches
from rftstream.roles.verifier import VERIFIER
from rftstream.runs.making.imported import Import, skipped_rollouts, without
from rftstream.runs.writes.additions import Say
from rftstream.service.control_view import read_control
from rftstream.service.role import Log
from rftstream.service.role_claim import new_claim
from rftstream.transport.base import Transport
from rftstream.weights.checkpoints import CheckpointStore

FLOW = ("tasks", "rollouts", "verified", "outcomes")
Fill = Callable[[Path], None]
"""Function that writes the files of a checkpoint into a folder."""


@dataclass(frozen=True, slots=True)
class Extent:
    """The batches that a branch trains, and the groups that are copied with them. `measure` makes it, before a
    `BatchImport` copies."""

    first: int
    """The version that the branch begins with."""
    last: int
    """The version that the last of the batches makes."""
    groups: frozenset[str]
    """Ids of the groups in batches 0 to `last` - 1."""
    num_rollouts: int
    """Rollouts in the batches that are trained."""
    num_groups: int
    """Groups in the batches that are trained."""
    rewards: tuple[float, ...]
    """Mean reward of each batch before version `first`, as its manifest says. Batches without a reward are left out."""
    foreign: frozenset[tuple[TopicPartition, int]] = frozenset()
    """Places and offsets of records on `batches` that belong to none of its batches."""


def measure(transport: Transport, first: int, last: int) -> Extent:
    """Read all batches up to version `last` and return the extent of a branch from version `first`. ConfigError if a
    batch cannot be read or differs from its manifest, or if records of `batches` were deleted."""
    begins = [offset for _, offset in sorted(transport.admin.begin_offsets("batches").items())]
    if any(begins):
        raise ConfigError("batches: the log was trimmed by retention, expected it whole: a run of its own has its past")
    groups: set[str] = set()
    rewards: list[float] = []
    num_rollouts = num_groups = 0
    with closing(RecordedBatches(transport, begins, 0)) as batches:
        for sequence in range(last):
            batch, why = next_batch(batches)
            if batch is None:
                raise ConfigError(f"batch {sequence} cannot be trained: {why}; give a --to of at most {sequence}")
            groups.update(*(manifest.groups + manifest.reused for manifest in batch.manifests))
            if sequence >= first:
                num_rollouts += batch.num_rollouts
                num_groups += sum(len(manifest.groups) for manifest in batch.manifests)
            elif "reward" in batch.manifest.metrics:
                rewards.append(batch.manifest.metrics["reward"])
    return Extent(first, last, frozenset(groups), num_rollouts, num_groups, tuple(rewards), frozenset(batches.foreign))


class BatchImport(Import):
    """The import that makes a branch. The caller makes it with the result of `measure` and calls `run`, which calls
    `bounds` and `copy`."""

    def __init__(
        self,
        source: Transport,
        target: Transport,
        run_id: str,
        say: Say,
        *,
        extent: Extent,
        recorded: Recorded,
        checkpoints: CheckpointStore,
        fill: Fill,
        rewards_kept: int,
        left_out: LeftOut | None = None,
    ) -> None:
        """`fill` saves the state of the first version. `rewards_kept` is the number of recent steps' rewards that the
        trainer remembers. `left_out`: rollouts that the batches are trained without."""
        self._left_out = left_out
        super().__init__(source, target, run_id, say)
        self._extent = extent
        self._recorded = recorded
        self._checkpoints = checkpoints
        self._fill = fill
        self._rewards_kept = rewards_kept

    def bounds(self) -> Mapping[TopicPartition, tuple[int, int]]:
        """Return the range of each partition of the source that is copied. ConfigError if records of it were
        deleted."""
        self.check_whole(*FLOW, "batches", "steps")
        topics = ("experts", *FLOW, *(("steps",) if self._extent.first else ()))
        found = self.to_the_ends(*topics)
        ends = self._recorded.steps[self._extent.last].positions
        return found | {place: (0, end) for place, end in zip(sorted(self._from.ends("batches")), ends, strict=True)}

    def copy(self) -> None:
        """Write the claims, copy the records, decide undecided groups, and write the checkpoint and `end`. Records that
        exist already are kept."""
        self._claim()
        self.copy_topic("experts", self.as_it_is)
        for topic in FLOW:
            self.copy_topic(topic, self._outcome if topic == "outcomes" else self._of_the_groups)
        self.copy_topic("batches", self._of_the_batches)
        self._decide_the_rest()
        positions = self._positions()
        if self._extent.first:
            self.copy_topic("steps", lambda record: self._step(record, positions))
            self._checkpoint(positions[self._extent.first])
        self._all_is_done()
        self.end()

    # ------------------------------------------------------------------------------------------ records

    def _of_the_groups(self, record: Record) -> NewRecord | None:
        if record.header("contract") == b"batch_reuse":
            sequence = record.number("batch_sequence")
            is_trained = sequence is not None and sequence < self._extent.last
            return self.as_it_is(record) if is_trained else None
        return self.as_it_is(record) if record.text("group_id") in self._extent.groups else None

    def _outcome(self, record: Record) -> NewRecord | None:
        copied = self._of_the_groups(record)
        try:
            outcome = self._from.rule.decode(record)
        except ContractError:  # a record that is not in force does not count
            return None
        if copied is None or self._left_out is None or not isinstance(outcome, GroupOutcome):
            return copied
        changed = self._left_out.outcome(outcome)
        return copied if changed == outcome else self._rewritten(changed, record)

    def _rewritten(self, message: Message, record: Record) -> NewRecord:
        """Return the record that replaces a message's recorded one in this run."""
        return codec.to_record(message, record.topic, record.partition, run=self._run_id, writer_epoch=_epoch(record))

    def _of_the_batches(self, record: Record) -> NewRecord | None:
        """Return the record of a batch that is trained. The manifests of the last batch are marked as last."""
        sequence = record.number("batch_sequence")
        if sequence is None or sequence >= self._extent.last or (record.place, record.offset) in self._extent.foreign:
            return None
        if record.header("contract") != b"batch_manifest":
            return self._experience(record, sequence)
        recorded = codec.from_record(record)
        assert isinstance(recorded, BatchManifest)
        manifest = recorded if self._left_out is None else self._left_out.manifest(recorded)
        last = sequence == self._extent.last - 1
        if last or manifest.last:
            manifest = dataclasses.replace(manifest, last=last, admitted=len(self._extent.groups) if last else None)
        return self.as_it_is(record) if manifest == recorded else self._rewritten(manifest, record)

    def _experience(self, record: Record, sequence: int) -> NewRecord | None:
        if self._left_out is None or sequence not in self._left_out.batches:
            return self.as_it_is(record)
        experience = codec.from_record(record)
        assert isinstance(experience, Experience)
        changed = self._left_out.experience((record.place, record.offset), experience)
        return None if changed is None else self._rewritten(changed, record)

    def _step(self, record: Record, positions: list[tuple[int, ...]]) -> NewRecord | None:
        """Return the record of a step in force up to the first version. The objects that it names stay in their
        place."""
        try:
            step = self._from.rule.decode(record)
        except ContractError:  # a record that cannot be decoded does not count
            return None
        if not isinstance(step, StepRecord) or not self._is_past(step):
            return None
        step = dataclasses.replace(step, positions=positions[step.name.version], announced=False, last=False)
        return codec.to_record(step, "steps", 0, run=self._run_id, writer_epoch=_epoch(record))

    def _is_past(self, step: StepRecord) -> bool:
        name = step.name
        known = (
            self._recorded.anchors.get(name.trainer_epoch) if step.resumed else self._recorded.steps.get(name.version)
        )
        return known is not None and known.name == name and name.version <= self._extent.first

    def _positions(self) -> list[tuple[int, ...]]:
        """Return this run's offsets on each share of `batches`: the beginning, then the end of each batch."""
        shares: dict[TopicPartition, list[int]] = {
            place: [begin] for place, begin in self._target.admin.begin_offsets("batches").items()
        }
        for record in self._into.read("batches", bodies=False):
            if record.header("contract") == b"batch_manifest":
                shares[record.place].append(record.offset + 1)
        return list(zip(*(offsets for _, offsets in sorted(shares.items())), strict=True))

    # ------------------------------------------------------------------------------------------ what was pending

    def _decide_the_rest(self) -> None:
        """Give an outcome to siblings that were still pending when their group was decided: in this run they are
        late."""
        late = self.commit_all(skipped_rollouts(self._into, self._run_id))
        self.commit_all(unscored_rollouts(self._into, self._run_id))
        self.commit_all(self._late())
        if late:
            self._say(f"rollouts: {late:,} were still on their way there; they are skipped")

    def _late(self) -> Iterator[NewRecord]:
        named: set[str] = set()
        for received in self._into.messages("outcomes"):
            if isinstance(received.message, GroupOutcome):
                named.update(rollout.rollout_id for rollout in received.message.rollouts)
        there = {record.header("rollout_id") or b"" for record in self._into.read("verified", bodies=False)}
        if not {one.decode() for one in there} - named:
            return
        for record in self._into.read("verified"):
            if record.text("rollout_id") not in named:
                outcome = late_outcome(as_verified(record), time.time())
                yield codec.to_record(outcome, "outcomes", 0, run=self._run_id, writer_epoch=self._buffer_epoch)

    # ------------------------------------------------------------------------------------------ the roles' state

    def _checkpoint(self, positions: tuple[int, ...]) -> None:
        name = self._recorded.steps[self._extent.first].name
        if name in self._checkpoints.names():
            return
        self._target.admin.make_durable()
        self._checkpoints.write(name, self._fill, self._progress(positions).to_state())

    def _progress(self, positions: tuple[int, ...]) -> TrainerProgress:
        """Return the trainer's progress at the first version."""
        steps = [step for version, step in sorted(self._recorded.steps.items()) if version <= self._extent.first]
        since = changed_at(find_reward_changes((step.name.version, step.scorers) for step in steps))
        kept = min(self._rewards_kept, sum(step.name.version >= since for step in steps))
        skips_in_a_row = next((n for n, step in enumerate(reversed(steps)) if not step.skipped), len(steps))
        return TrainerProgress(
            version=self._extent.first,
            positions=positions,
            trained_groups=steps[-1].trained_groups,
            trained_rollouts=steps[-1].trained_rollouts,
            skips_in_a_row=skips_in_a_row,
            steps_without_signal=int(steps[-1].metrics.get(STEPS_WITHOUT_SIGNAL, 0)),
            rewards=tuple(self._extent.rewards[-kept:]),
            scorers={taskset: scorer for step in steps for taskset, scorer in step.scorers.items()},
        )

    def _claim(self) -> None:
        """Write claims for all epochs of the other run's records. So these records count here, and this run's trainers
        begin above them."""
        if TRAINER.name in read_control(self._target).claims:
            return
        newest_epochs = {TRAINER.name: max(self._recorded.anchors), BUFFER.name: self._buffer_epoch}
        claims = [
            new_claim(role, epoch, process="replay", now=time.time())
            for role, newest in newest_epochs.items()
            for epoch in range(1, newest + 1)
        ]
        self._producer.commit(
            [codec.to_record(claim, "control", 0, run=self._run_id, writer_epoch=claim.epoch) for claim in claims]
        )

    @property
    def _buffer_epoch(self) -> int:
        """Return the newest epoch of the other run's buffer; 0 if it had none."""
        claim = read_control(self._source).claims.get(BUFFER.name)
        return 0 if claim is None else claim.epoch

    def _all_is_done(self) -> None:
        """Commit positions at the end of each topic, so that the copied records are not sampled, scored or batched
        again."""
        self.pass_over(EXPLORER.name, "tasks")
        self.pass_over(VERIFIER.name, "rollouts")
        self.pass_over(BUFFER.name, "verified", f"{{end}} {self._extent.last} 1")


def _epoch(record: Record) -> int:
    return record.number("writer_epoch") or 0


def unscored_rollouts(log: Log, run_id: str) -> Iterator[NewRecord]:
    """Yield a rollout without a verdict for each rollout that has no record on `verified`."""
    for record in without(log, "rollouts", "verified"):
        yield codec.to_record(as_verified(record), "verified", record.partition, run=run_id)


def as_verified(record: Record) -> VerifiedRollout:
    """Return a record of `rollouts` or `verified` in the form that the buffer reads. A rollout becomes an unscored
    one."""
    ids = codec.ids_from_headers(record)
    assert ids is not None, "others were not copied"
    message: Message | None = None
    detail = "its record could not be decoded in the run that it comes from"
    with contextlib.suppress(ContractError):
        message = codec.from_record(record)
    if isinstance(message, VerifiedRollout):
        return message
    rollout, reason = None, UnscorableReason.undecodable
    if isinstance(message, Rollout) and message.status is not RolloutStatus.undecodable:
        rollout, reason, detail = message, UnscorableReason.skipped, "not scored in the run that it comes from"
    return VerifiedRollout(
        ids=ids, rollout=rollout, verdict=None, reason=reason, detail=detail, verified_at=time.time()
    )
