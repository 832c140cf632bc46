"""A version of the weights from the backend to its object: taken while training waits, written beside it."""

from __future__ import annotations

import time
from collections.abc import Collection

from rftstream import metrics
from rftstream.clock import Clock
from rftstream.contracts.versions import VersionName, WeightsAnnounced
from rftstream.models.spec import ModelSpec
from rftstream.roles.trainer import TRAINER
from rftstream.roles.trainer.backend_thread import BackendThread
from rftstream.roles.trainer.versions import Versions
from rftstream.weights.publisher import StagedVersion, WeightsPublisher
from rftstream.weights.store import ObjectStore


class VersionPublisher:
    """Makes the objects of versions, for one epoch of the trainer. The step makes it at each recovery; for each version
    that is published it calls `take`, then `write`, and puts the announcement on the log."""

    def __init__(
        self,
        model: ModelSpec,
        *,
        anchor_every: int,
        backend: BackendThread,
        versions: Versions,
        store: ObjectStore,
        clock: Clock,
    ) -> None:
        self._publisher = WeightsPublisher(
            store, model.name, model.dtype, anchor_every=anchor_every, threads=model.threads
        )
        self._backend = backend
        self._versions = versions
        self._store = store
        self._clock = clock
        self._began = 0.0

    def take(self, name: VersionName, *, resumed: bool = False) -> StagedVersion:
        """Take the weights from the backend: the part that training has to wait for."""

        def take() -> StagedVersion:
            return self._publisher.take(self._backend.backend.served_tensors(), name, resumed=resumed)

        self._began = time.perf_counter()
        taken = self._backend.asked(take)()
        metrics.HELD_UP_SECONDS.labels(TRAINER.name).observe(time.perf_counter() - self._began)
        return taken

    def write(self, taken: StagedVersion, kept_checkpoints: Collection[VersionName]) -> WeightsAnnounced:
        """Write the object of the version that was taken last; return the announcement, which also names what goes."""
        announced = self._publisher.write(
            taken,
            announced_at=self._clock.now(),
            gone=lambda parent: self._versions.to_delete(self._store, taken.name, kept_checkpoints, parent),
        )
        metrics.WEIGHTS_SECONDS.labels(TRAINER.name).observe(time.perf_counter() - self._began)
        return announced

    def check_back(self) -> None:
        """Raise WeightsGone if the newest version is not there any more, WeightsError if the store does not say."""
        self._publisher.check_back()
