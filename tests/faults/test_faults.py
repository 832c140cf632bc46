"""Eight schedules on each log. All that may go wrong in one is in them; `make faults` plays more. On a cluster they
take many minutes, so that most of them are left to `make test-long`."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.faults.cluster import Cluster
from tests.faults.rig import Rig, counted
from tests.faults.schedule import LARGE, draw

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


def test_a_seed_is_a_schedule() -> None:
    assert str(draw("kafka", 7)) == str(draw("kafka", 7))
    assert len({str(draw("kafka", seed)) for seed in range(50)}) == 50
    for log, large in LARGE.items():
        texts = " ".join(str(draw(log, seed)) for seed in SEEDS)
        assert all(what in texts for what in large if what != "stopped writer")
    assert ":in_commit:" in str(draw("embedded", LARGE["embedded"].index("stopped writer")))


@pytest.mark.law("lost", "twice", "conservation")
@pytest.mark.timeout(6000)
def test_nothing_is_lost_on_the_embedded_log(tmp_path: Path) -> None:
    play(Rig(tmp_path), "embedded", SEEDS)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path / "kafka")
    yield made
    made.stop()
    gc.collect()  # here, and not in a test of others


@pytest.mark.law("lost", "twice", "conservation")
@pytest.mark.broker
@pytest.mark.timeout(9000)
@pytest.mark.parametrize("seeds", [
    pytest.param(BROKERS, id="brokers"),
    pytest.param([seed for seed in SEEDS if seed not in BROKERS], id="others", marks=pytest.mark.long),
])  # fmt: skip
def test_nothing_is_lost_on_a_cluster(tmp_path: Path, cluster: Cluster, seeds: Sequence[int]) -> None:
    play(Rig(tmp_path / "runs", cluster), "kafka", seeds)


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


def play(rig: Rig, log: str, seeds: Sequence[int]) -> None:
    played = rig.play_all((draw(log, seed) for seed in seeds), jobs=JOBS)
    failed = "\n\n".join(one.error for one in played if one.error)
    assert not failed, failed
    summary = counted(played)
    assert (summary["schedules"], summary["twins"], summary["lost"]) == (len(seeds), 0, 0)
    assert summary["happened"], "something went wrong in them"
