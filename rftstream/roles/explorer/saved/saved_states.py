"""Large states of environments: objects of the run's store, each referred to by one piece on `partials`.

    states/RUN/PARTITION/ROLLOUT_ID/WRITER-NUMBER-SHA256

An object is durable before the piece that refers to it is committed. Its name belongs to one state of one process, so
no process writes an object again that another process may be about to delete. These objects are deleted:

- a rollout's states that a newer one replaces, when the newer state's piece is on the log;
- all states of a rollout, when its record is on the log;
- orphans: states that killed explorers left for rollouts without pieces. The owner of a partition lists its objects
  when the partition comes. An explorer that stood still may unknowingly list objects that its successor has just
  written. So listed objects are deleted only after a later rollout of the partition is on the log: that commit proves
  that the explorer still owned the partition.

The log is made durable before any deletion. So after a power failure no piece returns whose object is gone."""

from __future__ import annotations

import hashlib
import itertools
import logging
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

from rftstream.clock import Clock
from rftstream.contracts.rollouts import StoredState
from rftstream.errors import TransportError, WeightsError, WeightsGone
from rftstream.weights.stores.store import ObjectStore

log = logging.getLogger(__name__)

FOLDER = "states"
"""Folder of the states in the store."""
LARGE_BYTES = 64 << 10
"""Size in bytes above which a state becomes an object of the store."""
DELETE_EVERY_S = 1.0
"""Seconds between two deletions, since each one makes the log durable."""


@dataclass(frozen=True, slots=True)
class RolloutStates:
    """The stored states of one rollout. `SavedStates.of` makes it. Its methods may be called from any thread."""

    states: SavedStates
    folder: str
    """Folder of the rollout's objects, ending with a slash."""

    def is_large(self, state: bytes) -> bool:
        """Return whether a state is too large for a piece."""
        return len(state) > LARGE_BYTES

    def put(self, state: bytes) -> StoredState:
        """Write a state into the store."""
        return self.states.put(self.folder, state)

    def get(self, stored: StoredState) -> bytes:
        """Read a state. WeightsGone if the object is missing or was changed."""
        data = self.states.store.get(stored.object)
        digest = _digest(data)
        if digest != stored.digest:
            raise WeightsGone(f"{stored.object}: digest {digest}, expected {stored.digest}; it is damaged")
        return data


@dataclass(slots=True)
class _Partition:
    """The saved states of one partition since this explorer owns it."""

    listing: Future[list[str] | None] | None
    """Listing of the objects in the partition when it came; None once it was processed."""
    live: set[str] | None = None
    """Folders of rollouts whose pieces refer to objects, collected when the first task came and since then; None
    before."""
    orphans: list[str] = field(default_factory=list)
    """Objects that no piece refers to. They are deleted once one of the `proofs` is on the log."""
    proofs: set[int] = field(default_factory=set)
    """Items that finished after the orphans were found."""


class SavedStates:
    """The large states of the rollouts in an explorer's partitions. `workers/explorer.py` makes it. Only the explorer's
    step calls it:

    - `forget` when partitions come, `begins` for each task, `dropped` for lost tasks;
    - `of` for a rollout that is sampled, `saving` when a piece refers to a state;
    - `finishing` when records are returned, and `committed` when they are on the log;
    - `poll` in each slice, `close` at the end.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        run_id: str,
        process: str,
        clock: Clock,
        executor: Executor,
        make_durable: Callable[[], None],
    ) -> None:
        """`process` is a name that no other living process has. `executor` has one thread, which lists and deletes
        objects. `make_durable` makes the log durable."""
        self.store = store
        self._clock, self._executor, self._make_durable = clock, executor, make_durable
        self._folder = f"{FOLDER}/{run_id}/"
        self._writer = hashlib.sha256(f"{process} {clock.now()!r}".encode()).hexdigest()[:12]
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._known: dict[str, list[str]] = {}
        """Folder of a rollout -> its objects in order: first those found in the store, then those written here."""
        self._partitions: dict[int, _Partition] = {}
        self._items: dict[int, tuple[int, str]] = {}
        """Item in hand -> its partition, and the folder of its rollout."""
        self._saving: dict[int, StoredState] = {}
        """Item -> the state to which a piece refers that is not yet committed."""
        self._condemned: list[str] = []
        """Objects to be deleted."""
        self._delete_at = clock.now()
        self._deletions: list[Future[None]] = []

    # ------------------------------------------------------------------------------------------ in any thread

    def put(self, folder: str, state: bytes) -> StoredState:
        """Write a state into a rollout's folder. WeightsError if the store refuses it."""
        digest = _digest(state)
        name = f"{folder}{self._writer}-{next(self._numbers)}-{digest.removeprefix('sha256:')}"
        with self._lock:
            self._known.setdefault(folder, []).append(name)
        self.store.put(name, state)
        return StoredState(object=name, num_bytes=len(state), digest=digest)

    # ------------------------------------------------------------------------------------------ the step's side

    def of(self, partition: int, rollout_id: str) -> RolloutStates:
        """Return the store for a rollout's states."""
        return RolloutStates(self, self._folder_of(partition, rollout_id))

    def forget(self, partitions: Collection[int]) -> None:
        """Record that these partitions have come. Earlier knowledge about them is dropped as possibly outdated."""
        for partition in partitions:
            folder = f"{self._folder}{partition}/"
            with self._lock:
                for name in [name for name in self._known if name.startswith(folder)]:
                    del self._known[name]
            self._partitions[partition] = _Partition(self._executor.submit(self._list, folder))

    def begins(self, item: int, partition: int, rollout_id: str, live: Callable[[], Iterable[str]]) -> None:
        """Record that a task was begun. `live` returns the rollouts of the partition that have pieces."""
        known = self._partitions.get(partition)
        if known is not None and known.live is None:
            known.live = {self._folder_of(partition, name) for name in live()}
        self._items[item] = partition, self._folder_of(partition, rollout_id)

    def dropped(self, items: Iterable[int]) -> None:
        """Forget items that are no longer in hand. Their next owner manages their states."""
        for item in items:
            self._saving.pop(item, None)
            if (found := self._items.pop(item, None)) is not None:
                with self._lock:
                    self._known.pop(found[1], None)

    def saving(self, item: int, stored: StoredState) -> None:
        """Record that a piece with this state is being committed."""
        self._saving[item] = stored
        partition, folder = self._items[item]
        if (known := self._partitions.get(partition)) is not None and known.live is not None:
            known.live.add(folder)

    def finishing(self, items: Iterable[int]) -> None:
        """Record that the records of these items are returned now."""
        for item in items:
            known = self._partitions.get(self._items[item][0]) if item in self._items else None
            if known is not None and known.orphans:
                known.proofs.add(item)

    def committed(self, saved: Collection[int], finished: Collection[int]) -> None:
        """Record that the pieces of `saved` and the records of `finished` are on the log."""
        for item in saved:
            if (stored := self._saving.pop(item, None)) is not None and item in self._items:
                self._supersede(self._items[item][1], stored.object)
        for item in finished:
            self._saving.pop(item, None)
            if (found := self._items.pop(item, None)) is None:
                continue
            partition, folder = found
            with self._lock:
                self._condemned += self._known.pop(folder, [])
            known = self._partitions.get(partition)
            if known is not None and item in known.proofs:
                self._condemned += known.orphans
                known.orphans, known.proofs = [], set()

    def poll(self) -> None:
        """Process finished listings, and delete objects that may be deleted."""
        for known in self._partitions.values():
            if known.listing is not None and known.live is not None and known.listing.done():
                names, known.listing = known.listing.result(), None
                if names:
                    self._listed(names, known)
        self._deletions = [deletion for deletion in self._deletions if not deletion.done()]
        if self._condemned and self._clock.now() >= self._delete_at:
            self._delete()

    def close(self) -> None:
        """Delete objects that may be deleted, and stop."""
        try:
            if self._condemned:
                self._delete()
        except TransportError as error:
            log.warning("the log cannot be made durable: %s; large states stay in the store", error)
        for deletion in self._deletions:
            deletion.result()
        self._executor.shutdown(cancel_futures=True)

    # ------------------------------------------------------------------------------------------ inside

    def _folder_of(self, partition: int, rollout_id: str) -> str:
        return f"{self._folder}{partition}/{rollout_id}/"

    def _listed(self, names: Iterable[str], known: _Partition) -> None:
        """Sort the listed objects of a new partition. The objects of a rollout with pieces are kept until that rollout
        ends."""
        assert known.live is not None
        with self._lock:
            for name in names:
                folder = name.rpartition("/")[0] + "/"
                here = self._known.get(folder, [])
                if name in here:  # it was written here after the listing
                    continue
                if folder in known.live:
                    self._known[folder] = [name, *here]
                else:
                    known.orphans.append(name)

    def _supersede(self, folder: str, name: str) -> None:
        """Mark the rollout's objects before this one for deletion."""
        with self._lock:
            names = self._known.get(folder, [])
            if name in names:
                older, self._known[folder] = names[: names.index(name)], names[names.index(name) :]
                self._condemned += older

    def _delete(self) -> None:
        self._make_durable()
        names, self._condemned = self._condemned, []
        self._delete_at = self._clock.now() + DELETE_EVERY_S
        self._deletions.append(self._executor.submit(self._delete_now, names))

    def _delete_now(self, names: Iterable[str]) -> None:
        for name in names:
            try:
                self.store.delete(name)
            except WeightsError as error:
                log.warning("large states cannot be deleted: %s; the next owner of the partition tries again", error)
                return

    def _list(self, folder: str) -> list[str] | None:
        try:
            return self.store.list(folder)
        except WeightsError as error:
            log.warning("%s: cannot be listed: %s; what killed explorers left there stays", folder, error)
            return None


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
