"""A run on machines that are reached by a real sshd, all of them this one, and units for a real systemd's judgement."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rftstream.config import loader
from rftstream.errors import ConfigError
from rftstream.integrations.ssh_fleet import read_hosts
from tests.e2e.workplace import FAKE, Finished, Workplace
from tests.ssh_server import ssh_server
from tests.warm import MARK

LONG = FAKE.replace("steps = 6", "steps = 100000").replace("[trainer]", "[backends.fake]\nstep_s = 0.3\n[trainer]")
ON_KAFKA = FAKE.replace("[transport]\n", '[transport]\nkind = "kafka"\nservers = "localhost:1"\n')


@pytest.fixture
def ssh_config(place: Workplace) -> Iterator[Path]:
    """A server for the test. What it starts is of the workplace."""
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "HOME") if name in os.environ}
    with ssh_server({**kept, MARK: str(place.folder)}) as config:
        yield config


class FleetCaller:
    """Calls `launch ssh` for one run and one file of hosts."""

    def __init__(self, place: Workplace, config: Path, hosts: str) -> None:
        self._place = place
        self.words = ("launch", "ssh", "tiny.toml", f"--ssh=-F{config}", "--hosts", str(place.write("hosts", hosts)))

    def __call__(self, *options: str) -> Finished:
        return self._place.look(*self.words, *options)


def test_hosts_that_cannot_be_used_are_named(place: Workplace, ssh_config: Path) -> None:
    """All of them at once, and nothing is started anywhere."""
    place.write("tiny.toml", ON_KAFKA)
    call = FleetCaller(place, ssh_config, "refuses feeder\nsilent buffer\nchanged trainer\nfine explorer verifier\n")
    for options, fine in (
        ((), ""),
        (("--folder", "/nowhere"), "fine: no folder /nowhere"),
        (("--folder", str(place.folder.parent)), "fine: no run file tiny.toml"),
        (("--command", "/nothing/rftstream"), "fine: no rftstream: /nothing/rftstream does not run"),
    ):
        done = call(*options)
        assert done.code == 1, done.out
        lines = done.err.removeprefix("rftstream: ").splitlines()
        assert lines[0].startswith("refuses: refuses the key: "), lines
        assert "`ssh refuses true` asks nothing, see `ssh-copy-id`" in lines[0]
        assert lines[1].startswith("silent: does not answer: ") and "Connection refused" in lines[1], lines
        assert lines[2].startswith("changed: has another key than known, or none: "), lines
        assert lines[3:] == [fine] * bool(fine), lines
    place.assert_nobody_left()


@pytest.mark.heavy("ten logins by ssh, each with starts of Python on the host, and two starts of all workers")
@pytest.mark.slow
@pytest.mark.law("lost")
def test_a_host_is_started_looked_at_and_stopped_from_afar(place: Workplace, ssh_config: Path) -> None:
    """Who dies there is started again by the host, which outlives the connection, and is not started twice."""
    place.write("tiny.toml", LONG)
    call = FleetCaller(place, ssh_config, "alpha explorer=2\n# the rest goes to\nbeta\n")
    refused = call()
    assert (refused.code, "2 hosts, but the log of transport.kind 'embedded' is on one" in refused.err) == (2, True)
    call = FleetCaller(place, ssh_config, "alpha feeder buffer trainer verifier explorer=2\n")
    done = call()
    assert done.code == 0, done.err
    assert "alpha: started, process " in done.out
    view = place.view("runs/tiny")
    place.wait_for(lambda: view.curve().version >= 2, "steps")
    assert "alpha: runs already, process " in call().out
    place.kill_worker("trainer-alpha-0")
    place.wait_for(lambda: view.control().claims["trainer"].epoch == 2, "the next trainer")
    version = view.curve().version
    place.wait_for(lambda: view.curve().version > version, "its steps")
    told = json.loads(call("--status", "--json").out)
    assert told["run"]["state"] == "running"
    hears = {role: sorted(names) for role, names in told["run"]["elsewhere"]["members"].items()}
    assert hears == {"explorer": ["explorer-alpha-0", "explorer-alpha-1"], "verifier": ["verifier-alpha-0"]}
    (host,) = told["hosts"]
    names = [f"{role}-alpha-0" for role in ("buffer", "explorer", "feeder", "trainer", "verifier")]
    assert [one["process"] for one in host["workers"]] == sorted([*names, "explorer-alpha-1"])
    assert all(one["reachable"] and one["ok"] for one in host["workers"])
    assert "alpha | " in call("--logs").out and "trainer-alpha-0 ended (killed by SIGKILL)" in call("--logs").out
    stopped = call("--stop")
    assert stopped.code == 0 and "all workers have left" in stopped.out, stopped.err
    place.assert_nobody_left()
    assert "nothing runs; " in call("--status").out
    assert call("--stop").out == "alpha: nothing runs\n"
    version = view.assert_nothing_lost().version
    assert call().code == 0
    place.wait_for(lambda: view.curve().version > version, "steps after the second start")
    assert place.look("drain", "runs/tiny").code == 0
    place.assert_nobody_left()
    view.assert_nothing_lost()


@pytest.mark.parametrize(
    ("hosts", "told"),
    [
        ("a feeder\na buffer", "hosts:2: got 'a', expected the name of a host, and each once"),
        ("me@a feeder\na buffer", "hosts:2: got 'a', expected the name of a host, and each once"),
        ("-oProxyCommand=x", "hosts:1: got '-oProxyCommand=x', expected the name of a host"),
        ("a trayner", "hosts:1: role: unknown 'trayner'; .*'trainer'"),
        ("a explorer:4", "did you mean 'explorer'.; a number is given as explorer=4"),
        ("a explorer=many", "hosts:1: got 'explorer=many', expected ROLE or ROLE=NUMBER, e.g. explorer=4"),
        ("a trainer=2", "hosts:1: got 2 of trainer, expected 1: one trainer is in force at a time"),
        ("a trainer\nb trainer", "hosts: trainer on a and b, expected one host"),
        ("a feeder buffer explorer verifier", "hosts: no host has the trainer, expected one; write trainer behind"),
        ("\n# none", "hosts: no host has the feeder"),
    ],
)
def test_hosts_that_do_not_fit_are_refused(place: Workplace, hosts: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_hosts(place.write("hosts", hosts), loader.load([place.write("tiny.toml", ON_KAFKA)]))
    with pytest.raises(ConfigError, match=r"--hosts: .*none: no such file, expected lines"):
        read_hosts(place.folder / "none", loader.load([place.write("tiny.toml", ON_KAFKA)]))


def test_roles_that_no_line_names_are_dealt(place: Workplace) -> None:
    """As SLURM's nodes get them: single ones on the first host, workers of the others from the last one on."""
    text = ON_KAFKA.replace("[explorer]", "[explorer]\ncount = 3")
    hosts = read_hosts(place.write("hosts", "me@a\nb\ngpu trainer\n"), loader.load([place.write("tiny.toml", text)]))
    assert {host.address: host.workers for host in hosts} == {
        "me@a": {"feeder": 1, "buffer": 1, "explorer": 1},
        "b": {"explorer": 2, "verifier": 1},
        "gpu": {"trainer": 1},
    }
    assert hosts[0].name == "a"


def test_units_are_accepted_by_systemd(place: Workplace) -> None:
    """Also with names that its files have to quote."""
    folder = place.folder / "run $5 of 7%"
    (folder / "keys").parent.mkdir()
    (folder / "keys").touch()
    file = folder / "tiny.toml"
    file.write_text(FAKE)
    done = place.look("launch", "systemd", file, "--to", "units", "--user", "root", "--environment", folder / "keys")
    assert done.code == 0, done.err
    units = sorted((place.folder / "units").iterdir())
    names = ["buffer", "explorer@", "feeder", "trainer", "verifier@"]
    assert [unit.name for unit in units] == [f"rftstream-tiny-{name}.service" for name in names]
    assert "systemctl enable --now rftstream-tiny-feeder.service rftstream-tiny-explorer@1.service" in done.out
    texts = [unit.read_text() for unit in units]
    assert ["ExecStartPre=" in text for text in texts] == [name == "feeder" for name in names]
    assert all("RestartPreventExitStatus=2 4 5 6 7\n" in text and "SuccessExitStatus=5\n" in text for text in texts)
    if shutil.which("systemd-analyze") is not None:
        for damage in ("", "KillMode=mixd"):
            units[0].write_text(f"{texts[0]}[Service]\n{damage}\n")
            judged = subprocess.run(
                ["systemd-analyze", "verify", "--man=no", *map(str, units)], capture_output=True, text=True, check=False
            )
            assert (judged.returncode, "mixd" in judged.stderr) == (0, bool(damage)), judged.stderr
            assert damage or not judged.stderr.strip()
    printed = place.look("launch", "systemd", file, "--role", "trainer", "--per-user").out
    assert printed.startswith("# rftstream-tiny-trainer.service\n") and "WantedBy=default.target" in printed
    assert "User=" not in printed


def test_what_workers_of_a_host_cannot_be_is_refused(place: Workplace) -> None:
    for roles, told in ((("trainer=2",), "one trainer is in force"), (("explorer=x",), "expected ROLE or ROLE=NUMBER")):
        done = place.look("workers", "tiny.toml", *(word for role in roles for word in ("--role", role)))
        assert (done.code, told in done.err) == (2, True), done.err
