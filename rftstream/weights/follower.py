"""Following a trainer's weights: which version to be on, and its tensors, checked.

The trainer never waits for a follower. One that is late just takes the newest version; one whose object has been
deleted meanwhile (WeightsGone) asks again for the newest.
"""

from __future__ import annotations

import hashlib
import logging

from rftstream.errors import WeightsError
from rftstream.messages import VersionName, WeightsAnnounced, WeightsKind
from rftstream.weights.lineage import Lineage
from rftstream.weights.snapshot import RawTensor, decode_snapshot, state_digest
from rftstream.weights.store import ObjectStore

logger = logging.getLogger(__name__)


class WeightsFollower:
    """Told of every announcement in log order by `announced`."""

    def __init__(self, store: ObjectStore, model: str) -> None:
        self._store = store
        self._model = model
        self._lineage = Lineage()
        self._announced: dict[VersionName, WeightsAnnounced] = {}
        self.num_refused = 0
        """Announcements of a replaced trainer, of another model, or out of order."""

    def fresh(self) -> WeightsFollower:
        """One that knows nothing yet, of the same store and model."""
        return WeightsFollower(self._store, self._model)

    def announced(self, message: WeightsAnnounced) -> bool:
        """Takes note of a version; False if the announcement is refused."""
        problem = self._check(message)
        if problem:
            self.num_refused += 1
            logger.warning("weights: version %s refused: %s", _text(message.name), problem)
            return False
        if message.name.trainer_epoch > self._lineage.epoch:
            self._lineage.start(message.name)
            self._announced = {n: m for n, m in self._announced.items() if self._lineage.in_force(n)}
        self._announced[message.name] = message
        return True

    def newest(self) -> WeightsAnnounced | None:
        """The version to be on now; None before the first announcement."""
        return next(reversed(self._announced.values()), None)

    def find(self, name: VersionName) -> WeightsAnnounced | None:
        """The announcement of a version, if it is in force."""
        return self._announced.get(name)

    def in_force(self) -> tuple[WeightsAnnounced, ...]:
        """All versions in force, oldest first."""
        return tuple(self._announced.values())

    def fetch(self, announcement: WeightsAnnounced) -> dict[str, RawTensor]:
        """The tensors, all digests verified. WeightsGone if the object was deleted, WeightsError if it is damaged."""
        where = f"weights {_text(announcement.name)} ({announcement.object})"
        if announcement.kind is not WeightsKind.full:
            raise WeightsError(f"{where}: is a {announcement.kind}, expected a full snapshot; update this worker")
        data = self._store.get(announcement.object)
        if len(data) != announcement.num_bytes:
            raise WeightsError(f"{where}: found {len(data)} bytes, expected {announcement.num_bytes}; it is damaged")
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        if digest != announcement.digest:
            raise WeightsError(f"{where}: digest {digest}, expected {announcement.digest}; it is damaged")
        tensors = decode_snapshot(data, where=where)
        state = state_digest(tensors)
        if state != announcement.weights_digest:
            raise WeightsError(f"{where}: state {state}, expected {announcement.weights_digest}; it is another state")
        return tensors

    def _check(self, message: WeightsAnnounced) -> str | None:
        if message.model != self._model:
            return f"of model {message.model!r}, expected {self._model!r}"
        epoch = self._lineage.epoch
        if not self._lineage.accepts(message.name.trainer_epoch):
            return f"its trainer was replaced by epoch {epoch}"
        newest = self.newest()
        if newest and message.name.trainer_epoch == epoch and message.name.version <= newest.name.version:
            return f"not newer than {_text(newest.name)}"
        if message.name.trainer_epoch > epoch and not message.resumed:
            logger.warning("weights: %s is the first of its trainer but not its anchor", _text(message.name))
        return None


def _text(name: VersionName) -> str:
    return f"{name.trainer_epoch}/{name.version}"
