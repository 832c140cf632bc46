"""A trainer of two ranks on two hosts, started as DeepSpeed's launcher starts them; the second rank's host dies. Then
both go on elsewhere from a checkpoint; or the first goes on alone, and another host's rank joins it."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rftstream.config import loader
from rftstream.contracts.versions import StepRecord
from rftstream.errors import TransportError
from rftstream.models.folders.folder import prepare_model
from tests.e2e.workplace import COMMAND, RunView
from tests.faults.laws import Facts, check_the_end
from tests.faults.rig import run_file
from tests.hosts.network import Output
from tests.hosts.rig import END_S, WORKERS, Hosts

PLACES = {"feeder": "alpha", "buffer": "alpha", "evaluator": "alpha", "explorer": "beta", "verifier": "beta"}
FIRST, SECOND, NEXT = "gamma", "delta", "spare"
"""Hosts of the ranks, and the host on which the second one is started when its own is gone."""
MASTER_PORT = 29500
TIMEOUT_S = 30.0
"""How long ranks wait for one another."""
KILLED_AT = 3
"""Version at which the second rank's host dies. There are checkpoints of every second one."""
WITHIN_S = 60.0
"""The role ends on the first host no later than that."""
MODEL = {"characters": "0123456789+-*/= ?.abcdefghijklmnopqrstuvwxyz", "width": 16, "context": 256}
DEEPSPEED = f"""[backends.deepspeed]
stage = 1
timeout_s = {TIMEOUT_S}
"""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What came of it."""

    facts: Facts
    ended_after_s: float
    """From the death of the host to the end of the role."""
    code: int
    said: str
    """What the first host's launcher and trainer said."""
    steps: list[StepRecord]
    """All of them, those at which a trainer began included."""
    sizes: list[int]
    """Number of ranks that each trained version was computed by."""

    def to_text(self) -> str:
        began = [f"{step.name.trainer_epoch}/{step.name.version}" for step in self.steps if step.resumed]
        return json.dumps({
            "ranks": max(self.sizes), "versions": len(self.sizes), "began_at": began, "exit": self.code,
            "ended_after_s": round(self.ended_after_s, 1), "lost": self.facts.num_lost,
        })  # fmt: skip


@dataclass(frozen=True, slots=True)
class ElasticFacts:
    """What came of a trainer whose ranks may change."""

    facts: Facts
    went_on_after_s: float
    """From the death of the host to the next version."""
    epochs: list[int]
    """Epochs of the trainer."""
    sizes: list[int]
    """Number of ranks that each trained version was computed by."""

    def to_text(self) -> str:
        return json.dumps({
            "ranks": self.sizes, "epochs": self.epochs, "went_on_after_s": round(self.went_on_after_s, 1),
            "lost": self.facts.num_lost,
        })  # fmt: skip


def train_on_two_hosts(hosts: Hosts, name: str) -> RankFacts:
    """Train until a host dies, go on with another one, and return what came of it when the run has ended."""
    with _run(hosts, name) as (view, first, second):
        died_at = _let_second_die(hosts, view, first, second)
        code = _end(first)
        ended_after_s = time.monotonic() - died_at
        first_again, second_again = _launch(hosts, FIRST, NEXT)
        _wait(lambda: _is_finished(view), first_again, second_again)
        for launched in (first_again, second_again):
            assert _end(launched) == 0, launched.err.read_text()
        said = first.out.read_text() + first.err.read_text()
        return RankFacts(check_the_end(view), ended_after_s, code, said, _steps(view), _sizes(view))


def go_on_without_a_host(hosts: Hosts, name: str) -> ElasticFacts:
    """Train until a host dies, on with those that are left, and then with one of another host, to the run's end."""
    with _run(hosts, name, more="min_ranks = 1\nlast_call_s = 10\n", passes=4) as (view, first, second):
        died_at = _let_second_die(hosts, view, first, second)
        version = _version(view)
        _wait(lambda: _version(view) > version + 1, first)  # the step of a version may have been on its way
        went_on_after_s = time.monotonic() - died_at
        joined = _launch_one(hosts, 1, NEXT, first=FIRST)
        _wait(lambda: _sizes(view)[-1] == 2 or _is_finished(view), first, joined)
        _wait(lambda: _is_finished(view), first, joined)
        for launched in (first, joined):
            assert _end(launched) == 0, launched.err.read_text()
        epochs = sorted({step.name.trainer_epoch for step in _steps(view)})
        return ElasticFacts(check_the_end(view), went_on_after_s, epochs, _sizes(view))


@contextlib.contextmanager
def _run(hosts: Hosts, name: str, more: str = "", passes: int = 1) -> Iterator[tuple[RunView, Output, Output]]:
    """A run with two ranks, which are started. `more`: settings of the backend."""
    network = hosts.network
    text = run_file(name).replace('path = "fake"', 'path = "model"').replace('policy = "fake"', 'policy = "hf"')
    text = text.replace('backend = "fake"', 'backend = "deepspeed"')
    text = text.replace("[transport]", f"{DEEPSPEED}{more}[transport]")
    text = text.replace("passes = 1", f"passes = {passes}")
    model = _make_model(network["alpha"].folder / "made")
    for each in WORKERS:
        shutil.copytree(model, network[each].folder / "model", dirs_exist_ok=True)
    hosts.make_run(name, text, home=NEXT)
    home = network[NEXT]
    with home.inside():
        view = RunView(home.folder / "runs" / name)
    try:
        for role, host in PLACES.items():
            network[host].start(COMMAND, "worker", "run.toml", "--role", role)
        first, second = _launch(hosts, FIRST, SECOND)
        with home.inside():
            yield view, first, second
    finally:
        for each in WORKERS:
            network.down(each)
            network.up(each)
        view.close()


def _let_second_die(hosts: Hosts, view: RunView, first: Output, second: Output) -> float:
    """Return when."""
    _wait(lambda: _version(view) >= KILLED_AT, first, second)
    assert first.alive and second.alive, hosts.network.report()
    hosts.network.down(SECOND)
    return time.monotonic()


def _steps(view: RunView) -> list[StepRecord]:
    return [one for one in view.messages("steps") if isinstance(one, StepRecord)]


def _sizes(view: RunView) -> list[int]:
    return [int(one.metrics["ranks"]) for one in _steps(view) if "ranks" in one.metrics]


def _make_model(folder: Path) -> Path:
    run = loader.from_dict({
        "run": {"name": "made", "steps": 1}, "model": {"make": MODEL}, "tasksets": {"sums": {"source": "arithmetic"}},
        "base": str(folder.parent),
    })  # fmt: skip
    return prepare_model(run.model, folder, run.run.seed).folder


def _launch(hosts: Hosts, first: str, second: str) -> tuple[Output, Output]:
    """Start on each host what `deepspeed --hostfile` starts there over ssh."""
    return _launch_one(hosts, 0, first, first=first, second=second), _launch_one(
        hosts, 1, second, first=first, second=second
    )


def _launch_one(hosts: Hosts, number: int, host: str, *, first: str, second: str = NEXT) -> Output:
    names = [hosts.network[each].address for each in (first, second)]
    world = base64.urlsafe_b64encode(json.dumps({name: [0] for name in names}).encode()).decode()
    return hosts.network[host].start(
        sys.executable, "-m", "deepspeed.launcher.launch", f"--world_info={world}", f"--node_rank={number}",
        f"--master_addr={names[0]}", f"--master_port={MASTER_PORT}", "--no_local_rank", "--module",
        "rftstream.backends.deepspeed.rank", "worker", "run.toml", "--role", "trainer",
        env={"DS_ACCELERATOR": "cpu"},
    )  # fmt: skip


def _wait(condition: Callable[[], bool], *programs: Output) -> None:
    deadline = time.monotonic() + END_S
    while not condition():
        ended = [program.err.read_text()[-3000:] for program in programs if not program.alive]
        if ended and not condition():
            raise AssertionError("a rank's launcher ended:\n" + "\n".join(ended))
        assert time.monotonic() < deadline, f"not within {END_S:g} s"
        time.sleep(0.2)


def _end(launched: Output) -> int:
    """Wait for the end of a rank's launcher, longer than it may take; return its exit code."""
    try:
        return launched.end(3 * WITHIN_S)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"it goes on after {3 * WITHIN_S:g} s: {launched.err.read_text()[-3000:]}") from None


def _version(view: RunView) -> int:
    with contextlib.suppress(TransportError):
        return view.curve().version
    return -1


def _is_finished(view: RunView) -> bool:
    with contextlib.suppress(TransportError):
        return view.control().finished is not None
    return False
