"""Plays schedules of a run on several hosts: what goes wrong between them, and the laws at its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from rftstream.errors import TransportError
from tests.e2e.workplace import COMMAND, RunView
from tests.faults.laws import Facts, check_the_end, compare
from tests.faults.rig import REWARD, Played, run_file
from tests.faults.schedule import Schedule
from tests.hosts.network import Host, Network, Output
from tests.s3 import BUCKET, KEYS, MAKE_BUCKET

KAFKA = Path(__file__).parents[2] / "scripts" / "kafka"
BROKER, STORE = "broker", "store"
WORKERS = ("alpha", "beta", "gamma", "delta", "spare")
"""Hosts of roles; nobody works on the last one until another one is gone."""
PLACES = {
    "feeder": "alpha", "buffer": "alpha", "evaluator": "alpha", "explorer-0": "beta", "explorer-1": "gamma",
    "verifier-0": "gamma", "verifier-1": "beta", "trainer": "delta",
}  # fmt: skip
"""Worker -> the host on which it begins."""

BROKER_PORT, STORE_PORT = 9092, 9000
CUT_S = 30.0
SLOW: dict[str, Any] = {"delay_s": 0.025, "lost": 0.01}
"""There and back: 50 ms."""
END_S = 1200.0
LAST_VERSION = 12
AGAIN = (1, 3, -signal.SIGKILL)
"""Ends after which whoever runs hosts starts a worker again; 5 is one that another took over."""


@dataclass(frozen=True, slots=True, order=True)
class Trouble:
    """Something that goes wrong in the network."""

    version: int
    """When the run has come to this version."""
    what: str
    """kill host, cut, or slow."""
    hosts: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"at version {self.version}: {self.what} {' - '.join(self.hosts)}".rstrip()


def draw(seed: int) -> tuple[Trouble, ...]:
    """Return what goes wrong with a seed: a host dies, cables are cut, with every third all of them are slow, and with
    every fourth the trainer is cut off from the log."""
    random = Random(f"hosts {seed}")
    working = list(WORKERS[:-1])
    found = [Trouble(random.randint(1, LAST_VERSION), "kill host", (random.choice(working),))]
    for _ in range(random.randint(1, 3)):
        one = random.choice(working)
        other = random.choice([BROKER, BROKER, STORE, *(name for name in working if name != one)])
        found.append(Trouble(random.randint(1, LAST_VERSION), "cut", (one, other)))
    if seed % 3 == 0:
        found.append(Trouble(random.randint(0, LAST_VERSION), "slow"))
    if seed % 4 == 1:  # of all cuts this one makes two of a role that is to be one
        found.append(Trouble(random.randint(1, 6), "cut", ("delta", BROKER)))
    return tuple(sorted(found))


class Hosts:
    """A broker, an object store and hosts for workers, on a network of their own. Runs come one after the other."""

    def __init__(self, folder: Path) -> None:
        fetched = subprocess.run([sys.executable, KAFKA, "fetch"], capture_output=True, text=True)
        assert fetched.returncode == 0, fetched.stderr  # hosts have no way to where it comes from
        self.network = Network(folder, (BROKER, STORE, *WORKERS))
        try:
            self.servers = self._start_broker(self.network[BROKER])
            self.environment = {
                **KEYS, "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_ENDPOINT_URL": f"http://{self.network[STORE].address}:{STORE_PORT}",
            }  # fmt: skip
            self._start_store(self.network[STORE])
        except BaseException:
            self.network.close()
            raise

    def _start_broker(self, host: Host) -> str:
        done = host.call(sys.executable, KAFKA, "start", "--address", host.address,
                         "--port", str(BROKER_PORT), "--dir", "/mnt/kafka", timeout_s=900)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return f"{host.address}:{BROKER_PORT}"

    def _start_store(self, host: Host) -> None:
        server = host.start(sys.executable, "-m", "moto.server", "-H", host.address, "-p", str(STORE_PORT))
        host.environment = self.environment
        deadline = time.monotonic() + 240
        while True:
            assert server.alive and time.monotonic() < deadline, server.err.read_text()
            done = host.call(sys.executable, MAKE_BUCKET, BUCKET)
            if done.returncode == 0:
                return
            time.sleep(0.2)

    def make_run(self, name: str, text: str, *, home: str) -> None:
        """Make a run from `home`, and give every host of workers what it needs: the run file, the code that it names,
        and keys. `text` is the run file, whose last section is that of the log, without where log and weights are."""
        text += f'kind = "kafka"\nservers = "{self.servers}"\n[weights]\nstore = "s3://{BUCKET}/{{run}}"\n'
        for each in WORKERS:
            host = self.network[each]
            (host.folder / "run.toml").write_text(text)
            (host.folder / "odd.py").write_text(REWARD)
            host.environment = self.environment
        made = self.network[home].call(COMMAND, "run", "run.toml", "--no-workers")
        assert made.returncode == 0, made.stderr

    def play(self, seed: int, calm: Facts) -> Played:
        """Play a schedule. Never raises for what it finds: see `error`."""
        began, played = time.monotonic(), Played(Schedule("hosts", seed, (), ()))
        try:
            facts = _Play(self, f"h{seed}-{os.getpid()}", draw(seed), played.happened).to_the_end()
            played.num_records, played.num_lost = facts.num_records, facts.num_lost
            played.num_twins = sum(facts.report.twins.values())
            compare(facts, calm)
        except Exception as error:
            troubles = "\n".join(map(str, draw(seed)))
            played.error = f"seed {seed}\n{troubles}\n{type(error).__name__}: {error}\n{self.network.report()}"
        finally:
            played.seconds = time.monotonic() - began
        return played

    def close(self) -> None:
        self.network.close()


@dataclass
class _Worker:
    """One that shall work, and where it does now."""

    role: str
    host: str
    program: Output


class _Play:
    def __init__(self, hosts: Hosts, name: str, troubles: tuple[Trouble, ...], happened: Counter[str]) -> None:
        self._network, self._name, self._happened = hosts.network, name, happened
        self._waiting = list(troubles)
        self._repairs: list[tuple[float, tuple[str, ...]]] = []
        """When a cable is mended, and which."""
        self._slow: dict[str, Any] = {}
        self._workers: dict[str, _Worker] = {}
        self._given_up: list[Output] = []
        """Programs that may be taken over: their successors work elsewhere."""
        self._home = self._network["spare"]
        """Where the run is made and looked at; it is never taken away."""
        hosts.make_run(name, run_file(name), home="spare")
        with self._home.inside():
            self._view = RunView(self._home.folder / "runs" / name)

    def to_the_end(self) -> Facts:
        try:
            for name, host in PLACES.items():
                self._start(name, host)
            with self._home.inside():
                self._work()
                return check_the_end(self._view)
        finally:
            self._network.connect_all()
            for name in WORKERS:
                self._network.down(name)
                self._network.up(name)
            self._view.close()

    def _start(self, name: str, host: str) -> None:
        role = name.partition("-")[0]
        program = self._network[host].start(COMMAND, "worker", "run.toml", "--role", role)
        self._workers[name] = _Worker(role, host, program)

    def _work(self) -> None:
        """Until the run has ended, as long as there are new versions."""
        seen, until = -1, time.monotonic() + END_S
        while any(worker.program.alive for worker in self._workers.values()) or not self._is_finished():
            version = self._version()
            if version > seen:
                seen, until = version, time.monotonic() + END_S
            assert time.monotonic() < until, f"no version after {seen} and no end within {END_S:g} s"
            while self._waiting and self._waiting[0].version <= version:
                self._make(self._waiting.pop(0))
            self._repair()
            self._tend()
            time.sleep(0.2)
        self._happened["not reached"] += len(self._waiting)

    def _is_finished(self) -> bool:
        with contextlib.suppress(TransportError):
            return self._view.control().finished is not None
        return False

    def _version(self) -> int:
        with contextlib.suppress(TransportError):
            return self._view.curve().version
        return -1

    def _tend(self) -> None:
        """As whoever runs the hosts does: a worker that died is started again where it was."""
        for name, worker in self._workers.items():
            if worker.program.alive:
                continue
            code = worker.program.end(0)
            if code in AGAIN:
                self._happened[f"started again: {worker.role}"] += 1
                self._start(name, worker.host)
            assert code in (0, *AGAIN), f"{name} on {worker.host}: exit {code}: {_end_of(worker.program)}"
        for program in self._given_up:
            left = program.popen.poll()
            assert left in (None, 0, 5, *AGAIN), f"exit {left}: {_end_of(program)}"

    # ------------------------------------------------------------------------------------------ troubles

    def _make(self, trouble: Trouble) -> None:
        self._happened[trouble.what] += 1
        if trouble.what == "slow":
            self._slow = SLOW
            self._network.connect_all(**SLOW)
        elif trouble.what == "cut":
            self._network.connect(*trouble.hosts, cut=True)
            self._repairs.append((time.monotonic() + CUT_S, trouble.hosts))
            self._replace(trouble.hosts)
        else:
            (host,) = trouble.hosts
            self._network.down(host)
            self._network.up(host)  # it comes back, empty-handed
            for name, worker in list(self._workers.items()):
                if worker.host == host:
                    self._start(name, "spare")

    def _replace(self, hosts: tuple[str, ...]) -> None:
        """The trainer's host may be cut off for good, for all that is known: another trainer is started. When the
        cable is mended there are two."""
        trainer = self._workers["trainer"]
        if BROKER in hosts and trainer.host in hosts and trainer.host != "spare":
            self._given_up.append(trainer.program)
            self._start("trainer", "spare")
            self._happened["second trainer"] += 1

    def _repair(self) -> None:
        for due, hosts in list(self._repairs):
            if time.monotonic() >= due:
                self._network.connect(*hosts, **self._slow)
                self._repairs.remove((due, hosts))


def _end_of(program: Output) -> str:
    return program.err.read_text(errors="replace")[-3000:]


@contextlib.contextmanager
def made(folder: Path) -> Iterator[Hosts]:
    """Yield hosts, which are gone afterwards."""
    hosts = Hosts(folder)
    try:
        yield hosts
    finally:
        hosts.close()


def to_text(one: Played) -> str:
    return json.dumps({name: value for name, value in one.to_json().items() if name != "error"})
