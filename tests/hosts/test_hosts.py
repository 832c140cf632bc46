"""A run on several hosts that share nothing but the run file and keys, with the network's troubles."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.faults.rig import Rig, counted
from tests.faults.schedule import CALM
from tests.hosts.network import is_possible
from tests.hosts.ranks import KILLED_AT, WITHIN_S, go_on_without_a_host, train_on_two_hosts
from tests.hosts.rig import CUT_S, draw, made

SEEDS = (0, 1, 2)


def test_a_seed_is_a_schedule() -> None:
    assert draw(3) == draw(3)
    troubles = {trouble.what for seed in range(20) for trouble in draw(seed)}
    assert troubles == {"kill host", "cut", "slow"}
    assert CUT_S == 30.0, "longer than the session of a worker lasts"


@pytest.mark.law("lost", "twice", "conservation")
@pytest.mark.long
@pytest.mark.broker
@pytest.mark.timeout(9000)
def test_nothing_is_lost_between_hosts(tmp_path: Path) -> None:
    if not is_possible():
        pytest.fail("hosts with networks of their own need the superuser and /dev/net/tun")
    calm = Rig(tmp_path / "calm").calm_run(CALM).result()
    with made(tmp_path / "hosts") as hosts:
        played = [hosts.play(seed, calm) for seed in SEEDS]
    failed = "\n\n".join(one.error for one in played if one.error)
    assert not failed, failed
    counts = counted(played)
    assert (counts["schedules"], counts["twins"], counts["lost"]) == (len(SEEDS), 0, 0)
    assert {"kill host", "cut", "slow"} <= counts["happened"].keys()


@pytest.mark.law("replay")
@pytest.mark.long
@pytest.mark.broker
@pytest.mark.timeout(3600)
def test_a_trainer_of_two_ranks_outlives_the_host_of_one(tmp_path: Path) -> None:
    if not is_possible():
        pytest.fail("hosts with networks of their own need the superuser and /dev/net/tun")
    with made(tmp_path / "hosts") as hosts:
        found = train_on_two_hosts(hosts, "ranks")
        elastic = go_on_without_a_host(hosts, "elastic")
    assert set(found.sizes) == {2}
    assert found.code == 1
    assert found.ended_after_s < WITHIN_S
    assert "rank 1 of 2" in found.said, found.said
    began = [(step.name.trainer_epoch, step.name.version) for step in found.steps if step.resumed]
    (_, start), (_, again) = began
    assert start == 0
    assert 0 < again <= KILLED_AT + 1, "the second trainer goes on from a checkpoint of the first"
    assert found.facts.num_lost == 0
    assert elastic.epochs == [1], "the trainer was never started again"
    assert [size for size, _ in itertools.groupby(elastic.sizes)] == [2, 1, 2]
    assert elastic.facts.num_lost == 0
