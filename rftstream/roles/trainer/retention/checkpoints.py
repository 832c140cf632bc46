"""Checkpoints of one trainer: which one it starts from, when one is written, and what may be deleted afterwards.

Before any deletion, a durable `Trimmed` record on the log names the deleted objects. It is committed like a step, which
a replaced trainer cannot do. A trainer that chooses where to start reads the newest such record first. TrimmedDeletions
deletes the objects."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from typing import Any

from rftstream.backends.base import Backend
from rftstream.clock import Clock
from rftstream.config.sections import RunConfig
from rftstream.contracts.control import Trimmed
from rftstream.contracts.outcomes import GroupOutcome
from rftstream.contracts.records import TopicPartition
from rftstream.contracts.versions import VersionName
from rftstream.errors import ConfigError, TransportError, WeightsError
from rftstream.roles.buffer import BUFFER
from rftstream.roles.explorer import EXPLORER
from rftstream.roles.feeder import FEEDER
from rftstream.roles.synthesiser import SYNTHESISER
from rftstream.roles.trainer.backend_thread import BackendThread
from rftstream.roles.trainer.pending_update import abandon, ends_within
from rftstream.roles.trainer.progress import TrainerProgress
from rftstream.roles.trainer.retention.completed_groups import CompletedGroups
from rftstream.roles.trainer.retention.trimmed_deletions import TrimmedDeletions
from rftstream.roles.trainer.versions import Versions
from rftstream.roles.verifier import VERIFIER
from rftstream.service.role import Log
from rftstream.weights.checkpoints import CheckpointStore, StagedCheckpoint, is_gone
from rftstream.weights.stores.store import ObjectStore

log = logging.getLogger(__name__)

InForce = Callable[[VersionName], bool]


@dataclass(eq=False, slots=True)
class Checkpoints:
    """The checkpoints of one epoch of the trainer. The step makes it at each recovery, and calls:

    - `begin` once `control` was read, then `load`;
    - `has_room` before each version;
    - `stage` before the next update begins, if a checkpoint `is_due`, and `begin_write` when the version's step is on
      the log;
    - `look` in each slice;
    - `plan` while `trim_due` is true, which it becomes after each written checkpoint; then `carry_out` once the planned
      record is on the log;
    - `write` when the run ends, `write_before_leaving` when the process leaves, and `abandon` at last.
    """

    config: RunConfig
    store: ObjectStore
    clock: Clock
    log_: Log
    deletions: TrimmedDeletions
    versions: Versions
    backend: BackendThread
    executor: Executor
    """Executor with one thread, in which checkpoints are written."""
    trim_due: bool = field(default=False, init=False)
    """Whether a checkpoint was written whose deletions are not yet recorded and carried out."""
    _written: list[VersionName] = field(default_factory=list, init=False)
    """Complete checkpoints, oldest first."""
    _staged: StagedCheckpoint | None = field(default=None, init=False)
    """Saved checkpoint that is not in the store yet."""
    _writing: tuple[VersionName, Future[None]] | None = field(default=None, init=False)
    """Name of the checkpoint being written, and the future of the writing; None if no checkpoint is being written."""
    _on_store: CheckpointStore = field(init=False)
    _log_retention: LogRetention = field(init=False)

    def __post_init__(self) -> None:
        self._on_store, self._log_retention = CheckpointStore(self.store), LogRetention(self.log_)

    # ------------------------------------------------------------------------------------------ beginning

    def begin(self) -> None:
        """Repeat deletions that a predecessor may not have finished, and list the checkpoints."""
        if self.deletions.said is not None:
            self._log_retention.begin(self.deletions.said)
        self.deletions.carry_out()
        self._written = _not_gone(self._on_store.names(), self.deletions.said)

    def load(self, begins: tuple[int, ...], ends: tuple[int, ...]) -> TrainerProgress | None:
        """Load the newest intact checkpoint that is in force according to `steps`, and whose positions lie between
        `begins` and `ends` of `batches`. Return its progress, or None if training begins with version 0. ConfigError if
        training cannot begin there."""
        said = self.deletions.said
        begins = at_least(said.offsets.get("batches", ()) if said is not None else (), begins)
        progress = self._load_newest(self.versions.in_force, begins, ends)
        if progress is not None:
            return progress
        if any(begins):
            since = f" of version {said.version} or above" if said is not None else ""
            raise ConfigError(
                f"trainer: no usable checkpoint, and the batches before {begins} are deleted, expected a checkpoint"
                f"{since} to begin with; put a copy of one back, or begin a new run with model.init_from"
            )
        if self.versions.any_recorded:
            _check_none_lost(self)
            why = "no checkpoint yet (trainer.checkpoint_every)"
            log.warning("%s; training all recorded batches again from version 0", why)
        self.backend.begin_anew()
        return None

    def _load_newest(self, in_force: InForce, begins: tuple[int, ...], ends: tuple[int, ...]) -> TrainerProgress | None:
        """Load the newest intact checkpoint in force for which the log has all later batches (`begins` to `ends` of
        each share). Return its progress; None if there is no such checkpoint."""

        def fits(name: VersionName, state: dict[str, Any]) -> bool:
            positions = TrainerProgress.from_state(state).positions
            if all(begin <= position <= end for begin, position, end in zip(begins, positions, ends, strict=True)):
                return True
            log.warning(
                "checkpoint %d/%d: positions %s lie outside the log (%s to %s); the one before is taken",
                name.trainer_epoch,
                name.version,
                positions,
                begins,
                ends,
            )
            return False

        with self.store.scratch() as folder:
            found = self._on_store.newest(
                lambda name: in_force(name) and not is_gone(name, self.deletions.said), fits, folder=folder
            )
            if found is None:
                return None
            self.backend.load(folder)
            return TrainerProgress.from_state(found[1])

    # ------------------------------------------------------------------------------------------ writing

    def is_due(self, version: int) -> bool:
        """Whether this version needs a checkpoint."""
        return version % self.config.trainer.checkpoint_every == 0

    def has_room(self, version: int, seconds: float) -> bool:
        """Whether this version may be trained: it needs no checkpoint, or no checkpoint is being written. The call
        waits at most the given seconds for the writing to end. There is never more than one unfinished checkpoint, on
        the disk or on its way."""
        if not self.is_due(version):
            return True
        self.look(seconds)
        return not self.is_writing

    def stage(self) -> None:
        """Save the backend's state into a temporary folder. Training has to wait for this."""
        self._staged = self._on_store.stage(self.backend.asked(self.backend.backend.save))

    def begin_write(self, epoch: int, progress: TrainerProgress) -> None:
        """Start to write the staged checkpoint, if there is one. It has the state of `progress`, whose step is on the
        log. Before that the log is made durable up to the positions in the checkpoint."""
        if self._staged is not None and self._writing is None:
            name = progress.name(epoch)
            self.log_.transport.admin.make_durable()
            staged, state, backend = self._staged, progress.to_state(), self.backend.backend
            writing = self.executor.submit(_write_staged, self._on_store, name, staged, state, backend)
            self._writing = name, writing

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._writing is not None

    @property
    def names(self) -> list[VersionName]:
        """The checkpoints that are kept, and the one being written."""
        return [*self.kept, *([self._writing[0]] if self._writing is not None else ())]

    @property
    def kept(self) -> list[VersionName]:
        """The complete checkpoints that are kept, oldest first."""
        return _not_gone(self._written, self.deletions.said)

    def look(self, seconds: float) -> None:
        """Wait at most the given seconds for the checkpoint being written, if there is one. Errors of the writing are
        raised."""
        if self._writing is not None and ends_within(self._writing[1], seconds):
            self._finish()

    def _finish(self) -> None:
        """Wait for the checkpoint being written, if there is one."""
        if self._writing is not None:
            try:
                name, writing = self._writing
                writing.result()
                self._written.append(name)
                self.trim_due = True
            finally:
                self.abandon()

    def abandon(self) -> None:
        """Drop the checkpoint that is not written yet, and wait until the writer has stopped."""
        if self._writing is not None:
            abandon(self._writing[1])
        if self._staged is not None:
            self._staged.drop()
        self._staged, self._writing = None, None

    def write(self, epoch: int, progress: TrainerProgress) -> None:
        """Write a checkpoint of the backend's state, which must be that of `progress`, and wait for it. Do nothing if
        the checkpoint exists."""
        self._finish()
        if progress.name(epoch) not in self.kept:
            if self._staged is None:
                self.stage()
            self.begin_write(epoch, progress)
            self._finish()

    def write_before_leaving(self, epoch: int, progress: TrainerProgress) -> None:
        """Write a checkpoint as `write` does, unless a checkpoint of any epoch holds the same state. If that fails, the
        trainer leaves without one."""
        version = progress.version
        try:
            self._finish()
            if not any(name.version == version and self.versions.in_force(name) for name in self.kept):
                self.write(epoch, progress)
        except (WeightsError, TransportError) as error:
            log.warning("leaves without a checkpoint of version %d: %s", version, error)

    # ------------------------------------------------------------------------------------------ deleting

    def plan(self) -> Trimmed | None:
        """Return the record of the due deletions, which must be committed before them; None if no deletion is due."""
        there, retention = _not_gone(self._on_store.names(), self.deletions.said), self.config.retention
        wanted = list(filter(self.versions.in_force, there))[-self.config.trainer.keep_checkpoints :]
        if not wanted:
            self.trim_due = False
            return None
        precious = self._precious()
        kept = tuple(name for name in there if name in wanted or name in precious)
        now = self.deletions.said or Trimmed(name=wanted[-1], checkpoints=())
        planned = replace(now, name=wanted[-1], checkpoints=kept, trimmed_at=self.clock.now())
        if retention is not None:
            self._log_retention.mark()
            if len(wanted) >= retention.checkpoints:
                planned = self._with_log(planned, wanted[-retention.checkpoints])
        leftovers = self._on_store.older_than(planned.name) - set(kept)
        self.trim_due = bool(leftovers) or planned.offsets != now.offsets
        return planned if self.trim_due else None

    def _with_log(self, planned: Trimmed, oldest: VersionName) -> Trimmed:
        """Return the plan, extended by the parts of the log that a trainer starting from the checkpoint `oldest` does
        not need."""
        try:
            positions = TrainerProgress.from_state(self._on_store.state(oldest)).positions
        except WeightsError as error:
            log.warning("%s; nothing is deleted from the log for now", error)
            return planned
        return self._log_retention.plan(planned, oldest.version, positions)

    def carry_out(self, trimmed: Trimmed) -> None:
        """Delete the objects and records that this record names. The record must be on the log."""
        self.deletions.absorb(trimmed)
        self.deletions.carry_out()
        self.trim_due = False

    def _precious(self) -> set[VersionName]:
        """Return the checkpoints that are kept in addition to the newest: one every `keep_every` versions, and the best
        ones."""
        every, evaluation = self.config.trainer.keep_every, self.config.trainer.keep_best
        names = list(filter(self.versions.in_force, self.kept))
        kept = {name for name in names if every is not None and name.version % every == 0}
        return kept | (self.versions.best_or_due(evaluation, names) if evaluation is not None else set())


def _write_staged(
    store: CheckpointStore, name: VersionName, staged: StagedCheckpoint, state: dict[str, Any], backend: Backend
) -> None:
    """Write a checkpoint whose step is on the log, once the backend has all of it there."""
    if hasattr(backend, "complete"):
        backend.complete(staged.folder)
    store.write_staged(name, staged, state)


def _check_none_lost(checkpoints: Checkpoints) -> None:
    """Raise ConfigError if the store has lost all checkpoints in force, so that all would be trained again. A user who
    wants that goes back to version 0: then none is in force."""
    said, written, version = checkpoints.deletions.said, checkpoints.kept, checkpoints.versions.newest
    named = () if said is None else said.checkpoints
    known = sorted(filter(checkpoints.versions.in_force, {*written, *named}))
    if not version or not (known or not checkpoints.store.list("versions/")):
        return
    expected = "the weights that the log names"
    if known:
        expected = f"one of {', '.join(f'{name.trainer_epoch}/{name.version}' for name in known)}"
    raise ConfigError(
        f"weights.store: {checkpoints.config.weights.store} has no {'usable ' * bool(written)}checkpoint, "
        f"expected {expected} to go on from version {version}; put the store back, or name where it is by "
        "--set weights.store=URL, or have all recorded batches trained again from version 0 by "
        "`rftstream resume RUN --set run.resume=0`"
    )


def _not_gone(names: Iterable[VersionName], said: Trimmed | None) -> list[VersionName]:
    return [name for name in names if not is_gone(name, said)]


# ------------------------------------------------------------------------------------------
#
# The parts of the log that are no longer needed, in a run with [retention].
#
# These are batches before the oldest checkpoint that is kept, and all records of groups that were completed before it.


READERS = {topic: spec.name for spec in (EXPLORER, VERIFIER, BUFFER) for topic in spec.consumes}
"""Topic of the flow -> consumer group that reads it."""

STEPS = TopicPartition("steps", 0)


class LogRetention:
    """The parts of the log that may be deleted, for one epoch of the trainer. Checkpoints makes it and calls `begin`
    once `control` was read. After each checkpoint it calls `mark`, and then `plan` if enough checkpoints are kept."""

    def __init__(self, log_: Log) -> None:
        self._log = log_
        self._completed = CompletedGroups()
        self._read_outcomes: dict[TopicPartition, int] = {}
        self._marks: deque[tuple[int, dict[str, tuple[int, ...]]]] = deque()
        """Pairs of a number of admitted groups and the ends of the flow's topics at that time, oldest first."""
        self._through: Mapping[str, tuple[int, ...]] = {}
        """Ends of the flow's topics at a time when all admitted groups are completed by now."""

    def begin(self, said: Trimmed) -> None:
        """Continue from the counts of groups that a predecessor has recorded."""
        self._completed = CompletedGroups(said.sequence, said.groups, said.rollouts)

    def mark(self) -> None:
        """Note the ends of the flow's topics, and the number of admitted groups.

        The ends are read first. So all records below them belong to groups that the feeder's count, read later,
        includes."""
        ends = {topic: _by_partition(self._log.ends(topic)) for topic in READERS}
        cursor = self._log.committed(FEEDER.name).get(STEPS)
        admitted = json.loads(cursor.metadata)["admitted"] if cursor is not None and cursor.metadata else 0
        self._marks.append((admitted, ends))

    def plan(self, now: Trimmed, version: int, positions: tuple[int, ...]) -> Trimmed:
        """Return the record of deletions so far (`now`), extended by all parts of the log that may be deleted now.

        `version` and `positions` are those of the oldest checkpoint from which a trainer may start."""
        version = max(now.version, version)
        self._complete(version)
        offsets = {"batches": at_least(now.offsets.get("batches", ()), positions)}
        while self._marks and self._marks[0][0] <= self._completed.sequence:
            self._through = self._marks.popleft()[1]
        for topic, ends in self._through.items():
            offsets[topic] = at_least(now.offsets.get(topic, ()), self._as_far_as_read(topic, ends))
        completed = self._completed
        return replace(
            now,
            offsets={**now.offsets, **offsets},
            version=version,
            sequence=completed.sequence,
            groups=dict(completed.groups),
            rollouts=dict(completed.rollouts),
        )

    def _complete(self, version: int) -> None:
        """Read the new outcomes, and determine which groups are completed below this version."""
        for received in self._log.messages("outcomes", start=self._read_outcomes):
            if isinstance(received.message, GroupOutcome):
                self._completed.add(received.message)
            self._read_outcomes[received.record.place] = received.record.offset + 1
            self._completed.advance(version)
        self._completed.advance(version)

    def _as_far_as_read(self, topic: str, offsets: tuple[int, ...]) -> tuple[int, ...]:
        """Return the offsets, each limited to the position that the topic's readers have committed."""
        for reader in (READERS[topic], SYNTHESISER.name):
            committed = self._log.committed(reader)
            low_water = {place: at.offset for place, at in committed.items() if place.topic == topic}
            if low_water:  # a synthesiser reads one topic, if the run has one
                offsets = tuple(min(pair) for pair in zip(offsets, _by_partition(low_water), strict=True))
        return offsets


def at_least(before: tuple[int, ...], offsets: tuple[int, ...]) -> tuple[int, ...]:
    """Return the maximum of each pair of offsets; `offsets` if none were recorded before."""
    return tuple(max(pair) for pair in zip(before, offsets, strict=True)) if before else offsets


def _by_partition(offsets: Mapping[TopicPartition, int]) -> tuple[int, ...]:
    return tuple(offset for _, offset in sorted(offsets.items()))
