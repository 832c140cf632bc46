"""A follower of a trainer's weights determines which version to load, fetches its tensors, and verifies them.

The trainer never waits for a follower. A follower that holds the parent of a version applies the delta. Any other
follower (it is late, it has just started, a delta is gone or damaged) begins with the newest full snapshot and applies
the deltas since then."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping

from rftstream.contracts.summaries import WeightsSummary
from rftstream.contracts.versions import DeltaObject, VersionName, WeightsAnnounced, WeightsKind
from rftstream.errors import StoreRefused, StoreUnreachable, WeightsError
from rftstream.weights.deltas import delta
from rftstream.weights.deltas.delta import text_of
from rftstream.weights.lineage import Lineage
from rftstream.weights.shared_memory import SharedTensors, WeightsMemory
from rftstream.weights.snapshot import RawTensor, decode_snapshot
from rftstream.weights.state import ServedState
from rftstream.weights.stores.anchors import AnchorCache
from rftstream.weights.stores.reading import Allocate, own_memory, read_object, read_objects, side_by_side
from rftstream.weights.stores.store import ObjectStore
from rftstream.weights.version_parts import objects_of

logger = logging.getLogger(__name__)

LOCAL_PASS = 1 / 8
"""Share of a snapshot that can be read from a local disk in the time of applying a delta. From elsewhere the share is
close to 0."""

MAX_GONE = 1_000
"""Most versions that are remembered after their objects were given up, since a reader may still be at one of them."""

Link = tuple[WeightsAnnounced, DeltaObject]
"""A version, and the delta from its parent."""

Known = Mapping[VersionName, WeightsAnnounced]
"""Versions in force, with their announcements."""


class WeightsFollower:
    """The announced versions of a run, and a copy of the model, which is changed in place.

    Its owner (an explorer, an evaluator, a tool) calls `announced` for every announcement in log order, `newest` for
    the version to load, and `fetch` to get it. `fetch` may run in another thread while the other methods are called.
    `held` may only be called when `fetch` has ended."""

    def __init__(
        self,
        store: ObjectStore,
        model: str,
        *,
        cache: AnchorCache | None = None,
        threads: int | None = None,
        shared: bool = False,
        forgets: bool = False,
    ) -> None:
        """`cache` keeps the newest full snapshot for the next start. `threads` is the number of threads that apply
        deltas; all cores by default. With `shared` the copy of the model is in memory that other processes can read,
        and tensors are SharedTensors. With `forgets`, versions whose objects were given up long ago are forgotten: a
        worker does not need them, and a run may be long."""
        self._store, self._model, self._cache, self._threads = store, model, cache, threads
        self._memory = WeightsMemory() if shared else None
        self._lineage = Lineage()
        self._announced: dict[VersionName, WeightsAnnounced] = {}
        self._forgets = forgets
        self._gone: deque[VersionName] = deque()
        """Versions whose objects were given up and that are still remembered, oldest first."""
        self._state: ServedState | None = None
        self._held: VersionName | None = None
        self._told: VersionName | None = None
        self.num_refused = 0
        """Number of refused announcements: of a replaced trainer, of another model, out of order, or after a gap."""

    def fresh(self) -> WeightsFollower:
        """Return a new, empty follower of the same store and model."""
        shared = self._memory is not None
        return WeightsFollower(
            self._store,
            self._model,
            cache=self._cache,
            threads=self._threads,
            shared=shared,
            forgets=self._forgets,
        )

    # ------------------------------------------------------------------------------------------ announcements

    def begin(self, summary: WeightsSummary) -> None:
        """Begin after the records of a summary, with a full snapshot. Called before any announcement."""
        runs = [run for run in summary.versions if run.model == self._model]
        if runs:
            newest = max(runs, key=lambda run: run.trainer_epoch)
            self._lineage.start(VersionName(trainer_epoch=newest.trainer_epoch, version=newest.first))

    def announced(self, message: WeightsAnnounced) -> bool:
        """Add a version. Return False if the announcement is refused."""
        problem = self._check(message)
        if problem:
            self.num_refused += 1
            logger.warning("weights: version %s refused: %s", text_of(message.name), problem)
            return False
        if message.name.trainer_epoch > self._lineage.epoch:
            self._lineage.start(message.name)
            self._announced = {n: m for n, m in self._announced.items() if self._lineage.in_force(n)}
        self._announced[message.name] = message
        if self._forgets:
            self._gone.extend(message.gone)
            while len(self._gone) > MAX_GONE:
                self._announced.pop(self._gone.popleft(), None)
        return True

    def newest(self) -> WeightsAnnounced | None:
        """Return the version to load now; None before the first announcement."""
        return next(reversed(self._announced.values()), None)

    def find(self, name: VersionName) -> WeightsAnnounced | None:
        """Return the announcement of a version; None if it is not in force."""
        return self._announced.get(name)

    def in_force(self) -> tuple[WeightsAnnounced, ...]:
        """Return all versions in force, oldest first."""
        return tuple(self._announced.values())

    def available(self) -> tuple[WeightsAnnounced, ...]:
        """Return the versions in force that can be made from the objects in the store, oldest first."""
        there = set(self._store.list("versions/"))
        found: dict[VersionName, WeightsAnnounced] = {}
        for announcement in self._announced.values():
            way = _delta_of(announcement)
            whole = announcement.kind is WeightsKind.full and _are_in(there, announcement)
            if whole or (way is not None and _are_in(there, way) and way.parent in found):
                found[announcement.name] = announcement
        return tuple(found.values())

    def _check(self, message: WeightsAnnounced) -> str | None:
        if message.model != self._model:
            return f"of model {message.model!r}, expected {self._model!r}"
        epoch = self._lineage.epoch
        if not self._lineage.accepts(message.name.trainer_epoch):
            return f"its trainer was replaced by epoch {epoch}"
        newest = self.newest()
        if newest and message.name.trainer_epoch == epoch and message.name.version <= newest.name.version:
            return f"not newer than {text_of(newest.name)}"
        if message.parent is not None and message.parent not in self._announced:
            return f"a delta of {text_of(message.parent)}, which is not known; waiting for a full snapshot"
        if message.name.trainer_epoch > epoch and not message.resumed:
            logger.warning("weights: %s is the first of its trainer but not its anchor", text_of(message.name))
        return None

    # ------------------------------------------------------------------------------------------ tensors

    def fetch(self, announcement: WeightsAnnounced) -> Mapping[str, RawTensor]:
        """Return the tensors of a version, with all digests verified. They are views of memory that the next call
        changes.

        WeightsGone if an object was deleted, WeightsError if an object is damaged. `held` then tells the version that
        was reached."""
        known = self._announced  # entries are only added; a new trainer starts a new mapping
        state = self._follow_from_held(announcement, known)
        if state is None:
            anchor, links = _links_from_anchor(announcement, known)
            state = self._follow(self._state_at(anchor), links)
        return self._tensors_of(state)

    def held(self) -> tuple[VersionName, Mapping[str, RawTensor]] | None:
        """Return the version of the copy, and its tensors; None if there is none."""
        if self._state is None or self._held is None:
            return None
        return self._held, self._tensors_of(self._state)

    def _tensors_of(self, state: ServedState) -> Mapping[str, RawTensor]:
        return state.tensors if self._memory is None else SharedTensors(state.tensors, self._memory, state.digests())

    def _follow_from_held(self, target: WeightsAnnounced, known: Known) -> ServedState | None:
        """Return the state of a version, made from the held state. None if that is impossible, or if a full snapshot is
        cheaper than the deltas."""
        state = self._state
        if state is None:
            return None
        links = self._links_from_held(state.digest(), target, known)
        if links is None:
            return None
        try:
            return self._follow(state, links)
        except (StoreUnreachable, StoreRefused):
            raise  # the snapshot is in the same store, and the held state is still usable
        except WeightsError as error:
            logger.warning("%s; going back to a full snapshot", error)
            return None

    def _state_at(self, anchor: WeightsAnnounced) -> ServedState:
        """Return the state of an anchor: the held state if it is that anchor, otherwise the snapshot."""
        state = self._state
        if state is not None and self._held == anchor.name and state.digest() == anchor.weights_digest:
            return state
        del state  # `_load` frees the memory of the held state
        return self._load(anchor)

    def _links_from_held(self, digest: str, target: WeightsAnnounced, known: Known) -> list[Link] | None:
        """Return the deltas from the held state to a version, oldest first; None if a full snapshot is cheaper.

        The held state is identified by its digest, since a new trainer's anchor is often the state that is already
        held."""
        links: list[Link] = []
        snapshot, cost = 0, 0.0  # size of the newest full snapshot, and total cost of the deltas so far
        one: WeightsAnnounced | None = target
        while one is not None:
            if one.weights_digest == digest:
                self._held = one.name
                return links[::-1]
            way = _delta_of(one)
            if one.kind is WeightsKind.full and not snapshot:
                snapshot = one.num_bytes
            if way is None:
                return None
            if snapshot:
                cost += way.num_bytes + (LOCAL_PASS * snapshot if self._store.is_local else 0)
                if cost > snapshot:
                    return None
            links.append((one, way))
            one = known.get(way.parent)
        return None

    def _follow(self, state: ServedState, links: list[Link]) -> ServedState:
        if not links:
            return state
        stops = [(self._held, state.digest()), *((one.name, one.weights_digest) for one, _ in links)]
        read: list[WeightsAnnounced] = []
        self._held = None
        try:
            if any(way.parts for _, way in links):
                self._apply_parts(state, links)
            else:
                delta.apply_chain(state, self._read_links(links, read))
        except WeightsError:
            name, digest = stops[max(len(read) - 1, 0)]  # the version before the refused delta
            self._held = name if state.digest() == digest else None
            raise
        self._held = links[-1][0].name
        return state

    def _apply_parts(self, state: ServedState, links: list[Link]) -> None:
        """Apply deltas in parts. Each part has a chain of its own, from version to version. All parts are fetched side
        by side, and applied in order as they arrive."""
        target = links[-1][0]
        if len({len(objects_of(way)) for _, way in links}) > 1:
            raise WeightsError(f"weights {text_of(target.name)}: deltas in different numbers of parts; expected one")
        jobs = (
            functools.partial(self._read_link, announcement, way, part)
            for part in range(len(links[0][1].parts))
            for announcement, way in links
        )
        with contextlib.closing(side_by_side(jobs)) as deltas:
            for data, where in deltas:
                header, _ = delta.read_header(data, where=where)
                rest = itertools.islice(deltas, len(links) - 1)
                delta.apply_chain(state.part(header.tensors), itertools.chain([(data, where)], rest))
        if (found := state.digest()) != target.weights_digest:
            raise WeightsError(f"weights {text_of(target.name)}: made {found}, expected {target.weights_digest}")

    def _read_links(self, links: list[Link], read: list[WeightsAnnounced]) -> Iterator[tuple[memoryview, str]]:
        """Yield the announced deltas with verified digests, and add each announcement to `read` when its delta is
        begun."""
        for announcement, way in links:
            read.append(announcement)
            yield self._read_link(announcement, way)

    def _read_link(self, announcement: WeightsAnnounced, way: DeltaObject, part: int = 0) -> tuple[memoryview, str]:
        stored = objects_of(way)[part]
        where = f"weights {text_of(announcement.name)} ({stored.object})"
        data = read_object(self._store, self._cache, stored, where=where)
        header, _ = delta.read_header(data, where=where)
        new = header.new if way.parts else announcement.weights_digest  # of the whole: compared at the end
        expected = (self._model, announcement.name, way.parent, new)
        if (header.model, header.name, header.parent, header.new) != expected:
            raise WeightsError(
                f"{where}: says it is {header.model} {text_of(header.name)} after {text_of(header.parent)} with state "
                f"{header.new}, expected {self._model} {text_of(announcement.name)} after {text_of(way.parent)} with "
                f"{announcement.weights_digest}; it is another version's"
            )
        return data, where

    def _load(self, anchor: WeightsAnnounced) -> ServedState:
        where = f"weights {text_of(anchor.name)} ({anchor.object})"
        self._state = self._held = None  # free it before the next one is read
        if anchor.name != self._told:  # an object that the store lacks is tried again each second
            logger.info(
                "reads the full snapshot of version %s, %s", text_of(anchor.name), f"{anchor.num_bytes:,} bytes"
            )
            self._told = anchor.name
        changing: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        allocate: Allocate = own_memory
        if self._memory is not None:
            changing, allocate = self._memory.changing, self._memory.allocate
        with changing():
            views = read_objects(self._store, self._cache, objects_of(anchor), where=where, allocate=allocate)
        tensors = {name: one for view in views for name, one in decode_snapshot(view, where=where).items()}
        state = ServedState(tensors, copy=False, threads=self._threads, changing=changing)
        if (found := state.digest()) != anchor.weights_digest:
            raise WeightsError(f"{where}: state {found}, expected {anchor.weights_digest}; it is another state")
        self._state, self._held = state, anchor.name
        return state


def _links_from_anchor(target: WeightsAnnounced, known: Known) -> tuple[WeightsAnnounced, list[Link]]:
    links: list[Link] = []
    one = target
    while one.kind is not WeightsKind.full:
        way = _delta_of(one)
        assert way is not None
        links.append((one, way))
        parent = known.get(way.parent)
        if parent is None:
            raise WeightsError(
                f"weights {text_of(target.name)}: its parent {text_of(way.parent)} is not in force; expected all "
                "versions back to a full snapshot; waiting for the next one"
            )
        one = parent
    return one, links[::-1]


def _delta_of(announcement: WeightsAnnounced) -> DeltaObject | None:
    """Return the delta from a version's parent to it; None for an anchor without a delta."""
    if announcement.parent is None:
        return announcement.delta
    return DeltaObject(
        parent=announcement.parent,
        object=announcement.object,
        num_bytes=announcement.num_bytes,
        digest=announcement.digest,
        parts=announcement.parts,
    )


def _are_in(there: set[str], announced: WeightsAnnounced | DeltaObject) -> bool:
    return all(one.object in there for one in objects_of(announced))
