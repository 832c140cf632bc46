"""Places in a real Docker: their limits, their network, what ends a rollout, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from rftstream.contracts.tasks import Problem
from rftstream.environments.harbor.agent import HarborAgent, HarborConfig
from rftstream.environments.hosts.agents import AgentResult, AgentWork
from rftstream.environments.places.base import PlaceLimits, PlaceOrder, PlaceSettings, PlaceSource
from rftstream.environments.places.docker import DockerPlace, DockerPlaces
from rftstream.errors import HostedCodeError, HostError
from tests.docker_engine import docker, places_left, start_engine
from tests.loopback import HttpServer
from tests.places import ASK, CONNECT, MANY, ends_what_takes_too_long, made_model, takes_commands_and_files
from tests.proxy import DROPPED, Proxy
from tests.ssh_server import ssh_server
from tests.surroundings import ROOT
from tests.unit.data.test_harbor_tasks import EXAMPLES, NAMES, task_at
from tests.unit.data.test_tasksets_sources import open_source
from tests.unit.environments.places.test_bubblewrap import program_of_another_processor
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.anyio, pytest.mark.timeout(1200)]

IMAGE = "python:3.12-slim"


@pytest.fixture(autouse=True)
def engine() -> Iterator[None]:
    start_engine()
    before = docker("ps", "--all", "--quiet", "--filter", "status=exited")
    yield
    wait_until(lambda: places_left() == [])  # the engine may be removing one by itself
    assert docker("ps", "--all", "--quiet", "--filter", "status=exited") == before, "of builds that failed"


@pytest.fixture
def model() -> Iterator[HttpServer]:
    with made_model() as found:
        yield found


@pytest.fixture
async def place(model: HttpServer) -> AsyncIterator[DockerPlace]:
    limits = PlaceLimits(memory_mb=256, disk_mb=64, pids=64)
    order = PlaceOrder(
        source=PlaceSource(image=IMAGE), limits=limits, model_url=f"{model.url}/v1", variables={"OF_ALL": "1"}
    )
    made = await DockerPlaces(PlaceSettings()).create(order)
    yield made
    await made.close()


async def test_a_place_runs_commands_and_takes_and_gives_files(place: DockerPlace, tmp_path: Path) -> None:
    await takes_commands_and_files(place, tmp_path)


async def test_it_reaches_the_model_and_nothing_else(place: DockerPlace) -> None:
    assert not place.has_called
    assert (await place.run(ASK, timeout_s=60)).output == "asked for /v1/x\n"
    assert place.has_called
    others = f"for i in 1.1.1.1 10.0.2.2 172.17.0.1; do {CONNECT} $i 80; done"
    assert (await place.run(others, timeout_s=60)).output.count("Network is unreachable") == 3


async def test_limits(place: DockerPlace) -> None:
    await ends_what_takes_too_long(place)
    forks = await place.run("for i in $(seq 200); do sleep 3 & done; wait", timeout_s=120)
    assert "Resource temporarily unavailable" in forks.output
    memory = await place.run("python3 -c 'x = bytearray(400 << 20)'", timeout_s=120)
    assert memory.exit_code == 137
    assert (await place.run("nproc; head -c 90000000 /dev/zero > /one; stat -c %s /one", timeout_s=60)).output.endswith(
        f"{64 << 20}\n"
    )
    with pytest.raises(HostedCodeError, match=r"the place was ended: it wrote .* MB, expected at most 64"):
        await place.run(MANY, timeout_s=120)
    with pytest.raises(HostedCodeError, match="the place was ended"):
        await place.run("true", timeout_s=60)


@pytest.mark.parametrize("part", ["container", "relay", "run", "exec"])
async def test_a_place_that_is_killed_is_lost(place: DockerPlace, part: str) -> None:
    """Or the engine's command that keeps it, or runs its command: what this has done may be half of it."""
    running = asyncio.create_task(place.run("echo half; sleep 600", timeout_s=600))
    await asyncio.to_thread(wait_until, lambda: clients("exec"))
    match part:
        case "container" | "relay":
            docker("kill", place._name + {"container": "", "relay": "-relay"}[part])
        case "run":
            clients("run")[0].kill()
        case "exec":
            clients("exec")[0].kill()
    with pytest.raises(HostError, match=r"the place has (ended|lost)"):
        await running


def clients(word: str) -> list[psutil.Process]:
    """Return the engine's commands that this process has started with this word."""
    return [one for one in psutil.Process().children() if one.status() != "zombie" and one.cmdline()[1:2] == [word]]


# ------------------------------------------------------------------------------------------ tasks


async def rehearsed(problem: Problem) -> AgentResult | None:
    return await HarborAgent(HarborConfig(command="true")).rehearse(problem)


async def attempted(problem: Problem, model: HttpServer, command: str, **settings: Any) -> AgentResult:
    work = AgentWork(problem=problem, base_url=f"{model.url}/v1", api_key="key", seed=1, rollout_id="a/0", run_id="r")
    return await HarborAgent(HarborConfig(command=command, **settings)).run(work)


async def test_solutions_of_the_examples_get_1_and_doing_nothing_gets_what_it_is_worth(model: HttpServer) -> None:
    """The numbers are those of Harbor 0.26 on the same engine, by its agents `oracle` and `nop`."""
    taskset = open_source(f"harbor:{EXAMPLES}")
    parts = {"broken-slug": {"fixed": 1, "limit": 1, "committed": 1}, "fix-median": {"cases": 6}}
    untouched = {"fix-median": (pytest.approx(1 / 3), {"cases": 2})}
    untouched["broken-slug"] = (0.0, {"fixed": 0, "limit": 1, "committed": 0})
    for index, name in enumerate(NAMES):
        problem = taskset.problem(index)
        found = await rehearsed(problem)
        assert found is not None and (found.reward, found.parts) == (1.0, parts.get(name, {})), name
        idle = await attempted(problem, model, ASK)
        assert (idle.reward, idle.parts) == untouched.get(name, (0.0, {})), name


BAD: dict[str, tuple[dict[str, str], str, str | float]] = {
    "a Dockerfile that does not build": (
        {"dockerfile": f"FROM {IMAGE}\nRUN echo no such; false"}, ASK, "does not build: .*returned a non-zero code: 1",
    ),
    "an image of another architecture": (
        {"dockerfile": "FROM scratch\nCOPY sh /bin/sh"}, ASK, "is not for this engine's processor: .*exec format error",
    ),
    "an image that is nowhere": (
        {"toml": '[environment]\ndocker_image = "localhost:1/none:1"'}, ASK, "localhost:1/none:1 cannot be pulled",
    ),
    "tests that hang": (
        {"test": "#!/bin/sh\nsleep 600", "toml": "[verifier]\ntimeout_sec = 2.0"}, ASK, "longer than 2 s",
    ),
    "no reward": ({"test": "#!/bin/sh\necho sorry; exit 4"}, ASK, "wrote no reward, .*exit code 4: sorry"),
    "tests without a shell": ({"test": "#!/no/shell\n"}, ASK, "wrote no reward.*exit code 127"),
    "a reward of another kind": ({"test": "#!/bin/sh\necho inf > /logs/verifier/reward.txt"}, ASK, "got 'inf"),
    "a link for a reward": ({"test": "#!/bin/sh\nln -s /dev/zero /logs/verifier/reward.txt"}, ASK, "wrote no reward"),
    "a reward that the agent writes": ({}, f"{ASK}; echo 1 > /logs/verifier/reward.json; mkdir /tests", 0.0),
    "no call": ({}, "echo thinking", "the agent never called the model: exit code 0: thinking"),
    "a command that is not there": ({}, "no-such-agent", "never called the model: exit code 127: .*not found"),
    "a network that it does not get": ({}, f"{ASK}; pip download -q --retries 0 six || exit 9", 0.0),
    "a call after its end": (
        {"test": "#!/bin/sh\nuntil [ -e /late ]; do sleep 0.1; done\ngrep -c asked /late > /logs/verifier/reward.txt"},
        f"{ASK}; (until [ -e /tests/test.sh ]; do sleep 0.1; done; {ASK} >/tmp/late 2>&1; mv /tmp/late /late) &",
        0.0,
    ),
    "a full disk": ({}, f"{ASK}; {MANY}", "the place was ended: it wrote .* MB, expected at most 64"),
    "forks without end": (
        {}, f"{ASK}; for i in $(seq 300); do sleep 600 & done", "no more commands|cannot be prepared|no reward",
    ),
    "an agent that hangs": ({"toml": "[agent]\ntimeout_sec = 30.0"}, f"{ASK}; sleep 600", 0.0),
    "an install step that fails": ({}, ASK, "the harness's install step does not build"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
async def test_bad_input_ends_with_a_reason(tmp_path: Path, model: HttpServer, case: str) -> None:
    files, command, expected = BAD[case]
    folder = task_at(tmp_path / "task", **files)
    if "architecture" in case:
        (folder / "environment" / "sh").write_bytes(program_of_another_processor())
        (folder / "environment" / "sh").chmod(0o755)
    problem = open_source(f"harbor:{folder}").problem(0)
    settings: dict[str, Any] = {"disk_mb": 64, "pids": 100, "memory_mb": 400}
    settings |= {"install": "exit 7"} if "install" in case else {}
    if isinstance(expected, float):
        found = await attempted(problem, model, command, **settings)
        assert found.reward == expected
        assert found.metrics.get("agent_late_calls", 0.0) == float(case == "a call after its end")
    else:
        with pytest.raises(HostedCodeError, match=f"(?i){expected}"):
            await attempted(problem, model, command, **settings)


async def test_a_solution_that_fails_says_how(tmp_path: Path) -> None:
    folder = task_at(tmp_path / "task", test="#!/bin/sh\nfalse")
    (folder / "solution" / "solve.sh").write_text("#!/bin/sh\necho cannot; exit 5\n")
    with pytest.raises(HostedCodeError, match=r"wrote no reward.* solve.sh before: exit code 5: cannot"):
        await rehearsed(open_source(f"harbor:{folder}").problem(0))


# ------------------------------------------------------------------------------------------ deaths

OWNER = """
import asyncio
from rftstream.environments.places.base import PlaceOrder, PlaceSettings, PlaceSource
from rftstream.environments.places.docker import DockerPlaces

async def main():
    order = PlaceOrder(source=PlaceSource(image="python:3.12-slim"), model_url="http://127.0.0.1:9/v1")
    places = DockerPlaces(PlaceSettings())
    made = [await places.create(order) for _ in range(2)]
    print("made", flush=True)
    await made[0].run("sleep 600", timeout_s=600)

asyncio.run(main())
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_when_the_owner_is_killed(end: signal.Signals) -> None:
    """Without anybody who sweeps: the containers end with the pipes of their owner."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert owner.stdout and owner.stdout.readline() == "made\n"
    assert len(places_left()) == 4
    os.kill(owner.pid, end)
    owner.wait()
    owner.stdout.close()
    wait_until(lambda: places_left() == [])


async def test_what_a_dead_engine_left_is_swept_at_the_next_start() -> None:
    """Of this machine's dead owners, and what has outlived its time; not of others."""
    import socket

    from rftstream.environments.places.docker import LABEL
    from rftstream.sandbox.cgroups import start_time

    here, me = socket.gethostname(), f"{os.getpid()} {start_time(os.getpid())}"
    owners = [f"{here} 999999 1 9999999999", f"{here} {me} 1", f"{here} {me} 9999999999", "elsewhere 1 1 9999999999"]
    for owner in owners:
        docker("run", "--detach", f"--label={LABEL}={owner}", IMAGE, "sleep", "600")
    try:
        await DockerPlaces(PlaceSettings()).sweep()
        assert len(places_left()) == 2
    finally:
        for name in places_left():
            docker("rm", "--force", name)


async def test_a_build_that_is_killed_is_tried_again_at_once() -> None:
    """It is no fault of the Dockerfile's."""
    places = DockerPlaces(PlaceSettings())
    order = PlaceOrder(source=PlaceSource(image=IMAGE, install=f"sleep 3; : {secrets.token_hex(8)}"))
    creating = asyncio.create_task(places.create(order))
    await asyncio.to_thread(wait_until, lambda: clients("build"))
    clients("build")[0].kill()
    with pytest.raises(HostError, match="build was killed by signal 9"):
        await creating
    await (await places.create(order)).close()


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The way to a machine `there`, which is this one, by ssh. Whoever serves what came that way is stopped at the end:
    it notices nothing while the network is cut."""
    with ssh_server(
        {name: os.environ[name] for name in ("PATH", "HOME", "DOCKER_HOST") if name in os.environ}
    ) as config:
        (port,) = re.findall(r"Port (\d+)\n  User", config.read_text())
        proxy = Proxy(f"http://127.0.0.1:{port}")
        ssh = tmp_path / "bin" / "ssh"
        ssh.parent.mkdir()
        ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {config} -p {urlsplit(proxy.url).port} "$@"\n')
        ssh.chmod(0o755)
        monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")
        monkeypatch.setenv("SSHD_PID", (config.parent / "sshd.pid").read_text().strip())
        try:
            yield proxy
        finally:
            proxy.close()
            for one in serving():
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()


def serving() -> list[psutil.Process]:
    return psutil.Process(int(os.environ["SSHD_PID"])).children(recursive=True)


async def test_a_place_elsewhere_is_lost_with_its_network(network: Proxy, model: HttpServer, tmp_path: Path) -> None:
    """Its containers, whose machine has not noticed, are removed when the network is back."""
    places = DockerPlaces(PlaceSettings(engine_host="ssh://there"))
    order = PlaceOrder(source=PlaceSource(image=IMAGE), model_url=f"{model.url}/v1")
    place = await places.create(order)
    assert (await place.run(ASK, timeout_s=240)).output == "asked for /v1/x\n"
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a").write_text("b")
    await place.put(tmp_path / "files", "/files")
    assert await place.get("/files/a", max_bytes=9) == b"b"
    running = asyncio.create_task(place.run("echo half | tee /half; sleep 600", timeout_s=600))
    await asyncio.to_thread(wait_until, lambda: docker("exec", place._name, "sh", "-c", "cat /half || true") == "half")
    for one in serving():
        with contextlib.suppress(psutil.NoSuchProcess):
            one.suspend()
    network.fail(always=DROPPED)
    with pytest.raises(HostError, match=r"the place has (ended|lost)"):
        await running
    await place.close()
    lost = set(places_left())
    assert lost == {place._name, f"{place._name}-relay"}
    creating = asyncio.create_task(places.create(order))
    await asyncio.to_thread(wait_until, lambda: network.num_connections > 3)
    network.fail()
    other = await creating
    assert set(places_left()) == {other._name, f"{other._name}-relay"}
    await other.close()


async def test_a_cancelled_rollout_leaves_nothing(model: HttpServer) -> None:
    """At whatever moment: while the place is made, while the agent runs, while it is closed."""
    problem = open_source(f"harbor:{EXAMPLES}", options={"only": ["find-token"]}).problem(0)
    moments: list[Callable[[], bool]] = [
        lambda: len(places_left()) == 1, lambda: len(places_left()) == 2, lambda: bool(model.asked)
    ]  # fmt: skip
    for is_time in moments:
        model.asked.clear()
        running = asyncio.create_task(attempted(problem, model, f"{ASK}; sleep 600"))
        await asyncio.to_thread(wait_until, is_time)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert places_left() == []
