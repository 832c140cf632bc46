"""Plays schedules: a run of real processes, what goes wrong in it, and the laws at its end."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import psutil

from rftstream import faults
from rftstream.config import loader
from rftstream.errors import TransportError
from rftstream.gateway.keys import SECRET_VARIABLE
from rftstream.testing import Simulation
from rftstream.transport.base import Transport
from tests.agents_elsewhere import SECRET
from tests.e2e.workplace import Process, RunView, Workplace
from tests.faults.agents import RigAgents, hosts_of, write_agents
from tests.faults.cluster import Cluster
from tests.faults.exporter import RigExporter
from tests.faults.laws import Facts, check_the_end, compare
from tests.faults.schedule import AWAY_S, CALM, NUM_TASKS, Event, Schedule

Asked = TypeVar("Asked")

PATIENCE_S = 900.0

RUN_FILE = """
[run]
name = "{name}"
[model]
path = "fake"
[tasksets.sums]
source = "arithmetic"
reward = "odd:score"
passes = 1
options = {{ skip = {skip}, size = {size} }}
[sampling]
max_tokens = 90
[feeder]
groups_per_batch = 4
group_size = 3
max_staleness = 1
[explorer]
policy = "fake"
count = 2
partial_every_s = 0.1
yield_after_tokens = 20
[trainer]
backend = "fake"
checkpoint_every = 2
[evaluations.held-out]
source = "arithmetic"
options = {{ skip = 88, size = 4 }}
every = 8
[policies.fake]
tokens_per_s = 50.0
mean_tokens = 14.0
sigma = 1.0
fail_share = 0.08
answer_depends_on = "task"
[transport]
partitions = 6
"""
"""About 20 steps for 88 tasks, 9 for the last 36, long-tailed, saved all along; some rollouts fail and some have no
reward, upon which some groups die."""

REWARD = """
import zlib

def score(completion, answer, prompt):
    if zlib.crc32(f"{prompt}|{completion}".encode()) % 100 < 8:
        return None
    return float(completion.strip() == answer)
"""

END_S = 1200.0
"""From one version to the next, or the run's end, on a machine that has much else to do."""
LOOK_S = 0.1
ROOM_BYTES = 24 * 1024

_numbers = itertools.count()


@dataclass
class Played:
    """What came of a schedule."""

    schedule: Schedule
    happened: Counter[str] = field(default_factory=Counter)
    """kill ROLE, kill ROLE at POINT, and so on -> how often."""
    num_records: int = 0
    num_twins: int = 0
    num_lost: int = 0
    seconds: float = 0.0
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "seed": self.schedule.seed, "log": self.schedule.log, "happened": dict(sorted(self.happened.items())),
            "records": self.num_records, "twins": self.num_twins, "lost": self.num_lost,
            "seconds": round(self.seconds, 1), "error": self.error,
        }  # fmt: skip


class Rig:
    """A folder for runs, and what they are compared with: the same run left alone. On Kafka with a cluster."""

    def __init__(self, folder: Path, cluster: Cluster | None = None) -> None:
        self.folder = folder
        self.cluster = cluster
        self._calm: dict[tuple[bool, bool], Future[Facts]] = {}
        self._lock = threading.Lock()

    def calm_run(self, schedule: Schedule) -> Future[Facts]:
        """Begins to play the run without faults, once, beside the schedules that are compared with it."""
        kind = (schedule.agents, schedule.short)
        with self._lock:
            if kind not in self._calm:
                pool = ThreadPoolExecutor(1)
                play = self._play_agents if schedule.agents else self._simulate
                self._calm[kind] = pool.submit(play, schedule)
                pool.shutdown(wait=False)
            return self._calm[kind]

    def _play_agents(self, schedule: Schedule) -> Facts:
        """On a log of this machine, with processes, which agents need: which log it is must not matter."""
        place = Workplace(self.folder / "calm-agents")
        try:
            return _with_deaths(_Play(place, "calm-agents", replace(CALM, agents=True), None, Counter()).to_the_end())
        finally:
            place.end()

    def _simulate(self, schedule: Schedule) -> Facts:
        """In this process, on a log in memory: what a run does must not depend on where it runs."""
        place = Workplace(self.folder / f"calm-{schedule.num_tasks}")
        _write(place, "calm", None, replace(schedule, retention=False))
        module = ModuleType("odd")
        exec(REWARD, module.__dict__)
        sys.modules["odd"] = module
        config = loader.load([place.folder / "run.toml"], sets=["policies.fake.tokens_per_s=0"], env={})
        run = Simulation(config, folder=place.folder)
        run.run(max_ticks=1_000_000)
        assert run.failed is None, run.to_text()
        return _with_deaths(check_the_end(_SimulatedView(run.transport())))

    def play(self, schedule: Schedule) -> Played:
        """Never raises for what it finds: see `error`."""
        began = time.monotonic()
        calm = self.calm_run(schedule)
        played = Played(schedule)
        name = f"f{schedule.seed}-{os.getpid()}-{next(_numbers)}"
        place = Workplace(self.folder / name)
        try:
            facts = _Play(place, name, schedule, self.cluster, played.happened).to_the_end()
            played.num_records = facts.num_records
            played.num_twins = sum(facts.report.twins.values())
            played.num_lost = facts.num_lost
            compare(facts, calm.result())
            assert facts.trimmed == schedule.retention
            if facts.trimmed:
                played.happened["log trimmed"] += 1
            if self.cluster is not None:  # thousands of partitions that nobody needs would slow down the ones after it
                patiently(lambda: _delete(place, name))
        except Exception as error:
            nodes = self.cluster.logs() if self.cluster is not None else ""
            played.error = f"{schedule}\n{type(error).__name__}: {error}\n{place.report()}\n{nodes}"
        finally:
            place.end()
            played.seconds = time.monotonic() - began
        if played.error is None:
            shutil.rmtree(place.folder, ignore_errors=True)
        return played

    def play_all(
        self,
        schedules: Iterable[Schedule],
        *,
        jobs: int,
        until: float | None = None,
        tell: Callable[[Played], None] = lambda played: None,
    ) -> list[Played]:
        """So many at once. After `until` (time.monotonic) and after a failure none is begun."""
        played: list[Played] = []
        waiting = iter(schedules)
        with ThreadPoolExecutor(jobs) as pool:
            running = {pool.submit(self.play, one) for one in itertools.islice(waiting, jobs)}
            while running:
                done = next(as_completed(running))
                running.remove(done)
                played.append(done.result())
                tell(played[-1])
                over = until is not None and time.monotonic() > until
                if not over and not any(one.error for one in played):
                    running |= {pool.submit(self.play, one) for one in itertools.islice(waiting, 1)}
        return played


def run_file(name: str, size: int = NUM_TASKS) -> str:
    """Return the file of a run of this name, with the last `size` of its tasks."""
    return RUN_FILE.format(name=name, skip=NUM_TASKS - size, size=size)


class _SimulatedView(RunView):
    """A run in memory, looked at as one of processes is."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport


def _with_deaths(calm: Facts) -> Facts:
    assert calm.report.groups.dead > 0, "some groups have to die"
    return calm


def _write(place: Workplace, name: str, cluster: Cluster | None, schedule: Schedule) -> None:
    more = cluster.settings if cluster is not None else ""
    more += "[retention]\n" if schedule.retention else ""
    text = write_agents(place, name) if schedule.agents else run_file(name, schedule.num_tasks)
    place.write("run.toml", text + more)
    place.write("odd.py", REWARD)


def _grant(place: Workplace) -> None:
    """Give each role of the run its rights, and nobody more."""
    done = place.call("topics", "acls", "run.toml", "--apply", "--user-prefix", "CN=", timeout_s=END_S)
    assert done.code == 0, done.err


def _delete(place: Workplace, name: str) -> None:
    done = place.call("delete", f"runs/{name}", "--yes", timeout_s=END_S)
    if done.code != 0:
        raise TransportError(done.err)


def patiently(ask: Callable[[], Asked]) -> Asked:
    """Who looks on meets the same brokers that are stopped and killed, by this schedule or by one beside it."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return ask()
        except TransportError:
            if time.monotonic() > until:
                raise
            time.sleep(1.0)


class _Play:
    def __init__(
        self, place: Workplace, name: str, schedule: Schedule, cluster: Cluster | None, happened: Counter[str]
    ) -> None:
        self._place = place
        self._dir = f"runs/{name}"
        self._schedule = schedule
        self._cluster = cluster
        self._happened = happened
        self._hands: list[Process] = []
        _write(place, name, cluster, schedule)
        self._secret = {SECRET_VARIABLE: SECRET} if schedule.agents else {}
        self._env = {faults.VARIABLE: ",".join(map(str, schedule.points)), **self._secret}
        # Who begins a run is told at once that a broker does not answer; these are to begin.
        self._exporter: RigExporter | None = None
        with cluster.turn if cluster is not None else contextlib.nullcontext():
            if cluster is not None and cluster.secured:
                _grant(place)
            self._run = place.start("run", "run.toml", "--json", env=self._env)
            self._view: RunView = patiently(lambda: place.view(self._dir))
            if cluster is not None and cluster.secured:
                self._exporter = RigExporter(place, self._dir, {})
        self._stops = {event.target.partition(" ")[2] for event in schedule.events if event.what == "zombie"} - {""}

    def to_the_end(self) -> Facts:
        agents = RigAgents(self._place, self._view) if self._schedule.agents else None
        try:
            self._play_events()
            self._finish()
        finally:
            if agents is not None:
                agents.join()
        if agents is not None:
            patiently(agents.check)
            self._happened += Counter(agents.happened)
        return patiently(lambda: check_the_end(self._view))

    def _play_events(self) -> None:
        for event in self._schedule.events:
            if not self._reach(event.version):
                self._happened["not reached"] += 1
                continue
            time.sleep(event.delay_s)
            getattr(self, "_" + event.what.replace(" ", "_"))(event)

    def _reach(self, version: int) -> bool:
        """False if the run came to its end before. Who stands still at a point until its event comes may be the one
        that makes versions: then the time for it is now."""

        def is_time() -> bool:
            return self._version() >= version or any(map(self._is_reached, self._stops)) or not self._run.alive

        self._place.wait_for(is_time, f"version {version}", END_S)
        return self._run.alive and patiently(self._view.control).finished is None

    def _version(self) -> int:
        with contextlib.suppress(Exception):  # a broker that is gone just now
            return self._view.curve().version
        return -1

    def _await_end(self) -> None:
        """As long as there are new versions: how long a run takes is a matter of what else the machine does."""
        seen, until = -1, time.monotonic() + END_S
        while self._run.alive:
            if (version := self._version()) > seen:
                seen, until = version, time.monotonic() + END_S
            assert time.monotonic() < until, f"no version after {seen} and no end within {END_S:g} s"
            time.sleep(0.5)

    def _finish(self) -> None:
        self._await_end()
        done = self._run.finish(END_S)
        assert done.code == 0, f"exit {done.code}: {done.err[-3000:]}"
        assert done.result["reason"] == "taskset", done.result
        for hand in self._hands:
            assert hand.finish().code in (0, 5, -signal.SIGKILL), hand.err[-3000:]
        if self._exporter is not None:
            self._exporter.end(patiently(self._view.audit))
            self._happened["exporter told what the audit counts"] += 1
        self._place.assert_nobody_left()
        for mark in sorted(self._marks.iterdir()) if self._marks.is_dir() else ():
            role, point, _ = mark.name.split(".")
            action = next(one.action for one in self._schedule.points if one.name == mark.name)
            self._happened[f"{action} {role} at {point}"] += 1

    # ------------------------------------------------------------------------------------------ processes

    def _kill(self, event: Event) -> None:
        process = self._place.worker(event.target)
        if process is not None:  # else it is being started again
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                self._happened[f"kill {event.target.partition('-')[0]}"] += 1

    def _kill_host(self, event: Event) -> None:
        """Of agents; they are started again in another one."""
        process = self._place.worker(event.target)
        for host in hosts_of(process)[:1] if process is not None else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                host.kill()
                self._happened["kill host"] += 1

    def _join(self, event: Event) -> None:
        self._by_hand(event.target)
        self._happened[f"join {event.target}"] += 1

    def _leave(self, event: Event) -> None:
        """Another one joins before, for a role that nobody does ends nothing."""
        self._by_hand(event.target.partition("-")[0])
        process = self._place.worker(event.target)
        if process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
                self._happened[f"leave {event.target.partition('-')[0]}"] += 1

    def _by_hand(self, role: str) -> Process:
        process = self._place.start(
            "worker",
            "--run-dir",
            self._dir,
            "--role",
            role,
            "--process",
            f"{role}-hand{len(self._hands)}",
            env=self._secret,
        )
        self._hands.append(process)
        return process

    def _stopped_worker(self, event: Event) -> None:
        """Long enough to be declared dead."""
        process = self._place.worker(event.target)
        if process is not None:
            self._stop_for(process, AWAY_S)
            self._happened[f"stop {event.target.partition('-')[0]}"] += 1

    def _stop_for(self, process: psutil.Process, seconds: float) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
            time.sleep(seconds)
            process.resume()

    def _zombie(self, event: Event) -> None:
        """A single role stands still, at a point or anywhere, until its successor works; then it goes on."""
        role, _, mark = event.target.partition(" ")
        self._stops.discard(mark)
        first = self._stopped_at(mark) if mark else self._place.worker(f"{role}-0")
        if first is None:
            self._happened["not reached"] += 1
            return
        before = self._epoch(role)
        with contextlib.suppress(psutil.NoSuchProcess):
            first.suspend()
            self._happened[f"stop {role}"] += not mark
            self._by_hand(role)
            self._place.wait_for(lambda: self._epoch(role) > before or not self._run.alive, f"another {role}", END_S)
            version = self._version()
            deadline = time.monotonic() + AWAY_S
            while self._version() <= version and self._run.alive and time.monotonic() < deadline:
                time.sleep(LOOK_S)
            first.resume()

    def _stopped_at(self, mark: str) -> psutil.Process | None:
        self._place.wait_for(lambda: self._is_reached(mark) or not self._run.alive, f"somebody at {mark}", END_S)
        with contextlib.suppress(OSError, ValueError, psutil.NoSuchProcess):
            return psutil.Process(int((self._marks / mark).read_text()))
        return None

    @property
    def _marks(self) -> Path:
        return self._view.folder.logs / "faults"

    def _is_reached(self, mark: str) -> bool:
        """The file is there a moment before it says who was there."""
        with contextlib.suppress(FileNotFoundError):
            return (self._marks / mark).read_text(encoding="ascii").endswith("\n")
        return False

    def _epoch(self, role: str) -> int:
        claim = patiently(self._view.control).claims.get(role)
        return claim.epoch if claim is not None else 0

    def _two_at_once(self, event: Event) -> None:
        """Two more of a single role, started at the same moment: the last one stays."""
        for _ in range(2):
            self._by_hand(event.target)
        self._happened[f"two more of {event.target} at once"] += 1

    def _machine(self, event: Event) -> None:
        """Everything dies, or the supervisor and with it its workers; the run is resumed."""
        victims = self._place.processes() if event.target == "all" else [psutil.Process(self._run.pid)]
        for process in reversed(victims):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._run.finish()
        self._happened[f"kill {event.target}"] += 1
        self._place.wait_for(lambda: not self._supervised(), "the end of all", END_S)
        self._run = self._place.start("resume", self._dir, "--json", env=self._env)
        self._place.wait_for(lambda: self._view.folder.is_live() or not self._run.alive, "its supervisor")
        if self._exporter is not None:
            self._exporter.start_again()

    def _supervised(self) -> list[psutil.Process]:
        """All but those that were started by hand, and their children."""
        own = {hand.pid for hand in self._hands} | ({self._exporter.pid} if self._exporter is not None else set())
        found = []
        for process in self._place.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if not own & {process.pid, process.ppid()}:
                    found.append(process)
        return found

    # ------------------------------------------------------------------------------------------ the embedded log

    def _full_disk(self, event: Event) -> None:
        """No file may grow: for SQLite the same as a full disk. Freed after a while."""
        sizes = [path.stat().st_size for path in self._view.folder.log.iterdir() if path.is_file()]
        self._limit(max(sizes) + ROOM_BYTES)
        deadline = time.monotonic() + 8.0
        while self._run.alive and time.monotonic() < deadline and "no room" not in self._run.err:
            time.sleep(LOOK_S)
        self._happened["full disk" if "no room" in self._run.err else "full disk, not noticed"] += 1
        time.sleep(1.0)
        self._limit(resource.RLIM_INFINITY)

    def _limit(self, num_bytes: int) -> None:
        """Also of those that are started meanwhile: children have what their parents have."""
        for _ in range(2):
            for process in self._place.processes():
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))

    # ------------------------------------------------------------------------------------------ brokers

    def _lost_broker(self, event: Event) -> None:
        assert self._cluster is not None
        with self._cluster.turn:
            self._lose(int(event.target), signal.SIGKILL)
            self._happened["kill broker"] += 1

    def _lost_controller(self, event: Event) -> None:
        assert self._cluster is not None
        with self._cluster.turn:
            self._lose(self._cluster.controller(), signal.SIGKILL)
            self._happened["kill controller"] += 1

    def _rolling_restart(self, event: Event) -> None:
        assert self._cluster is not None
        with self._cluster.turn:
            for number in (1, 2, 3):
                self._lose(number, signal.SIGTERM)
            self._happened["rolling restart"] += 1

    def _stopped_broker(self, event: Event) -> None:
        assert self._cluster is not None
        with self._cluster.turn:
            self._stop_for(self._cluster.process(int(event.target)), AWAY_S)
            self._cluster.wait_until_in_step()
            self._happened["stop broker"] += 1

    def _lose(self, number: int, signum: int) -> None:
        assert self._cluster is not None
        process = self._cluster.process(number)
        process.send_signal(signum)
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie until its keeper looks
            while process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(LOOK_S)
        time.sleep(2.0)
        self._cluster.start_again(number)
        self._cluster.wait_until_in_step()


def counted(played: Sequence[Played]) -> dict[str, Any]:
    """The summary of many."""
    happened: Counter[str] = Counter()
    for one in played:
        happened += one.happened
    return {
        "schedules": len(played), "failed": [one.schedule.seed for one in played if one.error],
        "records": sum(one.num_records for one in played), "twins": sum(one.num_twins for one in played),
        "lost": sum(one.num_lost for one in played), "happened": dict(sorted(happened.items())),
    }  # fmt: skip
