"""A soak in simulated time: all roles in one process, a manual clock, and a log in memory that deletes.

The log keeps for good what happened (outcomes, steps, ...). That grows with the run, here as objects of this process.
So memory is counted without the log: in objects of Python that are no parts of records."""

from __future__ import annotations

import gc
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from unittest.mock import patch

import psutil

from rftstream.config import loader
from rftstream.contracts.records import Record
from rftstream.contracts.topics import TOPICS
from rftstream.contracts.versions import VersionName
from rftstream.roles.explorer import step as explorer
from rftstream.testing import Simulation
from rftstream.testing.memory_run import START_TIME_S
from tests.soak.series import Limit, Series

HOUR_S = 3600.0

TRIMMED = ("tasks", "rollouts", "verified", "batches")

OF_RECORDS = (Record, tuple, VersionName)
"""Types of objects that the log is made of, and of which each version has one in the memory of those who know it. Each
follower of weights also has an announcement a version, which counts."""

LOOK_S = 1.0
"""Explorers look at their samplers so often. With the 0.05 s that they have elsewhere, nine of ten ticks are looks."""

KILLS_PER_HOUR = 4
MAX_TICKS = 10**9

LIMITS = {
    "objects": Limit(1000.0, share=0.02),
    "records": Limit(20.0, share=0.2),
    "objects of the store": Limit(1.0, share=0.2),
    "KiB of the store": Limit(20.0, share=0.2),
}

SETTINGS = {
    "run": {"name": "soak", "steps": 1_000_000},
    "model": {"path": "fake"},
    "tasksets": {"sums": {"source": "arithmetic"}},
    "feeder": {"groups_per_batch": 3, "group_size": 3, "max_staleness": 1},
    "explorer": {"count": 2, "policy": "fake", "partial_every_s": 60.0},
    "verifier": {"count": 2},
    "trainer": {"backend": "fake", "checkpoint_every": 5},
    "transport": {"partitions": 4},
    "policies": {"fake": {"answer_depends_on": "task", "tokens_per_s": 0.2, "mean_tokens": 8.0, "sigma": 0.7,
                          "fail_share": 0.02}},
    "retention": {},
}  # fmt: skip
"""A version takes about a minute."""


class SimulatedSoak:
    """A simulation that goes on for hours of its own time. `play` does all."""

    def __init__(self, hours: float, *, seed: int = 0, samples_per_hour: int = 4) -> None:
        self._hours, self._seed, self._every_s = hours, seed, HOUR_S / samples_per_hour
        self._random = Random(seed)
        self._this = psutil.Process()
        self.num_kills = 0
        self.series = Series(0.0)

    def play(self, tell: Callable[[str], None] = lambda line: None) -> dict[str, object]:
        """Soak, and return what the run says at its end. AssertionError if it does not hold."""
        with self._simulation() as simulation:
            end = START_TIME_S + self._hours * HOUR_S
            while (now := simulation.clock.now()) < end:
                due = now + self._every_s
                simulation.run(MAX_TICKS, until=lambda due=due: simulation.clock.now() >= due)  # type: ignore[misc]
                assert simulation.failed is None, simulation.to_text()
                self._sample(simulation)
                if self._random.random() < KILLS_PER_HOUR * self._every_s / HOUR_S:
                    simulation.kill(self._random.choice(simulation.processes))
                    self.num_kills += 1
                simulation.story.clear()  # kept for whoever looks for an error
                simulation.log.transactions.history.clear()  # kept for whoever checks laws
                tell(f"{(simulation.clock.now() - START_TIME_S) / HOUR_S:.2f} h: {simulation.num_ticks} ticks")
            simulation.run(MAX_TICKS, until=lambda: not any(one.pending for one in simulation.log.groups.values()))
            report = simulation.audit()
            assert report.fine, report.to_text()
            return {
                "hours": self._hours, "ticks": simulation.num_ticks, "versions": report.version,
                "rollouts": report.rollouts.admitted, "deleted_groups": report.deleted_groups,
                "killed": self.num_kills, "balanced": report.balanced, "twins": sum(report.twins.values()),
            }  # fmt: skip

    @contextmanager
    def _simulation(self) -> Iterator[Simulation]:
        with tempfile.TemporaryDirectory() as folder, patch.object(explorer, "LOOK_S", LOOK_S):
            yield Simulation(loader.from_dict(SETTINGS), folder=Path(folder), seed=self._seed)

    def _sample(self, simulation: Simulation) -> None:
        now = simulation.clock.now() - START_TIME_S
        gc.collect()
        counts = Counter(type(one) for one in gc.get_objects())
        others = counts.total() - sum(counts[one] for one in OF_RECORDS)
        self.series.add(now, {"objects beside records": float(others)}, "objects")
        self.series.add(now, {"resident": self._this.memory_info().rss / 2**20}, "MiB with the log")
        held = {topic: float(len(simulation.records(topic))) for topic in TOPICS}
        self.series.add(now, {topic: held[topic] for topic in TRIMMED}, "records")
        newest = {record.key: record for record in simulation.records("partials")}
        self.series.add(now, {"pieces": float(sum(one.value is not None for one in newest.values()))}, "records")
        del held["partials"]  # this log does not compact
        kept = {topic: count for topic, count in held.items() if topic not in TRIMMED and count}
        self.series.add(now, kept, "records kept for good")
        objects = simulation.store.objects
        self.series.add(now, {"store": float(len(objects))}, "objects of the store")
        self.series.add(now, {"store bytes": sum(map(len, objects.values())) / 1024}, "KiB of the store")
        self.series.add(now, {"this process": float(self._this.num_fds())}, "descriptors")
