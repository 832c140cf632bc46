"""The publisher writes a version's objects, makes them durable, and returns the announcement.

A version is published as the difference from the previous version (delta.py). At intervals it is also published as an
anchor, a full snapshot, which needs no other object. A follower that has the parent uses the delta; others begin with
an anchor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from rftstream import faults
from rftstream.contracts.versions import DeltaObject, VersionName, WeightsAnnounced, WeightsKind
from rftstream.weights.deltas import delta, kernels
from rftstream.weights.snapshot import RawTensor, write_snapshot
from rftstream.weights.state import ServedState
from rftstream.weights.stores.store import ObjectStore, StoredObject

log = logging.getLogger(__name__)

Fault = Callable[[str], None]
"""Called with the name of a point at which a fault test may stop."""

SUFFIXES = {WeightsKind.full: ".safetensors", WeightsKind.delta: ".delta"}


def object_name(name: VersionName, kind: WeightsKind = WeightsKind.full) -> str:
    """Return the name of a version's object in the store."""
    return f"versions/{name.stem}{SUFFIXES[kind]}"


def object_names(name: VersionName) -> list[str]:
    """Return the names of all objects that a version may have in the store."""
    return [object_name(name, kind) for kind in SUFFIXES]


def parse_object_name(text: str) -> VersionName | None:
    """Return the version to which an object belongs; None if the name is not a version's."""
    folder, _, rest = text.partition("/")
    stem, dot, suffix = rest.rpartition(".")
    is_ours = folder == "versions" and f"{dot}{suffix}" in SUFFIXES.values()
    return VersionName.of_stem(stem) if is_ours else None


@dataclass(frozen=True, slots=True)
class StagedVersion:
    """A version whose weights `take` has copied, and that `write` has still to write."""

    name: VersionName
    resumed: bool
    anchor: bool
    parent: VersionName | None
    changes: delta.Changes | None
    """Changes since the parent; None without a parent."""


class WeightsPublisher:
    """The publisher of a trainer. It holds the weights of the newest published version.

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
    ) -> None:
        """`anchor_every` is the number of versions from one full snapshot to the next; with 1 there are no deltas.
        `threads` is the number of threads that make deltas; all cores by default."""
        self._store, self._model, self._dtype = store, model, dtype
        self._anchor_every, self._threads, self._fault = anchor_every, threads, fault
        if anchor_every > 1 and (problem := kernels.why_not()):
            log.warning("weights are published in full, without deltas: %s", problem)
            self._anchor_every = 1
        self._state: ServedState | None = None
        self._written: VersionName | None = None
        """The version that the state holds, if that version is in the store."""
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
        """Copy the weights, requesting each tensor once. The tensors may change when this returns."""
        parent, self._written = self._written, None
        if parent is None or resumed or self._state is None or self._anchor_every == 1:
            self._state = None  # free it before the next one is made
            self._state = ServedState(tensors, copy=True, threads=self._threads)
            return StagedVersion(name, resumed, True, None, None)
        changes = delta.take(self._state, tensors)
        return StagedVersion(name, resumed, self._since_anchor + 1 >= self._anchor_every, parent, changes)

    def write(self, taken: StagedVersion) -> WeightsAnnounced:
        """Put the version into the store, and return its announcement. The version is durable when this returns.

        The caller adds the time and the versions that are gone. It commits the announcement, and then deletes the
        latter."""
        state = self._state
        assert state is not None, "`take` comes first"  # a field of StagedVersion would keep it in memory
        found = self._write_delta(taken, state)
        if found is None or taken.anchor:
            metadata = {
                "model": self._model,
                "trainer_epoch": str(taken.name.trainer_epoch),
                "version": str(taken.name.version),
            }
            tensors = state.tensors
            stored = self._store.write(object_name(taken.name), lambda file: write_snapshot(file, tensors, metadata))
            kind, parent = WeightsKind.full, None
            name, num_bytes, digest = stored.name, stored.num_bytes, stored.digest
            self._chain = [stored]
            self._fault("object_written")
        else:
            kind, parent = WeightsKind.delta, found.parent
            name, num_bytes, digest, found = found.object, found.num_bytes, found.digest, None
            self._chain.append(StoredObject(name=name, num_bytes=num_bytes, digest=digest))
        announced = WeightsAnnounced(
            model=self._model,
            name=taken.name,
            kind=kind,
            parent=parent,
            object=name,
            num_bytes=num_bytes,
            digest=digest,
            weights_digest=state.digest(),
            dtype=self._dtype,
            resumed=taken.resumed,
            delta=found,
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

    def _write_delta(self, taken: StagedVersion, state: ServedState) -> DeltaObject | None:
        """Write the delta; None if there is no parent, or if the delta would be no smaller than the weights."""
        changes, parent = taken.changes, taken.parent
        if changes is None or parent is None or (parts := changes.parts) is None:
            return None
        head = delta.head_of(
            changes, [part for part, _ in parts], state, model=self._model, name=taken.name, parent=parent
        )
        data = [head, *(stream for _, stream in parts)]
        if sum(memoryview(one).nbytes for one in data) >= sum(map(len, state.arrays.values())):
            return None
        stored = self._store.write(
            object_name(taken.name, WeightsKind.delta), lambda file: [file.write(one) for one in data]
        )
        self._fault("object_written")
        return DeltaObject(parent=parent, object=stored.name, num_bytes=stored.num_bytes, digest=stored.digest)


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
