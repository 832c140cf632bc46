"""Publishes a version: its weights are taken from the backend while training waits, and another thread writes its
object."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from concurrent.futures import Executor, Future
from dataclasses import replace

from rftstream import metrics
from rftstream.backends.numerics import computed_with
from rftstream.clock import Clock
from rftstream.config.loader import to_toml
from rftstream.config.sections import RunConfig
from rftstream.contracts.versions import StepRecord, VersionName, WeightsAnnounced
from rftstream.errors import WeightsError, WeightsGone
from rftstream.models.spec import ModelSpec
from rftstream.roles.trainer.backend_thread import BackendThread
from rftstream.roles.trainer.progress import TrainerProgress
from rftstream.roles.trainer.versions import Versions
from rftstream.service.role import Publish
from rftstream.weights.publisher import StagedVersion, WeightsPublisher
from rftstream.weights.stores.store import ObjectStore

log = logging.getLogger(__name__)

LOOK_BACK_S = 60.0
"""Seconds without a batch after which the trainer checks that its newest weights still exist, since without them no
batch will come. Each further check comes after twice as long."""


class VersionPublisher:
    """Makes the objects of versions, for one epoch of the trainer. The step makes it at each recovery, and calls
    `anchor` first. For each published version it calls `take`, then `begin_write`, and after that it commits the
    `announcement`. While there is nothing to train it calls `look_back` in each slice. It calls `noted` after each
    commit."""

    def __init__(
        self,
        model: ModelSpec,
        *,
        anchor_every: int,
        backend: BackendThread,
        versions: Versions,
        store: ObjectStore,
        clock: Clock,
        executor: Executor,
    ) -> None:
        """`executor` has one thread, which writes objects."""
        self._model = model
        make_writer = getattr(backend.backend, "version_writer", None)
        self._publisher = WeightsPublisher(
            store,
            model.name,
            model.dtype,
            anchor_every=anchor_every,
            threads=model.threads,
            writer=None if make_writer is None else make_writer(store),
        )
        self._backend = backend
        self._versions = versions
        self._store = store
        self._clock = clock
        self._executor = executor
        self._began = 0.0
        """Time when the last version was taken, by `time.perf_counter`."""
        self._look_back_after_s = LOOK_BACK_S

    def anchor(
        self, epoch: int, progress: TrainerProgress, config: RunConfig, kept_checkpoints: Collection[VersionName]
    ) -> tuple[Publish, ...]:
        """Return the records of the state from which this epoch starts, after its object is written: a full snapshot,
        and a step that trained nothing."""
        name = progress.name(epoch)
        announced = self.announcement(self.begin_write(self.take(name, resumed=True)), kept_checkpoints)
        record = StepRecord(
            name=name,
            batch_sequence=None,
            positions=progress.positions,
            trained_groups=progress.trained_groups,
            trained_rollouts=progress.trained_rollouts,
            weights_digest=announced.weights_digest,
            metrics={},
            resumed=True,
            recorded_at=self._clock.stamp(),
            config=to_toml(config),
            computed_with=computed_with(self._model.device, self._model.threads),
            totals=progress.totals,
        )
        return Publish("weights", 0, announced), Publish("steps", 0, record)

    def take(self, name: VersionName, *, resumed: bool = False) -> StagedVersion:
        """Take the weights from the backend. Training has to wait for this part."""

        def take() -> StagedVersion:
            return self._publisher.take(self._backend.backend.served_tensors(), name, resumed=resumed)

        self._began = time.perf_counter()
        taken = self._backend.asked(take)()
        metrics.TRAINING_HELD_UP_SECONDS.observe(time.perf_counter() - self._began)
        return taken

    def begin_write(self, taken: StagedVersion) -> Future[WeightsAnnounced]:
        """Start to write the object of the version that was taken last. Return the future for `announcement`."""
        return self._executor.submit(self._publisher.write, taken)

    def announcement(
        self, writing: Future[WeightsAnnounced], kept_checkpoints: Collection[VersionName]
    ) -> WeightsAnnounced:
        """Return the announcement of a version, which also names the versions whose objects are no longer needed. Wait
        for the end of the writing if necessary. Errors of the writing are raised."""
        announced = writing.result()
        metrics.WEIGHTS_PUBLISH_SECONDS.observe(time.perf_counter() - self._began)
        gone = self._versions.to_delete(self._store, announced.name, kept_checkpoints, announced.parent)
        return replace(announced, announced_at=self._clock.stamp(), gone=gone)

    def look_back(self, idle_s: float) -> None:
        """Check that the newest version still exists, if nothing was trained for a while.

        Explorers that cannot fetch it stay on older weights, while the batches that this trainer waits for may require
        newer ones. A trainer cannot announce a version twice, but a trainer that starts over announces an anchor.
        WeightsGone if the newest version is missing, so that the trainer must start over."""
        if idle_s < self._look_back_after_s:
            return
        self._look_back_after_s *= 2
        try:
            self._publisher.check_back()
        except WeightsGone as error:
            raise WeightsGone(
                f"{error}; explorers cannot follow: the trainer begins anew, with a full snapshot"
            ) from error
        except WeightsError as error:
            log.warning("%s; looking again later", error)

    def noted(self) -> None:
        """Record a commit, after which the next check of `look_back` is due soon again."""
        self._look_back_after_s = LOOK_BACK_S
