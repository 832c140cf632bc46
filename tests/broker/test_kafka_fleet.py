"""Hosts on a real Kafka: one that does not see the run folder, and two that are lost again and again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable

import psutil
import pytest

from tests.broker.conftest import OwnBroker
from tests.e2e.test_fleet import LONG, FleetCaller
from tests.e2e.workplace import Workplace
from tests.moments import goes_on, moments
from tests.ssh_server import ssh_server
from tests.warm import MARK


def lose(place: Workplace, host: str) -> int:
    """Kill whatever runs on a host, and return the number of processes."""
    found = [one for one in place.processes() if any(host in word.split("-") for word in one.cmdline())]
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended with its supervisor
            process.kill()
    return len(found)


def supervisors(place: Workplace, host: str) -> list[psutil.Process]:
    """Return the processes that keep the workers of a host."""
    return [one for one in place.processes("workers") if host in one.cmdline()]


def connections(place: Workplace, host: str) -> list[psutil.Process]:
    return [one for one in place.processes(host) if one.name() == "ssh"]


def on_kafka(place: Workplace, servers: str, name: str) -> str:
    """Write the run file, and return its text."""
    kafka = f'[transport]\nkind = "kafka"\nservers = "{servers}"\noptions = {{ replication_factor = 1 }}\n'
    text = LONG.replace("[transport]\n", kafka).replace('name = "tiny"', f'name = "{name}"')
    place.write("tiny.toml", text)
    return text


@pytest.mark.broker
def test_a_host_that_does_not_see_the_run_folder(place: Workplace, servers: str, run_id: Callable[[], str]) -> None:
    """It has a run file of its own. `status`, asked anywhere, hears of its workers by the log."""
    name = run_id()
    place.write("elsewhere/tiny.toml", on_kafka(place, servers, name))
    assert place.call("run", "tiny.toml", "--no-workers").code == 0
    words = ("--role", "feeder", "--role", "verifier=2", "--name", "gamma")
    workers = place.start("workers", "elsewhere/tiny.toml", *words)
    members = place.wait_for(lambda: heard(place), "both verifiers' heartbeats")
    assert sorted(member.partition(" at ")[0] for member in members) == ["verifier-gamma-0", "verifier-gamma-1"]
    logs = place.folder / "elsewhere" / "runs" / name / "logs"
    told = json.loads((logs / "targets-gamma.json").read_text())
    assert {one["labels"]["instance"] for one in told} == {"feeder-gamma-0", *(f"verifier-gamma-{at}" for at in (0, 1))}
    text = place.look("status", "tiny.toml").out
    assert "running by workers on " in text
    assert text.count("one of the verifiers that the log hears") == 2, text
    workers.send(signal.SIGTERM)
    done = workers.finish()
    assert (done.code, "all workers have left" in done.err) == (0, True), done.err
    assert not (logs / "targets-gamma.json").exists(), "they were told to leave"
    assert "left: stopped" in (logs / "verifier-gamma-1.log").read_text()


def heard(place: Workplace) -> list[str]:
    """Return the verifiers that the log hears, if there are two, and a feeder is at work."""
    told = place.look("status", "tiny.toml", "--json", "--within-s", "240")
    assert told.code == 0, told.err
    elsewhere = json.loads(told.out)["elsewhere"]
    members: list[str] = [] if elsewhere is None else elsewhere["members"].get("verifier", [])
    return members if len(members) == 2 else []


KILLED = (
    "alpha", "beta", "supervisor", "connection", "broker", "trainer-alpha-0", "buffer-alpha-0", "evaluator-alpha-0",
    "explorer-beta-1", "verifier-beta-0",
)  # fmt: skip
ALPHA = "alpha feeder buffer trainer evaluator\n"
BETA = "beta explorer=2 verifier=2\n"
EVALUATED = '[evaluations.held-out]\nsource = "arithmetic"\nevery = 20\n'


@pytest.mark.broker
@pytest.mark.long
@pytest.mark.law("lost", "twice", "conservation")
def test_a_fleet_is_killed_at_ten_moments(place: Workplace, own_broker: OwnBroker, run_id: Callable[[], str]) -> None:
    """Each host with all that runs there, the supervisor of one, five workers, the broker, and the connection of a call
    that starts a host, which is repeated at once. What is lost is brought back by the host, or by the same call."""
    name = run_id()
    place.write("tiny.toml", on_kafka(place, own_broker.address, name) + EVALUATED)
    kept = {key: os.environ[key] for key in ("PATH", "PYTHONPATH", "HOME") if key in os.environ}
    with ssh_server({**kept, MARK: str(place.folder)}) as config:
        call = FleetCaller(place, config, ALPHA + BETA)
        done = call()
        assert done.code == 0, done.err
        view = place.view(f"runs/{name}")
        for victim in moments(view, place.wait_for, KILLED, "fleet"):
            num_lost = 1
            match victim:
                case "alpha" | "beta":
                    assert lose(place, victim) >= 4, "the host's process and its workers"
                case "supervisor":
                    [supervisor] = supervisors(place, "beta")
                    supervisor.kill()
                    place.wait_for(lambda: not place.processes("explorer-beta-0"), "its workers' ends")
                case "connection":
                    lose(place, "beta")
                    first = place.start(*call.words)
                    for link in place.wait_for(lambda: connections(place, "beta"), "a connection"):
                        link.kill()
                    first.finish()
                case "broker":
                    own_broker.kill()
                    own_broker.start()
                    num_lost = 0
                case _:
                    place.kill_worker(victim)
                    num_lost = 0
            done = call()
            told = done.out.count("started, "), done.out.count("runs already, ")
            assert done.code == 0 and (told == (num_lost, 2 - num_lost) or victim == "connection"), done.err
            assert [len(supervisors(place, host)) for host in ("alpha", "beta")] == [1, 1]
        goes_on(view, place.wait_for)
        assert "running by workers on " in place.look("status", "tiny.toml").out
        assert place.look("drain", "tiny.toml").code == 0
        place.assert_nobody_left()
        view.assert_nothing_lost()
        assert "nothing runs; " in call("--status").out
