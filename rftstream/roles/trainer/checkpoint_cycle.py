"""Checkpoints of one trainer: which one it starts from, when one is written, and what is deleted afterwards."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from rftstream.config.role_sections import TrainerSection
from rftstream.contracts.control import Trimmed
from rftstream.contracts.versions import VersionName
from rftstream.errors import TransportError, WeightsError
from rftstream.roles.trainer.backend_thread import BackendThread
from rftstream.roles.trainer.checkpoint_retention import CheckpointRetention
from rftstream.roles.trainer.progress import TrainerProgress
from rftstream.roles.trainer.trimmed_deletions import TrimmedDeletions
from rftstream.roles.trainer.versions import Versions
from rftstream.weights.store import ObjectStore

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class CheckpointCycle:
    """The checkpoints of one epoch of the trainer. The step makes it at each recovery and calls `load` once. Whenever
    `is_due` says so it calls `write`; from then on `trim_due` holds until `plan` has nothing to say, or what it said
    is on the log and `carry_out` was called. When the process leaves it calls `write_before_leaving`."""

    retention: CheckpointRetention
    deletions: TrimmedDeletions
    versions: Versions
    backend: BackendThread
    store: ObjectStore
    settings: TrainerSection
    trim_due: bool = field(default=False, init=False)
    """Whether a checkpoint was written, and what goes since then is not said and deleted yet."""

    def load(self, begins: tuple[int, ...], ends: tuple[int, ...]) -> TrainerProgress | None:
        """Load the newest good checkpoint that is in force by `steps`, and whose positions lie between `begins` and
        `ends` of `batches`. Return its progress, or None if training begins with version 0."""
        found = self.retention.newest(self.versions.in_force, begins, ends)
        if found is not None:
            name, progress = found
            with self.store.scratch() as folder:
                self.retention.read(name, folder)
                self.backend.load(folder)
            return progress
        if self.versions.any_recorded:
            log.warning("no usable checkpoint; training all recorded batches again from version 0")
        self.backend.begin_anew()
        return None

    def is_due(self, progress: TrainerProgress) -> bool:
        """Whether a checkpoint is to be made of this version."""
        return progress.version % self.settings.checkpoint_every == 0

    def write(self, epoch: int, progress: TrainerProgress) -> None:
        """Write a checkpoint of the backend's state, which is that of `progress`, unless there is one."""
        name = VersionName(trainer_epoch=epoch, version=progress.version)
        if name not in self.retention.names:
            self.retention.write(name, self.backend.asked(self.backend.backend.save), progress.to_state())
            self.trim_due = True

    def write_before_leaving(self, epoch: int, progress: TrainerProgress) -> None:
        """Write a checkpoint as `write` does, unless one of any epoch holds the same state. If that fails the trainer
        leaves without one."""
        version = progress.version
        if any(name.version == version and self.versions.in_force(name) for name in self.retention.names):
            return
        try:
            self.write(epoch, progress)
        except (WeightsError, TransportError) as error:
            log.warning("leaves without a checkpoint of version %d: %s", version, error)

    def plan(self) -> Trimmed | None:
        """Return what is to be said before anything goes, or None if nothing does."""
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
