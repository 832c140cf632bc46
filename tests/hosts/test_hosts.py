"""A run on several hosts that share nothing but the run file and keys, with the network's troubles."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.rig import Rig, counted
from tests.hosts.network import is_possible
from tests.hosts.rig import CUT_S, draw, made

SEEDS = (0, 1, 2)


def test_a_seed_is_a_schedule() -> None:
    assert draw(3) == draw(3)
    troubles = {trouble.what for seed in range(20) for trouble in draw(seed)}
    assert troubles == {"kill host", "cut", "slow"}
    assert CUT_S == 30.0, "longer than the session of a worker lasts"


@pytest.mark.long
@pytest.mark.broker
@pytest.mark.timeout(9000)
def test_nothing_is_lost_between_hosts(tmp_path: Path) -> None:
    if not is_possible():
        pytest.fail("hosts with networks of their own need the superuser and /dev/net/tun")
    calm = Rig(tmp_path / "calm").calm_run(agents=False).result()
    with made(tmp_path / "hosts") as hosts:
        played = [hosts.play(seed, calm) for seed in SEEDS]
    failed = "\n\n".join(one.error for one in played if one.error)
    assert not failed, failed
    counts = counted(played)
    assert (counts["schedules"], counts["twins"], counts["lost"]) == (len(SEEDS), 0, 0)
    assert {"kill host", "cut", "slow"} <= counts["happened"].keys()
