"""A soak of real processes: a run over the embedded log that deletes what it does not need, sampled from outside."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import psutil

from rftstream.errors import TransportError
from tests.e2e.workplace import Process, RunView, Workplace
from tests.soak.series import Limit, Series

RUN_FILE = """
[run]
name = "soak"
hours = {hours}
[model]
path = "fake"
[tasksets.sums]
source = "arithmetic"
options = {{ size = 96 }}
[sampling]
max_tokens = 64
[feeder]
groups_per_batch = 4
group_size = 4
max_staleness = 1
[explorer]
policy = "fake"
count = 2
partial_every_s = 0.5
[verifier]
count = 2
[trainer]
backend = "fake"
checkpoint_every = 5
[evaluations.held-out]
source = "arithmetic"
options = {{ skip = 96, size = 4 }}
every = 20
[policies.fake]
tokens_per_s = 20.0
mean_tokens = 14.0
sigma = 0.7
fail_share = 0.02
[transport]
partitions = 4
[retention]
"""
"""About a step a second: rollouts take their time, so that the machine has time for others."""

WORKERS = (
    "feeder-0", "explorer-0", "explorer-1", "verifier-0", "verifier-1", "buffer-0", "trainer-0", "evaluator-0",
)  # fmt: skip
VICTIMS = ("explorer-1", "verifier-1")
"""Killed now and then, and started again. The others live as long as the soak, so that they can be judged."""

TRIMMED = ("tasks", "rollouts", "verified", "batches", "partials")
"""Topics that lose what nobody needs. The others keep everything: they are what happened."""

LIMITS = {
    "MiB": Limit(16.0, share=0.1),
    "descriptors": Limit(4.0, share=0.1),
    "files": Limit(16.0, share=0.2),
    "records": Limit(200.0, share=0.25),
    "MiB of objects": Limit(4.0, share=0.2),
}
"""Unit -> how much may come in an hour. What is kept for good has a unit of its own, and no limit."""

KEPT = "records kept for good"


class ProcessSoak:
    """A run, and who looks at it. `play` makes it, samples it until the time is over, and ends it."""

    def __init__(self, place: Workplace, duration_s: float, *, every_s: float, kill_every_s: float, seed: int) -> None:
        self._place = place
        self._duration_s, self._every_s, self._kill_every_s = duration_s, every_s, kill_every_s
        self._random = Random(seed)
        self.num_kills = 0
        self.series = Series(time.monotonic())

    def play(self, tell: Callable[[str], None]) -> dict[str, object]:
        """Soak, and return what the run itself says at its end. AssertionError if the run does not hold."""
        self._place.write("soak.toml", RUN_FILE.format(hours=self._duration_s / 3600 + 24))
        run = self._place.start("run", "soak.toml", "--json")
        view = self._place.view("runs/soak")
        self._place.wait_for(lambda: view.curve().version > 0 or not run.alive, "the first step")
        began = told = time.monotonic()
        self.series.began_s = began
        next_kill = began + self._kill_every_s
        while (now := time.monotonic()) < began + self._duration_s:
            assert run.alive, f"the run has ended\n{run.out}\n{run.err}"
            self._sample(now, run, view)
            if now >= next_kill:
                next_kill = now + self._kill_every_s
                self._kill()
            if now - told > 60.0:
                told = now
                tell(f"{(now - began) / 60:.0f} min: version {view.curve().version}, {self.num_kills} killed")
            time.sleep(self._every_s)
        return self._end(run, view)

    def _end(self, run: Process, view: RunView) -> dict[str, object]:
        """Drain it: what was admitted is decided, and the audit is of a whole run."""
        drained = self._place.call("drain", "runs/soak")
        assert drained.code == 0, drained.err
        done = run.finish()
        assert done.code == 0, done.err[-3000:]
        self._place.assert_nobody_left()
        report = view.assert_nothing_lost()
        assert report.groups.pending == 0, report.to_text()
        return {
            "versions": view.curve().version, "groups": report.groups.admitted,
            "rollouts": report.rollouts.admitted, "deleted_groups": report.deleted_groups, "killed": self.num_kills,
            "balanced": report.balanced, "twins": sum(report.twins.values()),
        }  # fmt: skip

    def _kill(self) -> None:
        process = self._place.worker(self._random.choice(VICTIMS))
        if process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                self.num_kills += 1

    def _sample(self, now: float, run: Process, view: RunView) -> None:
        memory: dict[str, float] = {}
        descriptors: dict[str, float] = {}
        known = {run.pid: "run"}
        for name in WORKERS:
            if (process := self._place.worker(name)) is not None:
                known[process.pid] = name
        for process in self._place.processes():
            with contextlib.suppress(psutil.Error):
                name = known.get(process.pid) or "children"
                memory[name] = memory.get(name, 0.0) + process.memory_info().rss / 2**20
                if name != "children":
                    descriptors[f"{name} open"] = float(process.num_fds())
        if set(WORKERS) <= set(memory):  # not while one is being started again
            memory["all"] = sum(memory.values())
        for name in VICTIMS:
            memory.pop(name, None)
            descriptors.pop(f"{name} open", None)
        memory.pop("children", None)
        self.series.add(now, memory, "MiB")
        self.series.add(now, descriptors, "descriptors")
        self._sample_folder(now, view.folder.path)
        with contextlib.suppress(TransportError):
            self._sample_log(now, view)

    def _sample_folder(self, now: float, folder: Path) -> None:
        files = {"files": 0.0}
        results = {"evaluation results": 0.0}
        sizes: dict[str, float] = {}
        for path in folder.rglob("*"):
            with contextlib.suppress(OSError):  # deleted meanwhile
                if path.is_file():
                    top, *below = path.relative_to(folder).parts
                    if below[:1] == ["evals"]:
                        results["evaluation results"] += 1
                    else:
                        files["files"] += 1
                    sizes[top] = sizes.get(top, 0.0) + path.stat().st_size / 2**20
        self.series.add(now, files, "files")
        self.series.add(now, results, "files kept for good")
        self.series.add(now, {"objects": sizes.get("weights", 0.0)}, "MiB of objects")
        self.series.add(now, {name: sizes.get(name, 0.0) for name in ("log", "logs")}, "MiB on disk")

    def _sample_log(self, now: float, view: RunView) -> None:
        admin = view.transport.admin
        trimmed: dict[str, float] = {}
        kept: dict[str, float] = {}
        for topic in admin.topics():
            begins, ends = admin.begin_offsets(topic), admin.end_offsets(topic)
            there = float(sum(ends[place] - begins[place] for place in ends))
            if topic == "partials":
                continue  # compacted: its offsets do not tell how many are there
            (trimmed if topic in TRIMMED else kept)[topic] = there
        self.series.add(now, trimmed, "records")
        self.series.add(now, {name: count for name, count in kept.items() if count}, KEPT)
