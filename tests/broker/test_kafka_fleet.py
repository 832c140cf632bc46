"""Two hosts by ssh on a real Kafka: each is lost again and again, with all that runs there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from random import Random

import psutil
import pytest

from tests.e2e.test_fleet import LONG, FleetCaller
from tests.e2e.workplace import Workplace
from tests.ssh_server import ssh_server
from tests.warm import MARK

KILLS = 10


def lose(place: Workplace, host: str) -> int:
    """Kill whatever runs on a host, and return the number of processes."""
    found = [one for one in place.processes() if any(host in word.split("-") for word in one.cmdline())]
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended with its supervisor
            process.kill()
    return len(found)


@pytest.mark.broker
@pytest.mark.long
@pytest.mark.law("lost", "twice", "conservation")
def test_hosts_are_lost_at_ten_moments(place: Workplace, servers: str, run_id: Callable[[], str]) -> None:
    kafka = f'[transport]\nkind = "kafka"\nservers = "{servers}"\noptions = {{ replication_factor = 1 }}\n'
    name, random = run_id(), Random("fleet")
    place.write("tiny.toml", LONG.replace("[transport]\n", kafka).replace('name = "tiny"', f'name = "{name}"'))
    kept = {key: os.environ[key] for key in ("PATH", "PYTHONPATH", "HOME") if key in os.environ}
    with ssh_server({**kept, MARK: str(place.folder)}) as config:
        call = FleetCaller(place, config, "alpha feeder buffer trainer\nbeta explorer=2 verifier=2\n")
        done = call()
        assert done.code == 0, done.err
        view = place.view(f"runs/{name}")
        for number in range(KILLS):
            topic = random.choice(["tasks", "rollouts", "verified", "outcomes", "steps"])
            ends = view.transport.admin.end_offsets
            wanted = sum(ends(topic).values()) + random.randint(1, 12)
            place.wait_for(lambda: sum(ends(topic).values()) >= wanted, f"records of {topic}")  # noqa: B023
            assert lose(place, ("alpha", "beta")[number % 2]) >= 4, "the host's process and its workers"
            done = call()
            assert (done.code, done.out.count("started, "), done.out.count("runs already, ")) == (0, 1, 1), done.err
        version = view.curve().version
        place.wait_for(lambda: view.curve().version >= version + 3, "steps after the last kill")
        assert "running by workers on " in place.look("status", "tiny.toml").out
        assert place.look("drain", "tiny.toml").code == 0
        place.assert_nobody_left()
        view.assert_nothing_lost()
        assert "nothing runs; " in call("--status").out
