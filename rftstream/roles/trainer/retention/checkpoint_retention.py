"""What of a run the trainer keeps: its checkpoints, and with [retention] the records that somebody may still need.

Nothing is deleted before the log says so, durably. A `Trimmed` record names what goes; it is committed like a step,
which a trainer that was replaced cannot do; and whoever chooses what to begin with looks at the newest one first. The
deletion itself is done by TrimmedDeletions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from rftstream.clock import Clock
from rftstream.config.sections import RunConfig
from rftstream.contracts.control import Trimmed
from rftstream.contracts.versions import VersionName
from rftstream.errors import ConfigError, WeightsError
from rftstream.roles.trainer.progress import TrainerProgress
from rftstream.roles.trainer.retention.log_retention import LogRetention, at_least
from rftstream.roles.trainer.retention.trimmed_deletions import TrimmedDeletions
from rftstream.service.role import Log
from rftstream.weights.checkpoints import CheckpointStore, StagedCheckpoint, is_gone
from rftstream.weights.stores.store import ObjectStore

log = logging.getLogger(__name__)

InForce = Callable[[VersionName], bool]


class CheckpointRetention:
    """The checkpoints that are kept, and the deletions that they allow, for one epoch of the trainer. The step makes it
    at each recovery and calls `begin` once when `control` was read. CheckpointCycle calls the rest: `newest` and `read`
    to begin with a checkpoint, `stage`, `begin_write` and `note` to make one, and `plan` afterwards to see what
    goes."""

    def __init__(
        self, config: RunConfig, store: ObjectStore, clock: Clock, deletions: TrimmedDeletions, log_: Log
    ) -> None:
        self._retention = config.retention
        self._keep = config.trainer.keep_checkpoints
        self._store, self._checkpoints = store, CheckpointStore(store)
        self._clock = clock
        self._deletions = deletions
        self._log = log_
        self._log_retention = LogRetention(log_)
        self._names: list[VersionName] = []

    def begin(self) -> None:
        """Repeat the deletions that a predecessor may have left undone, and list the checkpoints."""
        if self._deletions.said is not None:
            self._log_retention.begin(self._deletions.said)
        self._deletions.carry_out()
        self._names = self._there()

    @property
    def names(self) -> list[VersionName]:
        """The checkpoints that are kept, oldest first."""
        return [name for name in self._names if not is_gone(name, self._deletions.said)]

    def load_newest(
        self, in_force: InForce, begins: tuple[int, ...], ends: tuple[int, ...], load: Callable[[Path], None]
    ) -> TrainerProgress | None:
        """Hand the files of the newest good checkpoint in force after which the log has all batches, `begins` to `ends`
        of each share, to `load`, in a temporary folder. Return its progress; None if there is no such; ConfigError if
        training cannot begin without one, either."""
        said = self._deletions.said
        begins = at_least(said.offsets.get("batches", ()) if said is not None else (), begins)

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

        with self._store.scratch() as folder:
            found = self._checkpoints.newest(
                lambda name: in_force(name) and not is_gone(name, said), fits, folder=folder
            )
            if found is not None:
                load(folder)
                return TrainerProgress.from_state(found[1])
        if any(begins):
            since = f" of version {said.version} or above" if said is not None else ""
            raise ConfigError(
                f"trainer: no usable checkpoint, and the batches before {begins} are deleted, expected a checkpoint"
                f"{since} to begin with; put a copy of one back, or begin a new run with model.init_from"
            )
        return None

    def stage(self, save: Callable[[Path], None]) -> StagedCheckpoint:
        """Have the files of a checkpoint saved into a temporary folder, and return them."""
        return self._checkpoints.stage(save)

    def begin_write(
        self, name: VersionName, staged: StagedCheckpoint, state: dict[str, Any], executor: Executor
    ) -> Future[None]:
        """Begin to write a checkpoint in the thread of `executor`; return its end. The log is made durable first, up to
        the positions that the checkpoint names."""
        self._log.transport.admin.make_durable()
        return executor.submit(self._checkpoints.write_staged, name, staged, state)

    def note(self, name: VersionName) -> None:
        """Note that this checkpoint is written."""
        self._names.append(name)

    def plan(self, also: Collection[VersionName], in_force: InForce) -> Trimmed | None:
        """Return the record of deletions after a checkpoint; None if there is nothing to delete. `also`: checkpoints
        that are kept beside the newest ones."""
        there = self._there()
        wanted = [name for name in there if in_force(name)][-self._keep :]
        if not wanted:
            return None
        kept = tuple(name for name in there if name in {*wanted, *also})
        now = self._deletions.said or Trimmed(name=wanted[-1], checkpoints=())
        planned = replace(now, name=wanted[-1], checkpoints=kept, trimmed_at=self._clock.now())
        if self._retention is not None:
            self._log_retention.mark()
            if len(wanted) >= self._retention.checkpoints:
                planned = self._with_log(planned, wanted[-self._retention.checkpoints])
        leftovers = self._checkpoints.older_than(planned.name) - set(kept)
        return planned if leftovers or planned.offsets != now.offsets else None

    def _with_log(self, planned: Trimmed, oldest: VersionName) -> Trimmed:
        """Return the plan with the parts of the log that a trainer starting from the checkpoint `oldest` no longer
        needs."""
        try:
            positions = TrainerProgress.from_state(self._checkpoints.state(oldest)).positions
        except WeightsError as error:
            log.warning("%s; nothing is deleted from the log for now", error)
            return planned
        return self._log_retention.plan(planned, oldest.version, positions)

    def _there(self) -> list[VersionName]:
        """Return the complete checkpoints that are not recorded as deleted."""
        return [name for name in self._checkpoints.names() if not is_gone(name, self._deletions.said)]
