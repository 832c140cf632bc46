"""Whole runs whose engine and optimizer step take the time that they are told to: everything else is real, processes,
log, store and rewards. And what their logs say of them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import psutil

from benchmarks._ideal import Plan
from rftstream.contracts.batches import Experience
from rftstream.contracts.control import DesiredState
from rftstream.contracts.messages import Message
from rftstream.contracts.outcomes import GroupOutcome, GroupResult
from rftstream.contracts.rollouts import Rollout
from rftstream.contracts.tasks import Task
from rftstream.contracts.versions import StepRecord
from rftstream.policies.fake import made_up_tokens
from rftstream.runs.folder import RunFolder, open_run
from rftstream.runs.writes.requests import ask_state
from rftstream.service.role import Log
from rftstream.transport.base import Transport

MEAN_TOKENS = 60
SIGMA = 1.0
"""Of the lognormal lengths: one of 250 is ten times as long as the mean."""
MAX_TOKENS = 600
START_LIMIT_S = 60.0
QUIET_LIMIT_S = 10.0
NUM_LOOKS, LOOK_S = 20, 0.05

RUN_FILE = """
[run]
name = "{name}"
steps = {plan.steps}
[model]
path = "fake"
[tasksets.sums]
source = "arithmetic"
[sampling]
max_tokens = {max_tokens}
[feeder]
groups_per_batch = {plan.groups_per_batch}
group_size = {plan.group_size}
max_staleness = {plan.max_staleness}
on_stale = "{plan.on_stale}"
[explorer]
policy = "fake"
count = {explorers}
max_concurrent = {concurrent}
[trainer]
backend = "fake"
[backends.fake]
step_s = {plan.step_s}
[policies.fake]
tokens_per_s = {plan.tokens_per_s}
mean_tokens = {mean_tokens}
sigma = {sigma}
[transport]
partitions = {partitions}
"""


@contextmanager
def started(
    folder: Path, name: str, plan: Plan, *, explorers: int, partitions: int, by_hand: bool = False
) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """`rftstream run` of this plan, its slots shared among so many explorers; its run folder and process. Nothing is
    admitted before `begin`. `by_hand`: somebody else starts the explorers."""
    file = folder / f"{name}.toml"
    file.write_text(
        RUN_FILE.format(
            name=name,
            plan=plan,
            explorers=0 if by_hand else explorers,
            concurrent=plan.slots // explorers,
            partitions=partitions,
            mean_tokens=float(MEAN_TOKENS),
            sigma=SIGMA,
            max_tokens=MAX_TOKENS,
        ),
        encoding="utf-8",
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "rftstream", "run", str(file), "--progress", "none", "--json"],
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    run_dir = folder / "runs" / name
    try:
        _until(lambda: RunFolder(run_dir).exists(), f"the run {name}", process)
        _ask(run_dir, DesiredState.paused)
        yield run_dir, process
    finally:
        process.kill()  # its workers end with it
        process.wait()


def begin(run_dir: Path, process: subprocess.Popen[bytes], explorers: Sequence[str]) -> None:
    """Lets the feeder admit as soon as everybody is up, so that how long processes take to start is no part of what is
    measured."""
    names = [*(f"{role}-0" for role in ("feeder", "verifier", "buffer", "trainer")), *explorers]
    for name in names:
        log = run_dir / "logs" / f"{name}.log"
        _until(lambda log=log: log.exists() and " started" in log.read_text(), f"the start of {name}", process)  # type: ignore[misc]
    quiet_by = time.monotonic() + QUIET_LIMIT_S
    while not _is_quiet(psutil.Process(process.pid)) and time.monotonic() < quiet_by:
        pass  # on a busy machine nobody ever is
    with flow_of(run_dir) as flow:
        if flow.tasks:
            raise RuntimeError(f"{run_dir}: tasks were admitted before all were up, expected none; measure again")
    _ask(run_dir, DesiredState.running)


def _is_quiet(run: psutil.Process) -> bool:
    """Nobody is at work or waits for a processor, but for a look now and then: rewards, too, are ready by then."""
    at_work: Counter[int] = Counter()
    for _ in range(NUM_LOOKS):
        for process in [run, *run.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                at_work[process.pid] += process.status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)
        time.sleep(LOOK_S)
    return max(at_work.values()) <= NUM_LOOKS // 5


def _ask(run_dir: Path, state: DesiredState) -> None:
    run = open_run(run_dir)
    try:
        ask_state(run, state)
    finally:
        run.transport.close()


def _until(ready: Callable[[], bool], what: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while not ready():
        if time.monotonic() > deadline or process.poll() is not None:
            raise RuntimeError(f"waited in vain for {what}; see its logs")
        time.sleep(0.02)


@dataclass(frozen=True)
class Flow:
    """What a log says of its run."""

    transport: Transport

    @cached_property
    def tasks(self) -> list[Task]:
        return [one for one in self._messages("tasks") if isinstance(one, Task)]

    @cached_property
    def rollouts(self) -> list[Rollout]:
        return [one for one in self._messages("rollouts") if isinstance(one, Rollout)]

    @cached_property
    def steps(self) -> list[StepRecord]:
        """Trained ones."""
        return [one for one in self._messages("steps") if isinstance(one, StepRecord) and not one.resumed]

    @cached_property
    def outcomes(self) -> list[GroupOutcome]:
        return [one for one in self._messages("outcomes") if isinstance(one, GroupOutcome) and not one.late]

    @cached_property
    def experiences(self) -> list[Experience]:
        return [one for one in self._messages("batches") if isinstance(one, Experience)]

    @property
    def wall_s(self) -> float:
        """From the first token to the last step."""
        return self.steps[-1].recorded_at - min(one.started_at for one in self.rollouts)

    @property
    def expired_share(self) -> float:
        """Of the groups that something became of."""
        return sum(one.result is GroupResult.expired for one in self.outcomes) / max(1, len(self.outcomes))

    def _messages(self, topic: str) -> list[Message]:
        return [one.message for one in Log(self.transport).messages(topic) if one.message is not None]


@contextmanager
def flow_of(run_dir: Path) -> Iterator[Flow]:
    transport = open_run(run_dir).transport
    try:
        yield Flow(transport)
    finally:
        transport.close()


def tokens_of(seed: int) -> int:
    """Of the completion of a task with this seed."""
    return min(max(made_up_tokens(MEAN_TOKENS, SIGMA, seed), 2), MAX_TOKENS)
