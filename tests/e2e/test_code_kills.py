"""Verifiers and servers of sandboxes that are killed while hostile programs run: nothing of them is left."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from rftstream.sandbox import cgroups, layers, run_program
from rftstream.sandbox.base import Outcome
from rftstream.sandbox.remote import RemoteBackend
from rftstream.sandbox.run import ProgramResult
from tests.e2e.workplace import FAKE, Process, Workplace, sets

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(layers.missing_text() is not None, reason="this machine has no sandbox"),
]

BODIES = {
    "honest": "",
    "daemons": """
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1000)
    time.sleep(0.3)""",
    "spins": "\n    while True: os.getpid()",
    "fills": """
    for folder in ('/tmp', '/dev/shm', '/box'):
        with open(folder + '/x', 'wb') as file: file.write(bytes(4 << 20))
    time.sleep(0.3)""",
    "waits": "\n    os.fork()\n    time.sleep(1000)",
}
"""What a function does before it returns what the policy completes it with."""

CODE = (
    FAKE.replace('source = "arithmetic"', 'source = "jsonl:functions.jsonl"\nreward = "code"')
    + """
[rewards.code]
wall_s = 1.0
cpu_s = 1.0
[verifier]
count = 2
"""
)
SLEEPER = "import os, time\nos.fork()\nopen('/tmp/x', 'wb').write(bytes(1 << 20))\ntime.sleep(1000)"
KILLS = 3


def write_problems(place: Workplace) -> None:
    rows = [
        {
            "prompt": f"import os, signal, time\ndef f(x):{BODIES[name]}\n    return ",
            "test": f"assert f(1) < {5 + place % 3}",
            "entry_point": "f",
        }
        for place, name in enumerate([*BODIES, "honest", "daemons"])
    ]
    place.write_lines("functions.jsonl", rows)


def family(pid: int) -> list[psutil.Process]:
    """A process and all that it has started. None of them if it is gone."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def runs_a_program(pid: int) -> bool:
    """Whether a box is there: the warm interpreter has a child, which has children of its own."""
    deep = 0
    for process in family(pid):
        with contextlib.suppress(psutil.Error, ValueError):  # gone meanwhile, or the process itself
            deep = max(deep, [one.pid for one in process.parents()].index(pid))
    return deep >= 4


def owner_name(process: psutil.Process) -> str:
    """How cgroups name the process that owns them. Numbers of processes come again, with its start they do not."""
    return f"{process.pid}-{cgroups.start_time(process.pid)}"


def groups_of(owners: set[str]) -> list[Path]:
    """The cgroups that these processes have made."""
    parents = cgroups.find_parents()
    folders = parents.by_controller.values() if parents else ()
    found = [folder for parent in folders for folder in parent.glob(f"{cgroups.PREFIX}*")]
    return [folder for folder in found if folder.name.removeprefix(cgroups.PREFIX).rpartition("-")[0] in owners]


def mounts(place: Workplace) -> set[str]:
    """File systems that are mounted, but for those of other tests."""
    others, lines = str(place.folder.parents[1]), Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    return {line for line in lines if str(place.folder) in line or others not in line}


@pytest.mark.sampled(5, "kills")
def test_verifiers_are_killed_at_any_moment_and_nothing_of_them_is_left(place: Workplace) -> None:
    write_problems(place)
    place.write("tiny.toml", CODE)
    scratch = place.folder / "scratch"
    scratch.mkdir()
    seed, before = random.randrange(10**6), mounts(place)
    print(f"seed {seed}")
    chance = random.Random(seed)
    run = place.start("run", "tiny.toml", "--json", *sets("run.steps=100000"), env={"TMPDIR": str(scratch)})
    view = place.view("runs/tiny")
    killed: list[psutil.Process] = []
    owners: set[str] = set()
    for number in range(KILLS):
        name = f"verifier-{number % 2}"

        def busy(name: str = name) -> int | None:
            worker = place.worker(name)
            return worker.pid if worker is not None and runs_a_program(worker.pid) else None

        pid = place.wait_for(lambda: busy() or not run.alive, f"a program of {name}")
        assert run.alive, run.err
        time.sleep(chance.uniform(0.0, 0.5))
        killed += family(pid)
        owners.update(map(owner_name, killed))
        with contextlib.suppress(ProcessLookupError):
            psutil.Process(pid).kill()

    def see() -> bool:
        workers = [worker for number in range(2) if (worker := place.worker(f"verifier-{number}")) is not None]
        owners.update(owner_name(process) for worker in workers for process in family(worker.pid))
        return {0.0, 1.0} <= {one.verdict.reward for one in view.verified() if one.verdict is not None}

    place.wait_for(see, "programs that pass and some that do not")
    place.wait_for(lambda: see() and view.curve().version >= 2, "two steps")
    run.send(signal.SIGINT)
    place.wait_for(lambda: see() and not run.alive, "the end of the run")
    done = run.finish()
    assert done.code == 0, done.err
    assert len({process.pid for process in killed}) > KILLS * 4

    report = view.assert_nothing_lost()
    assert report.rollouts.dead == 0, "whose verifier was killed is scored by another one"
    assert report.groups.trained >= 4
    _, alive = psutil.wait_procs(killed, timeout=60)
    assert not alive
    place.wait_for(lambda: not groups_of(owners), "the end of all cgroups, also of those that ended by themselves")
    assert not list(scratch.iterdir())
    assert not mounts(place) - before
    place.assert_nobody_left()


def start_server(place: Workplace, *arguments: str) -> tuple[Process, str]:
    server = place.start("sandbox", "serve", "--address", "127.0.0.1:0", "--slots", "2", *arguments)
    said = place.wait_for(lambda: server.out.strip() or not server.alive, "the server's address")
    assert server.alive, server.err
    return server, str(said).split()[-1]


def ask_for(url: str, results: list[ProgramResult], source: str = SLEEPER, expected: str | None = None) -> None:
    with contextlib.closing(RemoteBackend(url)) as backend:
        results.append(run_program(source, expected=expected, backend=backend))


@pytest.mark.sampled(5, "kills")
def test_a_server_is_killed_and_nothing_of_it_is_left(place: Workplace) -> None:
    for late_s in (0.0, random.uniform(0.0, 0.5)):
        server, url = start_server(place)
        results: list[ProgramResult] = []
        ask = threading.Thread(target=ask_for, args=(url, results))
        ask.start()
        place.wait_for(lambda: runs_a_program(server.pid), "a program")  # noqa: B023
        time.sleep(late_s)
        killed = family(server.pid)
        owners = set(map(owner_name, killed))
        server.send(signal.SIGKILL)
        server.finish()
        ask.join()
        assert (results[0].outcome, results[0].reason) == (Outcome.unscorable, "sandbox")
        _, alive = psutil.wait_procs(killed[1:], timeout=60)
        assert not alive
        place.wait_for(lambda: not groups_of(owners), "the end of its cgroups")  # noqa: B023
    server, url = start_server(place)
    after: list[ProgramResult] = []
    ask_for(url, after, "print(1)", "1")
    assert after[0].passed
    owner = owner_name(psutil.Process(server.pid))
    server.send(signal.SIGTERM)
    assert server.finish().code == 0
    assert not groups_of({owner})
