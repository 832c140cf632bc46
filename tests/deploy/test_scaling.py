"""Explorers by their backlog: a real Prometheus, and a stand-in for KEDA that starts and ends real processes."""

from __future__ import annotations

import json
import math
import re
import signal
from pathlib import Path

import pytest

from tests.deploy.prometheus_server import Prometheus
from tests.e2e.workplace import Process, Workplace
from tests.suite.each import each

RUN_FILE = """
[run]
name = "tiny"
steps = 2
[model]
path = "fake"
[tasksets.sums]
source = "arithmetic"
[sampling]
max_tokens = 64
[feeder]
groups_per_batch = 15
group_size = 4
max_staleness = 1
[explorer]
policy = "fake"
max_concurrent = 4
[policies.fake]
tokens_per_s = 25.0
mean_tokens = 30.0
sigma = 0.2
[trainer]
backend = "fake"
[transport]
partitions = 8
"""
ADMITTED = 120
"""Rollouts of (1 + max_staleness) batches: so much is admitted while nobody trains, and the run trains no more."""
MAX_CONCURRENT = 4
LEAST, MOST = 1, 4
TOLERANCE = 0.1
"""Kubernetes leaves the number alone while the backlog is that close to what it is for."""
QUERY = 'max(rftstream_backlog_rollouts{run="tiny",role="explorer"})'
"""That of a ScaledObject."""


def replicas_wanted(backlog: float, replicas: int) -> int:
    """Return what KEDA's trigger with `metricType: AverageValue` makes of an answer of Prometheus: the autoscaler of
    Kubernetes divides it by the threshold."""
    if replicas and abs(backlog / (MAX_CONCURRENT * replicas) - 1) <= TOLERANCE:
        return replicas
    return min(MOST, max(LEAST, math.ceil(backlog / MAX_CONCURRENT)))


@each(
    ("backlog", "replicas", "wanted"),
    [(0, 4, 1), (1, 1, 1), (4, 1, 1), (5, 1, 2), (9, 1, 3), (120, 1, 4), (15, 4, 4), (13, 4, 4), (11, 3, 3), (8, 4, 2)],
)
def test_the_formula(backlog: float, replicas: int, wanted: int) -> None:
    assert replicas_wanted(backlog, replicas) == wanted


class Explorers:
    """A deployment's pods. `scale_to` starts and ends them; the newest ends first."""

    def __init__(self, place: Workplace) -> None:
        self._place = place
        self._running: list[tuple[str, Process]] = []
        self.names: list[str] = []
        """All that were ever started."""

    @property
    def count(self) -> int:
        return len(self._running)

    @property
    def running(self) -> list[Process]:
        return [process for _, process in self._running]

    def scale_to(self, wanted: int) -> None:
        while self.count < wanted:
            name = f"explorer-{len(self.names)}"
            started = self._place.start("worker", "tiny.toml", "--role", "explorer", "--process", name)
            self.names.append(name)
            self._running.append((name, started))
        while self.count > wanted:
            name, process = self._running.pop()
            process.send(signal.SIGTERM)
            assert process.finish().code == 0, process.err

    def wait_until_joined(self) -> None:
        """Wait until each of them has had partitions of its own."""
        logs = self._place.view("runs/tiny").folder.logs
        for name, _ in self._running:
            self._place.wait_for(lambda file=logs / f"{name}.log": _has_partitions(file), f"partitions of {name}")  # type: ignore[misc]


def _has_partitions(file: Path) -> bool:
    return file.exists() and re.search(r" owns [1-9]\d* partitions", file.read_text(encoding="utf-8")) is not None


@pytest.mark.sampled(1, "deployed")
@pytest.mark.slow
def test_explorers_follow_the_backlog_up_and_down_and_nothing_is_lost_or_done_twice(place: Workplace) -> None:
    place.write("tiny.toml", RUN_FILE)
    made = place.look("run", "tiny.toml", "--no-workers")
    assert made.code == 0, made.err
    run = place.view("runs/tiny")
    exporter = place.start("exporter", "runs/tiny", "--port", "0", "--every-s", "0.5")
    address = place.wait_for(lambda: re.search(r"^http://([^/]+)/", exporter.out), "the exporter's address")
    target = [{"targets": [address.group(1)], "labels": {"job": "exporter"}}]
    prometheus = Prometheus(place, place.write("exporter.json", json.dumps(target)))
    workers = [place.start("worker", "tiny.toml", "--role", role) for role in ("feeder", "trainer")]
    place.wait_for(lambda: prometheus.values(QUERY) == [ADMITTED], "the backlog of all that is admitted")
    explorers, history = Explorers(place), [LEAST]
    explorers.scale_to(LEAST)

    def work_is_done() -> bool:
        """Decide once, as KEDA does every pollingInterval. No answer is no reason to change anything."""
        answer = prometheus.values(QUERY)
        if answer:
            history.append(replicas_wanted(answer[0], explorers.count))
            explorers.scale_to(history[-1])
            explorers.wait_until_joined()
        return answer == [0]

    place.wait_for(work_is_done, "an end of the backlog")
    assert max(history) == MOST and history[-1] == LEAST, history
    assert len(explorers.names) >= MOST
    assert len(run.rollouts()) == ADMITTED
    for query, value in (
        ('rftstream_workers_wanted{role="explorer"}', 0), ('rftstream_backlog_rollouts{role="verifier"}', ADMITTED),
    ):  # fmt: skip
        place.wait_for(lambda query=query, value=value: prometheus.values(query) == [value], f"{value} for {query}")  # type: ignore[misc]

    workers += [place.start("worker", "tiny.toml", "--role", role) for role in ("verifier", "buffer")]
    for worker in [*workers, *explorers.running]:
        assert worker.finish().code == 0, worker.err
    run.assert_nothing_lost()
    ids = [rollout.ids.rollout_id for rollout in run.rollouts()]
    assert len(ids) == len(set(ids)) == ADMITTED, "no rollout is on the log twice"
    assert len(run.steps()) == 2
