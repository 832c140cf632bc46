"""Writers of versions: they hold the newest weights, and write a version's objects into the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from rftstream.contracts.versions import VersionName, WeightsKind
from rftstream.weights.deltas import delta
from rftstream.weights.snapshot import Line, RawTensor, write_snapshot
from rftstream.weights.state import ServedState
from rftstream.weights.stores.store import ObjectStore, StoredObject
from rftstream.weights.version_parts import object_name


class VersionWriter(Protocol):
    """Writes versions for a `WeightsPublisher`: all in one process (PartWriter), or a part in each of the processes
    that train together.

    For each version the publisher calls `take`, then `write` once or twice, and `lines`, the latter from any thread. An
    error makes the held weights unusable: the next `take` gets no parent."""

    def take(self, tensors: Mapping[str, RawTensor], name: VersionName, *, parent: VersionName | None) -> None:
        """Copy the weights of a version, and note what changed since its parent. Without a parent begin anew.

        Each tensor is requested at most once. The tensors may change when this returns."""

    def write(self, kind: WeightsKind) -> Sequence[StoredObject] | None:
        """Write the objects of one kind, and return them in order once they are durable. None for a delta that would be
        no smaller than the weights."""

    def lines(self) -> Sequence[Line]:
        """Return the lines of all tensors of the version, sorted by name."""


class PartWriter:
    """Holds and writes all tensors of a version, or those of one part: a VersionWriter in one process."""

    def __init__(self, store: ObjectStore, model: str, *, threads: int | None = None, part: int | None = None) -> None:
        """`threads` is the number of threads that make deltas; all cores by default. `part` is the number of the part;
        None if there is only one object."""
        self.store = store
        self._model, self._threads, self._part = model, threads, part
        self._state: ServedState | None = None
        self._name = VersionName(trainer_epoch=0, version=0)
        self._parent: VersionName | None = None
        self._changes: delta.Changes | None = None

    def take(self, tensors: Mapping[str, RawTensor], name: VersionName, *, parent: VersionName | None) -> None:
        """Copy the weights, as `VersionWriter` describes it."""
        self._name, self._parent, self._changes = name, parent, None
        if parent is None or self._state is None:
            self._state = self._parent = None  # free it before the next one is made
            self._state = ServedState(tensors, copy=True, threads=self._threads)
        else:
            self._changes = delta.take(self._state, tensors)

    def write(self, kind: WeightsKind) -> list[StoredObject] | None:
        """Write the object of one kind."""
        state = self._held()
        name = object_name(self._name, kind, self._part)
        if kind is WeightsKind.full:
            metadata = {
                "model": self._model,
                "trainer_epoch": str(self._name.trainer_epoch),
                "version": str(self._name.version),
            }
            return [self.store.write(name, lambda file: write_snapshot(file, state.tensors, metadata))]
        changes, parent = self._changes, self._parent
        if changes is None or parent is None or (parts := changes.parts) is None:
            return None
        head = delta.head_of(
            changes, [part for part, _ in parts], state, model=self._model, name=self._name, parent=parent
        )
        data = [head, *(stream for _, stream in parts)]
        if sum(memoryview(one).nbytes for one in data) >= sum(map(len, state.arrays.values())):
            return None
        return [self.store.write(name, lambda file: [file.write(one) for one in data])]

    def lines(self) -> list[Line]:
        """Return the lines of the held tensors."""
        return self._held().lines()

    def _held(self) -> ServedState:
        assert self._state is not None, "`take` comes first"
        return self._state
