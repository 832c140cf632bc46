"""The publisher writes a version's objects, makes them durable, and returns the announcement.

A version is published as the difference from the previous version (delta.py). At intervals it is also published as an
anchor, a full snapshot, which needs no other object. A follower that has the parent uses the delta; others begin with
an anchor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rftstream import faults
from rftstream.contracts.versions import DeltaObject, VersionName, WeightsAnnounced, WeightsKind
from rftstream.weights.deltas import kernels
from rftstream.weights.snapshot import RawTensor, digest_of_lines
from rftstream.weights.stores.store import ObjectStore, StoredObject
from rftstream.weights.version_parts import joined
from rftstream.weights.writer import PartWriter, VersionWriter

log = logging.getLogger(__name__)

Fault = Callable[[str], None]
"""Called with the name of a point at which a fault test may stop."""


@dataclass(frozen=True, slots=True)
class StagedVersion:
    """A version whose weights `take` has copied, and that `write` has still to write."""

    name: VersionName
    resumed: bool
    anchor: bool
    parent: VersionName | None


class WeightsPublisher:
    """The publisher of a trainer. It decides what is written of each version, and says what to announce.

    For each version the trainer calls `take`, which is the only part that delays training. Then it calls `write`, from
    any thread, before the next `take`. After an error the next version is an anchor."""

    def __init__(
        self,
        store: ObjectStore,
        model: str,
        dtype: str,
        *,
        anchor_every: int = 1,
        threads: int | None = None,
        fault: Fault = faults.at,
        writer: VersionWriter | None = None,
    ) -> None:
        """`anchor_every` is the number of versions from one full snapshot to the next; with 1 there are no deltas.
        `threads` is the number of threads that make deltas; all cores by default. `writer` writes the objects into
        `store`, in parts; by default this process writes them, one for each version."""
        self._store, self._model, self._dtype = store, model, dtype
        self._anchor_every, self._fault = anchor_every, fault
        if anchor_every > 1 and (problem := kernels.why_not()):
            log.warning("weights are published in full, without deltas: %s", problem)
            self._anchor_every = 1
        self._writer = writer or PartWriter(store, model, threads=threads)
        self._written: VersionName | None = None
        """The version that the writer holds, if that version is in the store."""
        self._since_anchor = 0
        self._chain: list[StoredObject] = []
        """The objects from which the newest version is made: the newest full snapshot, and the deltas since."""
        self._read_back: set[str] = set()

    def publish(
        self,
        tensors: Mapping[str, RawTensor],
        name: VersionName,
        *,
        resumed: bool = False,
        announced_at: float = 0.0,
    ) -> WeightsAnnounced:
        """Call `take` and `write` for a version; their conditions hold."""
        return replace(self.write(self.take(tensors, name, resumed=resumed)), announced_at=announced_at)

    def take(self, tensors: Mapping[str, RawTensor], name: VersionName, *, resumed: bool = False) -> StagedVersion:
        """Copy the weights, requesting each tensor at most once. The tensors may change when this returns."""
        parent, self._written = self._written, None
        if resumed or self._anchor_every == 1:
            parent = None
        self._writer.take(tensors, name, parent=parent)
        is_due = parent is None or self._since_anchor + 1 >= self._anchor_every
        return StagedVersion(name, resumed, is_due, parent)

    def write(self, taken: StagedVersion) -> WeightsAnnounced:
        """Put the version into the store, and return its announcement. All of its objects are durable when this
        returns.

        The caller adds the time and the versions that are gone. It commits the announcement, and then deletes the
        latter."""
        found: DeltaObject | None = None
        kind, parent = WeightsKind.delta, taken.parent
        written = None if parent is None else self._write(kind)
        if parent is not None and written is not None:
            one, parts = joined(taken.name, written)
            found = DeltaObject(
                parent=parent, object=one.object, num_bytes=one.num_bytes, digest=one.digest, parts=parts
            )
        if written is None or taken.anchor:
            kind, parent = WeightsKind.full, None
            self._chain, written = [], self._write(kind)
            assert written is not None, "there is always a snapshot"
        one, parts = joined(taken.name, written)
        self._chain.extend(written)
        announced = WeightsAnnounced(
            model=self._model,
            name=taken.name,
            kind=kind,
            parent=parent,
            object=one.object,
            num_bytes=one.num_bytes,
            digest=one.digest,
            parts=parts,
            weights_digest=digest_of_lines(self._writer.lines()),
            dtype=self._dtype,
            resumed=taken.resumed,
            delta=found if kind is WeightsKind.full else None,
        )
        self._since_anchor = 0 if kind is WeightsKind.full else self._since_anchor + 1
        self._written = taken.name
        return announced

    def check_back(self) -> None:
        """Check that all objects of the newest version are in the store.

        WeightsGone if an object is missing or short, or has other bytes; the bytes are checked only the first time.
        WeightsError if the store does not answer."""
        for stored in self._chain:
            self._store.check(stored, read=stored.name not in self._read_back)
            self._read_back.add(stored.name)

    def _write(self, kind: WeightsKind) -> Sequence[StoredObject] | None:
        written = self._writer.write(kind)
        if written is not None:
            self._fault("object_written")
        return written


def publish(
    store: ObjectStore,
    tensors: Mapping[str, RawTensor],
    name: VersionName,
    model: str,
    dtype: str,
    *,
    resumed: bool = False,
    announced_at: float = 0.0,
) -> WeightsAnnounced:
    """Publish a single version in full, with a publisher of its own."""
    return WeightsPublisher(store, model, dtype).publish(tensors, name, resumed=resumed, announced_at=announced_at)
