"""Whole runs with faults: in `make test` a short one on each log, another one each time, in `make test-long` eight
schedules on each log, in which is all that may go wrong in one. `make faults` plays more."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from secrets import choice, randbelow

import pytest

from rftstream.config.sections import TransportSection
from rftstream.contracts.records import TopicPartition
from rftstream.transport.base import Position, TopicSettings
from rftstream.transport.kafka.transport import KafkaTransport
from tests.faults.cluster import Cluster
from tests.faults.rig import Rig, counted, patiently
from tests.faults.schedule import LARGE, LAST_SHORT, draw

pytestmark = [
    pytest.mark.slow,
    # Clients leave sockets of connections that failed to the garbage collector, whenever that comes round.
    pytest.mark.filterwarnings("ignore:unclosed <s:ResourceWarning"),
]

JOBS = 4
"""Most of a schedule is waiting for somebody to be declared dead."""
SEEDS = range(8)
BROKERS = [4, 7]
"""Of these: a broker gone, a broker that hangs."""
GONE = [4, 5]
"""Of these: a broker gone, be it the controller."""


def test_a_seed_is_a_schedule() -> None:
    assert str(draw("kafka", 7)) == str(draw("kafka", 7))
    assert len({str(draw("kafka", seed)) for seed in range(50)}) == 50
    for log, large in LARGE.items():
        texts = " ".join(str(draw(log, seed)) for seed in SEEDS)
        assert all(what in texts for what in large if what != "stopped writer")
    assert ":in_commit:" in str(draw("embedded", LARGE["embedded"].index("stopped writer")))
    short = [draw("kafka", seed, short=True) for seed in range(50)]
    assert max(event.version for one in short for event in one.events) == LAST_SHORT
    assert not any(one.agents for one in short)


@pytest.mark.law("lost", "twice", "conservation")
@pytest.mark.heavy("a run of eight processes, some of which are killed and started again")
def test_nothing_is_lost_in_a_short_run(tmp_path: Path) -> None:
    play(Rig(tmp_path), "embedded", [randbelow(1 << 30)], short=True)


@pytest.mark.law("lost", "twice", "conservation")
@pytest.mark.long
@pytest.mark.timeout(6000)
def test_nothing_is_lost_on_the_embedded_log(tmp_path: Path) -> None:
    play(Rig(tmp_path), "embedded", SEEDS)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path / "kafka")
    yield made
    made.stop()
    gc.collect()  # here, and not in a test of others


@pytest.mark.sampled(1, "brokers")
@pytest.mark.law("lost", "twice", "conservation")
@pytest.mark.broker
@pytest.mark.heavy("three brokers, one of which is killed, and a run on them")
def test_a_cluster_that_loses_brokers_goes_on(tmp_path: Path, cluster: Cluster) -> None:
    """A short run; then the broker that keeps the positions of a group dies, and another is asked."""
    watched = KafkaTransport("watched", TransportSection(kind="kafka", servers=cluster.servers))
    watched.admin.ensure_topics({"a": TopicSettings(partitions=1)})
    groups = [f"g{number}" for number in range(6)]
    for group in groups:
        watched.admin.commit_initial(group, ["a"])
    play(Rig(tmp_path / "runs", cluster), "kafka", [8 * randbelow(1 << 27) + choice(GONE)], short=True)

    positions = {TopicPartition("a", 0): Position(0)}
    assert [watched.admin.committed(group) for group in groups] == [positions] * len(groups)
    cluster.process(cluster.coordinator("watched.g0")).kill()
    for group in groups:
        assert patiently(lambda: watched.admin.committed(group)) == positions, "its new coordinator is asked"  # noqa: B023
    watched.close()


@pytest.mark.law("lost", "twice", "conservation")
@pytest.mark.long
@pytest.mark.broker
@pytest.mark.timeout(9000)
def test_nothing_is_lost_on_a_cluster(tmp_path: Path, cluster: Cluster) -> None:
    play(Rig(tmp_path / "runs", cluster), "kafka", SEEDS)


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path / "kafka", secured=True)
    yield made
    made.stop()
    gc.collect()


@pytest.mark.law("lost", "twice", "fencing", "conservation")
@pytest.mark.long
@pytest.mark.broker
@pytest.mark.timeout(9000)
def test_nothing_is_lost_with_tls_and_acls(tmp_path: Path, secured: Cluster) -> None:
    """Each role has a certificate and rights of its own, and an exporter looks on with those of a reader."""
    play(Rig(tmp_path / "runs", secured), "kafka", BROKERS)


def play(rig: Rig, log: str, seeds: Sequence[int], *, short: bool = False) -> None:
    schedules = [draw(log, seed, short=short) for seed in seeds]
    print(*schedules, sep="\n\n")
    played = rig.play_all(schedules, jobs=JOBS)
    failed = "\n\n".join(one.error for one in played if one.error)
    assert not failed, failed
    summary = counted(played)
    assert (summary["schedules"], summary["twins"], summary["lost"]) == (len(seeds), 0, 0)
    assert summary["happened"], "something went wrong in them"
