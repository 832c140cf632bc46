"""Checkpoints of one trainer: which one it starts from, when one is written, and what may be deleted afterwards.

Nothing is deleted before the log says so, durably. A `Trimmed` record names what goes; it is committed like a step,
which a trainer that was replaced cannot do; and whoever chooses what to begin with looks at the newest one first. The
deletion itself is done by TrimmedDeletions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from typing import Any

from rftstream.clock import Clock
from rftstream.config.sections import RunConfig
from rftstream.contracts.control import Trimmed
from rftstream.contracts.versions import VersionName
from rftstream.errors import ConfigError, TransportError, WeightsError
from rftstream.roles.trainer.backend_thread import BackendThread
from rftstream.roles.trainer.pending_update import abandon, ends_within
from rftstream.roles.trainer.progress import TrainerProgress
from rftstream.roles.trainer.retention.log_retention import LogRetention, at_least
from rftstream.roles.trainer.retention.trimmed_deletions import TrimmedDeletions
from rftstream.roles.trainer.versions import Versions
from rftstream.service.role import Log
from rftstream.weights.checkpoints import CheckpointStore, StagedCheckpoint, is_gone
from rftstream.weights.stores.store import ObjectStore

log = logging.getLogger(__name__)

InForce = Callable[[VersionName], bool]


@dataclass(eq=False, slots=True)
class Checkpoints:
    """The checkpoints of one epoch of the trainer. The step makes it at each recovery, and calls `begin` once `control`
    was read, then `load`. Before a version it asks `has_room`. Where `is_due` says so it calls `stage` before the next
    update begins, and `begin_write` when the version's step is on the log. It calls `look` in each slice. Once the
    checkpoint is written `trim_due` holds, until `plan` has nothing to say, or what it said is on the log and
    `carry_out` was called. When the run ends it calls `write`, when the process leaves `write_before_leaving`, and
    `abandon` at last."""

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
    """Whether a checkpoint was written whose deletions are not recorded and carried out yet."""
    _written: list[VersionName] = field(default_factory=list, init=False)
    """Complete checkpoints, oldest first."""
    _staged: StagedCheckpoint | None = field(default=None, init=False)
    """Checkpoint that was saved last and is not on the store yet."""
    _writing: tuple[VersionName, Future[None]] | None = field(default=None, init=False)
    """Name of the checkpoint being written, and the future of the writing; None if none is written."""
    _on_store: CheckpointStore = field(init=False)
    _log_retention: LogRetention = field(init=False)

    def __post_init__(self) -> None:
        self._on_store, self._log_retention = CheckpointStore(self.store), LogRetention(self.log_)

    # ------------------------------------------------------------------------------------------ beginning

    def begin(self) -> None:
        """Repeat the deletions that a predecessor may have left undone, and list the checkpoints."""
        if self.deletions.said is not None:
            self._log_retention.begin(self.deletions.said)
        self.deletions.carry_out()
        self._written = _not_gone(self._on_store.names(), self.deletions.said)

    def load(self, begins: tuple[int, ...], ends: tuple[int, ...]) -> TrainerProgress | None:
        """Load the newest good checkpoint that is in force by `steps`, and whose positions lie between `begins` and
        `ends` of `batches`. Return its progress, or None if training begins with version 0; ConfigError if it cannot
        begin there."""
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
            log.warning("no usable checkpoint; training all recorded batches again from version 0")
        self.backend.begin_anew()
        return None

    def _load_newest(self, in_force: InForce, begins: tuple[int, ...], ends: tuple[int, ...]) -> TrainerProgress | None:
        """Load the newest good checkpoint in force after which the log has all batches, `begins` to `ends` of each
        share. Return its progress; None if there is no such."""

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
        """Whether a checkpoint is to be made of this version."""
        return version % self.config.trainer.checkpoint_every == 0

    def has_room(self, version: int, seconds: float) -> bool:
        """Whether this version may be trained: it needs no checkpoint, or no checkpoint is being written. The call
        waits at most the given seconds for the writing to end. There is never more than one, on the disk or on its
        way."""
        if not self.is_due(version):
            return True
        self.look(seconds)
        return not self.is_writing

    def stage(self) -> None:
        """Save the backend's state into a temporary folder. Training has to wait for this."""
        self._staged = self._on_store.stage(self.backend.asked(self.backend.backend.save))

    def begin_write(self, epoch: int, progress: TrainerProgress) -> None:
        """Begin to write the staged checkpoint, if there is one. It has the state of `progress`, whose step is on the
        log. The log is made durable first, up to the positions that the checkpoint names."""
        if self._staged is not None and self._writing is None:
            name = progress.name(epoch)
            self.log_.transport.admin.make_durable()
            writing = self.executor.submit(self._on_store.write_staged, name, self._staged, progress.to_state())
            self._writing = name, writing

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._writing is not None

    @property
    def names(self) -> list[VersionName]:
        """The checkpoints that are kept, and the one being written."""
        return [*self._kept, *([self._writing[0]] if self._writing is not None else ())]

    @property
    def _kept(self) -> list[VersionName]:
        return _not_gone(self._written, self.deletions.said)

    def look(self, seconds: float) -> None:
        """Wait at most the given seconds for the checkpoint that is being written, if there is one. Raises the error of
        its writing."""
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
        """Give up the checkpoint that is not written yet, and wait until the writer has stopped."""
        if self._writing is not None:
            abandon(self._writing[1])
        if self._staged is not None:
            self._staged.drop()
        self._staged, self._writing = None, None

    def write(self, epoch: int, progress: TrainerProgress) -> None:
        """Write a checkpoint of the backend's state, which is that of `progress`, to its end, unless there is one."""
        self._finish()
        if progress.name(epoch) not in self._kept:
            if self._staged is None:
                self.stage()
            self.begin_write(epoch, progress)
            self._finish()

    def write_before_leaving(self, epoch: int, progress: TrainerProgress) -> None:
        """Write a checkpoint as `write` does, unless one of any epoch holds the same state. If that fails the trainer
        leaves without one."""
        version = progress.version
        try:
            self._finish()
            if not any(name.version == version and self.versions.in_force(name) for name in self._kept):
                self.write(epoch, progress)
        except (WeightsError, TransportError) as error:
            log.warning("leaves without a checkpoint of version %d: %s", version, error)

    # ------------------------------------------------------------------------------------------ deleting

    def plan(self) -> Trimmed | None:
        """Return the record of the deletions that are due, which is written before them; None if none are due."""
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
        """Return the plan with the parts of the log that a trainer starting from the checkpoint `oldest` no longer
        needs."""
        try:
            positions = TrainerProgress.from_state(self._on_store.state(oldest)).positions
        except WeightsError as error:
            log.warning("%s; nothing is deleted from the log for now", error)
            return planned
        return self._log_retention.plan(planned, oldest.version, positions)

    def carry_out(self, trimmed: Trimmed) -> None:
        """Delete what this record names. It is on the log."""
        self.deletions.absorb(trimmed)
        self.deletions.carry_out()
        self.trim_due = False

    def _precious(self) -> set[VersionName]:
        """Return the checkpoints that are kept beside the newest: one every `keep_every` versions, and the best."""
        every, evaluation = self.config.trainer.keep_every, self.config.trainer.keep_best
        names = list(filter(self.versions.in_force, self._kept))
        kept = {name for name in names if every is not None and name.version % every == 0}
        return kept | (self.versions.best_or_due(evaluation, names) if evaluation is not None else set())


def _not_gone(names: Iterable[VersionName], said: Trimmed | None) -> list[VersionName]:
    return [name for name in names if not is_gone(name, said)]
