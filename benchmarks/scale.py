"""Two hundred explorers in one group, over a thousand partitions of a real Kafka: what it costs that they come, work,
die and come again.

Each member is a process with clients of its own, forked from one that has loaded everything, and runs the loop of an
explorer (`_scale_members.py`); the engine waits where it would sample. A member that leaves is killed, so the group
learns of it when its session is over. Rebalance time: until every partition has an owner that lives and works, evenly;
the first members join together, when all have started. Time to first work: from the beginning of a process to its
first commit. The reference is a loop that is written by hand with the same client, its cooperative sticky assignor, and
as many members on the same brokers.

With RFTSTREAM_BENCH_BARE so many of the members are bare (`attend` in `_scale_members.py`), fifty in a process, and the
others are explorers: for groups that are too large for a machine. Bare ones stay; those that come, go and commit are
explorers.

RFTSTREAM_BENCH_MEMBERS=20 RFTSTREAM_BENCH_PARTITIONS=60 RFTSTREAM_BENCH_BROKERS=1 RFTSTREAM_BENCH_SECONDS=4
RFTSTREAM_BENCH_KINDS=ours is done within a minute; KINDS are "ours", "by hand", or both with a comma. All figures, with
what the brokers and the members used, go to scale.json, of which `_scale_model.py` and docs/pictures/scale.py are made.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks._scale_members import Board, attend, explore, explore_by_hand
from benchmarks._scale_model import figures
from benchmarks._tasks import one_task
from benchmarks.kafka import brokers as start_brokers
from rftstream import __version__
from rftstream.config import loader
from rftstream.config.sections import RunConfig
from rftstream.contracts import codec
from rftstream.contracts.control import Claim, RunManifest
from rftstream.contracts.role_names import RoleName
from rftstream.contracts.tasks import Sampling
from rftstream.errors import TransportError
from rftstream.roles.explorer import EXPLORER
from rftstream.runs.folder import RunFolder, wanted_topics
from rftstream.transport.kafka.transport import KafkaTransport

KINDS = ("ours", "by hand")
MEMBERS, PARTITIONS, BROKERS = 200, 1_000, 3
BROKER = {
    "group.initial.rebalance.delay.ms": 3_000,
    "log.retention.check.interval.ms": 300_000,
    "log.cleaner.backoff.ms": 15_000,
    "num.network.threads": 3,
    "num.io.threads": 8,
}
"""Settings of brokers that scripts/kafka has others for, which suit tests: Kafka's defaults."""
CHURN = (1, 10, 100)
"""So many are killed, and as many come, one number after the other; those above half of the members are left out."""
TOPICS = {"control", *EXPLORER.consumes, *EXPLORER.follows, *EXPLORER.produces}
BARE_EACH = 50
"""Bare members of a process."""
TASKS_EACH = 8
"""Tasks that a partition gets at once."""
BUSY_EACH = 24
"""The same where few explorers have few of the partitions, and commit as fast as they can."""
NUM_TOKENS = 1_000
PACE_S = 4.0
"""Seconds that a rollout takes while members come and go."""
NEVER_S = 1e9
MEASURED_S = float(os.environ.get("RFTSTREAM_BENCH_SECONDS", 12.0))
SESSION_S = float(os.environ.get("RFTSTREAM_BENCH_SESSION", 10.0))
"""`transport.session_timeout_s`."""
PATIENCE_S = 900.0
SETTLED_S = 3.0
"""So long members get to end what comes with the beginning."""
CALM_S = 1.0
"""So long the assignment has to stand."""
RESULT = Path("scale.json")
RUN = "scale"


@dataclass
class Use:
    """What the brokers and the members used over some seconds."""

    seconds: float
    broker_cpu_s: float
    member_cpu_s: float
    bare_cpu_s: float
    """Of the bare members, which `member_cpu_s` and `requests` leave out."""
    broker_bytes: float
    """Read and written by the brokers, sockets and files."""
    broker_rss_bytes: float
    connections: int
    requests: dict[str, int]
    """Of the members, by kind."""
    commits: int
    num_tokens: int
    """Of a rollout."""


def run() -> list[dict[str, Any]]:
    members = int(os.environ.get("RFTSTREAM_BENCH_MEMBERS", MEMBERS))
    partitions = int(os.environ.get("RFTSTREAM_BENCH_PARTITIONS", PARTITIONS))
    brokers = int(os.environ.get("RFTSTREAM_BENCH_BROKERS", BROKERS))
    kinds = os.environ.get("RFTSTREAM_BENCH_KINDS", ",".join(KINDS)).split(",")
    about: dict[str, Any] = {"members": members, "partitions": partitions, "brokers": brokers, "cores": os.cpu_count()}
    bare = int(os.environ.get("RFTSTREAM_BENCH_BARE", 0))
    about |= {"bare": bare, "session_s": SESSION_S}
    about["load"] = round(os.getloadavg()[0], 1)
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="rftstream-bench-") as name:
        folder = Path(name)
        with start_brokers(folder / "kafka", brokers, BROKER) as servers:
            for kind in kinds:
                with _Group(folder, servers, kind, members, partitions) as group:
                    for so_far in _measured(group, members, bare if kind == "ours" else 0):
                        found[kind] = so_far
                        RESULT.write_text(json.dumps({**about, **found}, indent=2) + "\n", encoding="utf-8")
    return _rows(f"{members} members, {partitions:,} partitions, {brokers} brokers", found, members)


# ------------------------------------------------------------------------------------------ what is measured


def _measured(group: _Group, members: int, bare: int) -> Iterator[dict[str, Any]]:
    """Yield what was measured so far, again and again: it takes minutes, and a busy machine may end it."""
    found: dict[str, Any] = {"bare": bare, "topics_s": group.topics_s, "alone": asdict(group.use(MEASURED_S / 2))}
    group.order(NEVER_S)
    yield found
    found["start_all_s"], found["join_all_s"] = group.begin(members - bare, bare)
    time.sleep(SETTLED_S)
    found["idle"] = asdict(group.use(MEASURED_S))
    yield found
    for name, tokens in (("short", NUM_TOKENS), ("long", 8 * NUM_TOKENS)):
        group.fill(BUSY_EACH if bare else TASKS_EACH)
        group.order(0.0, tokens)
        time.sleep(SETTLED_S)
        found[name] = asdict(group.use(MEASURED_S))
        yield found
    group.order(PACE_S)
    before = group.commit_sums()
    churn = [count for count in CHURN if count <= (members - bare) // 2]
    found["churn"] = {}
    for count in churn:
        group.fill()
        killed_s = group.kill(count)
        joined_s = group.join(count)
        first_work_s = group.first_work_s(count)
        found["churn"][str(count)] = {"killed_s": killed_s, "joined_s": joined_s, "first_work_s": first_work_s}
        num_commits, commit_s = group.commit_sums() - before
        yield {**found, "commit_s": float(commit_s / num_commits), "redone": group.redone()}


class _Group:
    """Members of one kind on one run, and the brokers that they work on. Used as a context; then `join`, `kill`, `use`
    in any order."""

    def __init__(self, folder: Path, servers: str, kind: str, members: int, partitions: int) -> None:
        self._kind, self._servers, self._partitions = kind, servers, partitions
        self._config = _config(folder, servers, partitions)
        self._folder = RunFolder(folder / f"{RUN}-{kind.replace(' ', '-')}")
        self._folder.path.mkdir()
        self._brokers = [psutil.Process(pid) for pid in json.loads((folder / "kafka" / "nodes.json").read_text())]
        self._rows, self._path = 2 * members + 2 * sum(CHURN) + 1, folder / f"{kind}.board"
        self._board = Board(self._path, self._rows)
        self._alive: dict[int, multiprocessing.Process] = {}
        self._bare: dict[int, multiprocessing.Process] = {}
        """Bare members, many of one process."""
        self._next_row, self._num_tasks, self._newest = 1, 0, []  # type: ignore[var-annotated]
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["benchmarks._scale_members"])
        self._log = KafkaTransport(self._folder.run_id, self._config.transport)
        self._producer = self._log.producer("bench", timeout_s=60.0)

    def __enter__(self) -> _Group:
        began = time.monotonic()
        self._make_topics()
        self.topics_s = time.monotonic() - began
        self._producer.start()
        now = time.time()
        manifest = RunManifest(
            run=self._folder.run_id, created_at=now, config="", digests={}, seed=0, shares=1,
            partitions=self._partitions, rftstream_version=__version__,
        )  # fmt: skip
        claims = [
            Claim(role=role.value, epoch=1, process="bench", host="", pid=0, claimed_at=now)
            for role in (RoleName.feeder, RoleName.trainer)
        ]
        self._put("control", [(0, message) for message in (manifest, *claims)])
        return self

    def __exit__(self, *_: object) -> None:
        processes = {*self._alive.values(), *self._bare.values()}
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        self._log.close()

    def _make_topics(self) -> None:
        """Make the topics that explorers use. A broker that opens so many logs may not answer for a while."""
        wanted = {name: settings for name, settings in wanted_topics(self._config).items() if name in TOPICS}
        self._log.admin.ensure_topics(wanted)
        self._log.admin.commit_initial("explorer", ["tasks"])
        deadline = time.monotonic() + PATIENCE_S
        for topic in wanted:
            while True:
                try:
                    self._log.admin.end_offsets(topic)
                    break
                except TransportError:
                    if time.monotonic() > deadline:
                        raise

    def _put(self, topic: str, messages: Sequence[tuple[int, Any]]) -> None:
        run = self._folder.run_id
        self._producer.commit([codec.to_record(one, topic, place, run=run, writer_epoch=1) for place, one in messages])

    def fill(self, each: int = TASKS_EACH) -> None:
        """Put so many tasks on every partition, enough until this is called again."""
        first, self._num_tasks = self._num_tasks, self._num_tasks + each * self._partitions
        self._put(
            "tasks",
            [
                (number % self._partitions, one_task(number, Sampling(), question="1+1=" * 64))
                for number in range(first, self._num_tasks)
            ],
        )

    def order(self, pace_s: float, num_tokens: int = NUM_TOKENS) -> None:
        self._board.order(pace_s=pace_s, num_tokens=num_tokens)

    # ------------------------------------------------------------------------------------------ who comes and goes

    def begin(self, count: int, bare: int) -> tuple[float, float]:
        """Start so many and, when all have their clients, let them join; return the seconds of both."""
        began = time.monotonic()
        self._start_bare(bare)
        self._start(count)
        while not self._board.column("ready_at", [*self._bare, *self._newest]).all():
            assert time.monotonic() < began + PATIENCE_S, f"{self._kind}: not started within {PATIENCE_S:g} s"
            time.sleep(0.1)
        joined = time.monotonic()
        self._board.open()
        return joined - began, self._settled() - joined

    def join(self, count: int) -> float:
        """Start so many beside the others; return the seconds until they own their share."""
        began = time.monotonic()
        self._start(count)
        return self._settled() - began

    def _start(self, count: int) -> None:
        self._newest = list(range(self._next_row, self._next_row + count))
        self._next_row += count
        for number in self._newest:
            arguments: tuple[Any, ...] = (self._path, self._rows, number)
            if self._kind == "ours":
                target: Callable[..., None] = explore
                arguments += (self._config, self._folder)
            else:
                target = explore_by_hand
                arguments += (self._servers, self._folder.run_id)
            process = self._context.Process(target=target, args=arguments, daemon=True)
            process.start()
            self._alive[number] = process  # type: ignore[assignment]

    def _start_bare(self, count: int) -> None:
        first = self._next_row
        self._next_row += count
        for start in range(first, self._next_row, BARE_EACH):
            numbers = list(range(start, min(start + BARE_EACH, self._next_row)))
            arguments = (self._path, self._rows, numbers, self._config, self._folder)
            process = self._context.Process(target=attend, args=arguments, daemon=True)
            process.start()
            self._bare |= dict.fromkeys(numbers, process)  # type: ignore[arg-type]

    def kill(self, count: int) -> float:
        """Kill the oldest; return the seconds until others own what was theirs."""
        began = time.monotonic()
        for number in list(self._alive)[:count]:
            process = self._alive.pop(number)
            process.kill()
            process.join()
        return self._settled() - began

    def _settled(self) -> float:
        """Wait until every partition has an owner that lives, evenly; return since when that is so."""
        deadline, since = time.monotonic() + PATIENCE_S, 0.0
        everybody = self._alive | self._bare
        fewest = self._partitions // len(everybody)
        while True:
            now = time.monotonic()
            assert now < deadline, f"{self._kind}: not shared out within {PATIENCE_S:g} s: {self._shares()}"
            dead = [number for number, process in everybody.items() if not process.is_alive()]
            assert not dead, f"{self._kind}: members {dead} ended"
            shares = self._shares()
            if shares.sum() != self._partitions or shares.min() < fewest or shares.max() > fewest + 1:
                since = 0.0
            elif not since:
                since = now
            elif now - since > CALM_S:
                return since
            time.sleep(0.05)

    def _shares(self) -> np.ndarray:
        return self._board.column("owned", [*self._alive, *self._bare])

    def first_work_s(self, count: int) -> list[float]:
        """Wait until each of the newest has committed something; return how long each took."""
        deadline = time.monotonic() + PATIENCE_S
        while not (first := self._board.column("first_commit_at", self._newest)).all():
            assert time.monotonic() < deadline, f"{self._kind}: {(first == 0).sum()} of {count} without work"
            time.sleep(0.1)
        return [float(took) for took in first - self._board.column("began_at", self._newest)]

    # ------------------------------------------------------------------------------------------ what it costs

    def use(self, seconds: float) -> Use:
        """Look at the brokers and the members for some time."""
        before, began = self._counts(), time.monotonic()
        time.sleep(seconds)
        after, took = self._counts(), time.monotonic() - began
        brokers = [broker.pid for broker in self._brokers]
        return Use(
            seconds=took,
            broker_cpu_s=after["broker_cpu_s"] - before["broker_cpu_s"],
            member_cpu_s=after["member_cpu_s"] - before["member_cpu_s"],
            bare_cpu_s=after["bare_cpu_s"] - before["bare_cpu_s"],
            broker_bytes=after["bytes"] - before["bytes"],
            broker_rss_bytes=sum(broker.memory_info().rss for broker in self._brokers),
            connections=sum(len(psutil.Process(pid).net_connections("tcp")) for pid in brokers),
            requests=dict(after["requests"] - before["requests"]),
            commits=int(after["commits"] - before["commits"]),
            num_tokens=self._board.num_tokens,
        )

    def _counts(self) -> dict[str, Any]:
        io = [broker.io_counters() for broker in self._brokers]
        return {
            "broker_cpu_s": sum(_cpu_s(broker.pid) for broker in self._brokers),
            "bare_cpu_s": sum(_cpu_s(process.pid or 0) for process in set(self._bare.values())),
            "member_cpu_s": sum(_cpu_s(process.pid or 0) for process in self._alive.values()),
            "bytes": sum(one.read_chars + one.write_chars for one in io),
            "requests": self._board.requests(list(self._alive)),
            "commits": self._board.column("commits", list(self._alive)).sum(),
        }

    def commit_sums(self) -> np.ndarray:
        """Return how many commits there were so far, and the seconds that they took: from a rollout that is done to one
        that is on the log."""
        everybody = range(1, self._next_row)
        return np.array([self._board.column(name, everybody).sum() for name in ("commits", "commit_s")])

    def redone(self) -> int:
        return int(self._board.column("redone", range(1, self._next_row)).sum())


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _config(folder: Path, servers: str, partitions: int) -> RunConfig:
    return loader.from_dict(
        {
            "run": {"name": RUN, "steps": 1},
            "model": {"path": "fake"},
            "tasksets": {"sums": {"source": "arithmetic"}},
            "explorer": {"policy": "fake"},
            "trainer": {"backend": "fake"},
            "transport": {
                "kind": "kafka",
                "servers": servers,
                "partitions": partitions,
                "session_timeout_s": SESSION_S,
            },
            "base": str(folder),
        }
    )


# ------------------------------------------------------------------------------------------ what is told of it


def _rows(title: str, found: Mapping[str, Mapping[str, Any]], members: int) -> list[dict[str, Any]]:
    of_kind = {kind: figures(one, members) for kind, one in found.items()}
    first, *others = of_kind.values()
    reference = others[0] if others else None
    return [
        {
            "name": f"scale: {title}, {what}",
            "unit": unit,
            "ours": ours,
            "reference": reference and reference[what, unit],
            "reference_name": reference and "kafka-python by hand",
            "ratio": ours / reference[what, unit] if reference and reference[what, unit] else None,
        }
        for (what, unit), ours in first.items()
    ]
