"""Checkpoints of one trainer: which one it starts from, when one is written, and what is deleted afterwards."""

from __future__ import annotations

import logging
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

from rftstream.config.role_sections import TrainerSection
from rftstream.contracts.control import Trimmed
from rftstream.contracts.versions import VersionName
from rftstream.errors import TransportError, WeightsError
from rftstream.roles.trainer.backend_thread import BackendThread
from rftstream.roles.trainer.pending_update import abandon, ends_within
from rftstream.roles.trainer.progress import TrainerProgress
from rftstream.roles.trainer.retention.checkpoint_retention import CheckpointRetention
from rftstream.roles.trainer.retention.trimmed_deletions import TrimmedDeletions
from rftstream.roles.trainer.versions import Versions
from rftstream.weights.checkpoints import StagedCheckpoint

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class CheckpointCycle:
    """The checkpoints of one epoch of the trainer. The step makes it at each recovery and calls `load` once. Before a
    version it asks `has_room`. Where `is_due` says so it calls `stage` before the next update begins, and `begin_write`
    when the version's step is on the log. It calls `look` in each slice. Once the checkpoint is written `trim_due`
    holds, until `plan` has nothing to say, or what it said is on the log and `carry_out` was called. When the run ends
    it calls `write`, when the process leaves `write_before_leaving`, and `abandon` at last."""

    retention: CheckpointRetention
    deletions: TrimmedDeletions
    versions: Versions
    backend: BackendThread
    settings: TrainerSection
    executor: Executor
    """Executor with one thread, in which checkpoints are written."""
    trim_due: bool = field(default=False, init=False)
    """Whether a checkpoint was written whose deletions are not recorded and carried out yet."""
    _staged: StagedCheckpoint | None = field(default=None, init=False)
    """Checkpoint that was saved last and is not on the store yet."""
    _writing: tuple[VersionName, Future[None]] | None = field(default=None, init=False)
    """Name of the checkpoint being written, and the future of the writing; None if none is written."""

    def load(self, begins: tuple[int, ...], ends: tuple[int, ...]) -> TrainerProgress | None:
        """Load the newest good checkpoint that is in force by `steps`, and whose positions lie between `begins` and
        `ends` of `batches`. Return its progress, or None if training begins with version 0."""
        progress = self.retention.load_newest(self.versions.in_force, begins, ends, self.backend.load)
        if progress is not None:
            return progress
        if self.versions.any_recorded:
            log.warning("no usable checkpoint; training all recorded batches again from version 0")
        self.backend.begin_anew()
        return None

    def is_due(self, version: int) -> bool:
        """Whether a checkpoint is to be made of this version."""
        return version % self.settings.checkpoint_every == 0

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
        self._staged = self.retention.stage(self.backend.asked(self.backend.backend.save))

    def begin_write(self, epoch: int, progress: TrainerProgress) -> None:
        """Begin to write the staged checkpoint, if there is one. It has the state of `progress`, whose step is on the
        log."""
        if self._staged is not None and self._writing is None:
            name = progress.name(epoch)
            writing = self.retention.begin_write(name, self._staged, progress.to_state(), self.executor)
            self._writing = name, writing

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._writing is not None

    @property
    def names(self) -> list[VersionName]:
        """The checkpoints that are kept, and the one being written."""
        return [*self.retention.names, *([self._writing[0]] if self._writing is not None else ())]

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
                self.retention.note(name)
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
        if progress.name(epoch) not in self.retention.names:
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
            if not any(name.version == version and self.versions.in_force(name) for name in self.retention.names):
                self.write(epoch, progress)
        except (WeightsError, TransportError) as error:
            log.warning("leaves without a checkpoint of version %d: %s", version, error)

    def plan(self) -> Trimmed | None:
        """Return the record of the deletions that are due, which is written before them; None if none are due."""
        trimmed = self.retention.plan(self._precious(), self.versions.in_force)
        if trimmed is None:
            self.trim_due = False
        return trimmed

    def carry_out(self, trimmed: Trimmed) -> None:
        """Delete what this record names. It is on the log."""
        self.deletions.absorb(trimmed)
        self.deletions.carry_out()
        self.trim_due = False

    def _precious(self) -> set[VersionName]:
        """Return the checkpoints that are kept beside the newest: one every `keep_every` versions, and the best."""
        every, evaluation = self.settings.keep_every, self.settings.keep_best
        if every is None and evaluation is None:
            return set()
        names = list(filter(self.versions.in_force, self.retention.names))
        kept = {name for name in names if every is not None and name.version % every == 0}
        return kept | (self.versions.best_or_due(evaluation, names) if evaluation is not None else set())
