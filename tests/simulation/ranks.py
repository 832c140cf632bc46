"""Runs whose trainer is several ranks, each of which publishes its part of a version; and what goes wrong between
two parts.

Beside the faults of any simulated run, by the seed: a rank dies before it has written its part; the trainer is killed
between two parts, and its ranks write on, so that an old part comes late; and those who read see a part some time after
the announcement that names it, as on a file system that others have in their caches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from random import Random
from unittest.mock import patch

from rftstream.backends.fake import FakeBackend
from rftstream.config import loader
from rftstream.config.sections import RunConfig
from rftstream.contracts.versions import VersionName, WeightsKind
from rftstream.errors import BackendError, WeightsError
from rftstream.policies.fake import FakePolicy
from rftstream.testing import Simulation
from rftstream.testing.faults import Kill
from rftstream.weights.snapshot import RawTensor, state_digest
from rftstream.weights.stores.store import ObjectStore, StoredObject
from rftstream.weights.writer import PartWriter
from tests.part_writers import PartWriters

DIED, KILLED, TOO_LATE, SEEN_LATE = "dead ranks", "kills between parts", "parts of dead trainers", "parts seen late"

UNSEEN_S = 12.0
"""Most seconds after which everybody sees an object."""


def with_ranks(config: RunConfig, seed: object) -> RunConfig:
    """The run with a model of a few tensors, so large that some versions are deltas, in all of their parts."""
    own, fake = Random(f"ranks {seed}"), dict(config.backends["fake"])
    fake |= {"fillers": own.randint(2, 5), "elements": own.choice([64, 8192, 8192])}
    return loader.replace(
        config, backends={**config.backends, "fake": fake}, weights__anchor_every=own.choice([2, 3, 4, 20])
    )


class SimulatedRanks:
    """The ranks of all trainers of a run, and their faults."""

    def __init__(self, simulation: Simulation, seed: object, *, calm: bool) -> None:
        self._simulation = simulation
        self._random = Random(f"faults of ranks {seed}")
        self.num_ranks = self._random.randint(2, 3)
        share = self._random.choice([0.03, 0.1, 0.3])
        self._shares = {} if calm else {DIED: share, KILLED: share, TOO_LATE: 0.7, SEEN_LATE: share}
        most = self._random.randint
        self._most = {DIED: most(0, 3), KILLED: most(0, 5), TOO_LATE: 10, SEEN_LATE: most(0, 20)}
        self._seen_from: dict[str, float] = {}
        self.happened: Counter[str] = Counter()

    @contextmanager
    def playing(self, digest_of: Callable[[VersionName], str]) -> Iterator[None]:
        """What is loaded meanwhile is checked: who samples has all of a version, and nothing of another.

        `digest_of`: returns the digest of an announced version."""
        load = FakePolicy.load

        def checked(policy: FakePolicy, tensors: Mapping[str, RawTensor], name: VersionName) -> None:
            if tensors:  # the laws have a policy without weights
                found, expected = state_digest(tensors), digest_of(name)
                assert found == expected, f"loaded as {name}: {found}, expected {expected}"
            load(policy, tensors, name)

        def writer(backend: FakeBackend, store: ObjectStore) -> RankWriters:
            return RankWriters(self, store, backend._spec.name)

        self._simulation.store.is_hidden = self._is_hidden
        with (
            patch.object(FakeBackend, "version_writer", writer, create=True),
            patch.object(FakePolicy, "load", checked),
        ):
            yield

    def order(self) -> list[int]:
        """In which the ranks are done this time."""
        return self._random.sample(range(self.num_ranks), self.num_ranks)

    def befalls(self, what: str) -> bool:
        """Whether it happens now. A trainer whose ranks die for ever would get nowhere."""
        happens = self._random.random() < self._shares.get(what, 0.0) and self.happened[what] < self._most[what]
        self.happened[what] += happens
        return happens

    def later(self, task: Callable[[], object]) -> None:
        """Of a rank that nobody has told yet that its trainer is dead."""
        self._simulation.at(3 * self._random.random(), task)

    def written(self, objects: Sequence[StoredObject]) -> None:
        """Some of them are seen late by all who have not written them."""
        for one in objects:
            if self.befalls(SEEN_LATE):
                self._seen_from[one.name] = self._simulation.clock.now() + UNSEEN_S * self._random.random()

    def _is_hidden(self, name: str) -> bool:
        ticking = self._simulation.faults.current
        is_other = ticking is not None and ticking.role != "trainer"
        return is_other and self._seen_from.get(name, 0.0) > self._simulation.clock.now()


class RankWriters(PartWriters):
    """Writes a trainer's versions, as RanksWriter does: a VersionWriter."""

    def __init__(self, ranks: SimulatedRanks, store: ObjectStore, model: str) -> None:
        super().__init__(store, ranks.num_ranks, model)
        self._ranks = ranks

    def write(self, kind: WeightsKind) -> list[StoredObject] | None:
        found: dict[int, list[StoredObject] | None] = {}
        order = self._ranks.order()
        for rank in order:
            if rank and self._ranks.befalls(DIED):
                raise BackendError(f"simulated: rank {rank} has died")
            try:
                if found and self._ranks.befalls(KILLED):
                    raise Kill("between two parts")
                found[rank] = self.parts[rank].write(kind)
            except Kill:
                self._write_on([self.parts[other] for other in order if other and other not in found], kind)
                raise
        if any(one is None for one in found.values()):
            return None
        written = [stored for _, one in sorted(found.items()) for stored in one or ()]
        self._ranks.written(written)
        return written

    def _write_on(self, parts: Sequence[PartWriter], kind: WeightsKind) -> None:
        for part in parts:
            if self._ranks.befalls(TOO_LATE):

                def write(part: PartWriter = part) -> None:
                    with suppress(WeightsError):
                        part.write(kind)

                self._ranks.later(write)
