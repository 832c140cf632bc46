"""Places in bubblewrap: their files, their network, their limits, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from rftstream.environments.harbor.agent import HarborAgent, HarborConfig
from rftstream.environments.hosts.agents import AgentWork
from rftstream.environments.places import bubblewrap
from rftstream.environments.places.base import MODEL_PORT, PlaceLimits, PlaceOrder, PlaceSettings, PlaceSource
from rftstream.environments.places.bubblewrap import PREFIX, BubblewrapPlace, BubblewrapPlaces, sweep
from rftstream.errors import ConfigError, HostedCodeError, HostError
from tests.loopback import HttpServer
from tests.places import made_model
from tests.unit.data.test_harbor_tasks import task_at
from tests.unit.data.test_tasksets_sources import open_source
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

ASK = (
    f"exec 3<>/dev/tcp/127.0.0.1/{MODEL_PORT}; printf 'GET /v1/x HTTP/1.0\\r\\nHost: x\\r\\n\\r\\n' >&3; tail -n 1 <&3"
)
LIMITS = PlaceLimits(memory_mb=128, disk_mb=32, pids=64)


@pytest.fixture
def tmp_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that every user may enter: places run as users of their own."""
    with tempfile.TemporaryDirectory() as found:
        Path(found).chmod(0o755)
        monkeypatch.setattr(tempfile, "tempdir", found)
        yield Path(found)
        assert not list(Path(found).glob(f"{PREFIX}*"))
    monkeypatch.undo()


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path) -> None:
    """All places are made there."""


@pytest.fixture
def model() -> Iterator[HttpServer]:
    with made_model() as found:
        yield found


@pytest.fixture
async def place(model: HttpServer) -> AsyncIterator[BubblewrapPlace]:
    order = PlaceOrder(source=PlaceSource(), limits=LIMITS, model_url=f"{model.url}/v1", variables={"OF_ALL": "1"})
    made = await BubblewrapPlaces(PlaceSettings(root="/")).create(order)
    yield made
    await made.close()


async def test_a_place_runs_commands_and_takes_and_gives_files(place: BubblewrapPlace, tmp_path: Path) -> None:
    files = tmp_path / "files"
    (files / "a").mkdir(parents=True)
    (files / "a" / "b.sh").write_text('#!/bin/sh\necho "it runs: $1"\n')
    (files / "a" / "b.sh").chmod(0o755)
    await place.put(files, "/some/where")
    command = '/some/where/a/b.sh "$KEY $OF_ALL"; id -u; pwd; echo no >&2; exit 3'
    ran = await place.run(command, timeout_s=60, variables={"KEY": "x y"})
    assert (ran.exit_code, ran.output) == (3, "it runs: x y 1\n0\n/\nno\n")
    other = await place.run("id -u; pwd; sleep 600 & [[ 1 == 1 ]]", timeout_s=60, user="1000", cwd="/tmp")
    assert (other.exit_code, other.output) == (0, "1000\n/tmp\n"), "by bash, and what stays behind keeps nobody waiting"
    assert (await place.run("id -u", timeout_s=60, user="nobody")).output == "65534\n"
    assert await place.get("/some/where/a/b.sh", max_bytes=100) == (files / "a" / "b.sh").read_bytes()
    assert await place.get("/some/where", max_bytes=100) is None
    assert await place.get("/none", max_bytes=100) is None
    with pytest.raises(HostedCodeError, match="got more than 5 bytes"):
        await place.get("/some/where/a/b.sh", max_bytes=5)
    with pytest.raises(HostedCodeError, match="'eve' is not in"):
        await place.run("true", timeout_s=60, user="eve")


async def test_it_reaches_the_model_and_nothing_else(place: BubblewrapPlace, model: HttpServer) -> None:
    assert not place.has_called
    assert (await place.run(ASK, timeout_s=60)).output.strip() == "asked for /v1/x"
    assert place.has_called
    port = model.url.rpartition(":")[2]
    ran = await place.run(f"exec 3<>/dev/tcp/127.0.0.1/{port}", timeout_s=60)
    assert (ran.exit_code, "refused" in ran.output) == (1, True)


async def test_it_sees_and_changes_nothing_of_the_machine(place: BubblewrapPlace, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    for command in (
        f"cat {tmp_path}/secret",
        "touch /usr/x",
        "mount -o remount,rw /usr",
        "cat /etc/shadow",
        "ls /home/*",
        "grep -q 'py[t]est' /proc/[0-9]*/cmdline",
    ):
        ran = await place.run(command, timeout_s=60)
        assert ran.exit_code not in (0, None), command
    outside = tmp_path / "outside"
    await place.run(f"mkdir -p /lead && ln -s {outside} /lead/there", timeout_s=60)
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "f").write_text("x")
    with contextlib.suppress(HostError):
        await place.put(tmp_path / "more", "/lead/there")
    assert not outside.exists()


def commands_of_the_machine() -> str:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            found.append(path.read_text(errors="replace"))
    return "\n".join(found)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("sleep MARK", None),
        ("sleep MARK & setsid sleep MARK & sleep MARK", None),
        ("head -c 60000000 /dev/zero > /big", "File size limit exceeded"),
    ],
)
async def test_what_takes_too_long_or_too_much_ends(place: BubblewrapPlace, command: str, said: str | None) -> None:
    mark, secret = f"600.{os.getpid()}", f"secret of {os.getpid()}"
    running = asyncio.create_task(
        place.run(command.replace("MARK", mark), timeout_s=60 if said else 1, variables={"KEY": secret})
    )
    while not running.done():
        assert secret not in commands_of_the_machine()
        await asyncio.sleep(0.05)
    ran = running.result()
    assert (ran.exit_code is None, (said or "") in ran.output) == (said is None, True)
    async with asyncio.timeout(120):
        while mark in commands_of_the_machine():
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("part", ["command", "relay"])
async def test_a_command_that_is_killed_from_outside_is_lost(place: BubblewrapPlace, part: str) -> None:
    """What it has done may be half of it. Without its model an agent could only wait."""
    running = asyncio.create_task(place.run("touch /half; sleep 600", timeout_s=600))
    await asyncio.to_thread(wait_until, (place._folder / "half").exists)
    assert place._relay is not None
    os.kill((place._relay if part == "relay" else next(iter(place._running))).pid, signal.SIGKILL)
    with pytest.raises(HostError, match="the place has lost"):
        await running


async def test_a_place_that_writes_too_much_is_ended(place: BubblewrapPlace) -> None:
    with pytest.raises(HostedCodeError, match="expected at most 32"):
        await place.run("for i in 1 2 3 4; do head -c 20000000 /dev/zero > $i; done; sleep 600", timeout_s=120)
    with pytest.raises(HostedCodeError, match="the place was ended"):
        await place.run("true", timeout_s=60)


async def test_a_root_of_ones_own_is_copied_for_each_place(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "app").mkdir(parents=True)
    (root / "app" / "data").write_text("as it was")
    for name in ("usr", "lib", "lib64", "bin"):
        if Path("/", name).is_symlink():
            (root / name).symlink_to(os.readlink(Path("/", name)))
    subprocess.run(["cp", "-a", "--parents", *_programs(), str(root)], check=True, cwd="/")
    places = BubblewrapPlaces(PlaceSettings(root=str(root)))
    for _ in range(2):
        place = await places.create(PlaceOrder(source=PlaceSource(), limits=LIMITS))
        try:
            assert await place.get("/app/data", max_bytes=100) == b"as it was"
            assert (await place.run("echo changed > /app/data; cat /app/data", timeout_s=60)).output == "changed\n"
            assert await place.get("/app/data", max_bytes=100) == b"changed\n"
        finally:
            await place.close()


def _programs() -> list[str]:
    """A shell, a few programs, and the libraries that they need, by their real paths."""
    programs = [os.path.realpath(shutil.which(name) or "") for name in ("sh", "bash", "cat", "head", "tar")]
    said = subprocess.run(["ldd", *programs], capture_output=True, text=True).stdout
    libraries = {word for word in said.split() if word.startswith("/") and not word.endswith(":")}
    named = {f"/usr/bin/{name}" for name in ("sh", "bash", "cat", "head", "tar")}
    real = {os.path.realpath(path) for path in libraries}
    links = {os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path)) for path in libraries}
    return sorted({*programs, *named, *real, *links})


def program_of_another_processor() -> bytes:
    """Return this machine's shell with the number of another processor in its head, BPF's, that no machine emulates."""
    data = bytearray(Path("/bin/sh").read_bytes())
    data[18:20] = (247).to_bytes(2, "little")
    return bytes(data)


async def test_a_root_of_another_processor_is_the_reason(tmp_path: Path, model: HttpServer) -> None:
    programs = tmp_path / "root" / "usr" / "bin"
    programs.mkdir(parents=True)
    (tmp_path / "root" / "bin").symlink_to("usr/bin")
    (programs / "sh").write_bytes(program_of_another_processor())
    (programs / "sh").chmod(0o755)
    problem = open_source(f"harbor:{task_at(tmp_path / 'task')}").problem(0)
    agent = HarborAgent(HarborConfig(place="bubblewrap", root=str(tmp_path / "root"), command="true"))
    with pytest.raises(HostedCodeError, match=r"the place cannot be prepared: .*Exec format error"):
        await agent.run(AgentWork(problem=problem, base_url=f"{model.url}/v1", api_key="k", seed=0))


@pytest.mark.parametrize(
    ("settings", "order", "said"),
    [
        ({}, {}, "environments.harbor.root: got ''"),
        ({"root": "/nowhere"}, {}, "root: got '/nowhere', expected a folder with a root file system"),
        ({"root": "/"}, {"has_internet": True}, "'bubblewrap' has no internet"),
        ({"root": "/"}, {"source": PlaceSource(install="pip install x")}, "'bubblewrap' installs nothing"),
    ],
)
async def test_what_cannot_be_had(settings: dict[str, str], order: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        await BubblewrapPlaces(PlaceSettings(**settings)).create(PlaceOrder(**{"source": PlaceSource(), **order}))  # type: ignore[arg-type]
    assert said in str(refused.value)


async def test_files_that_take_too_long_are_the_hosts_trouble(place: BubblewrapPlace, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(bubblewrap, "START_S", 0.0)
        for asked in (place.get("/etc/passwd", max_bytes=9), place.put(tmp_path, "/there")):
            with pytest.raises(HostError, match=r"no end of \w+ within 0 s"):
                await asked


async def test_a_command_without_its_limits_does_not_run(place: BubblewrapPlace) -> None:
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(place, "_cgroup", SimpleNamespace(folders=["/nowhere"]))
        with pytest.raises(HostError, match="cannot get its limits"):
            await place.run("touch /ran", timeout_s=60)
    assert await place.get("/ran", max_bytes=10) is None


async def test_a_start_that_is_cancelled_ends_with_its_copying(monkeypatch: pytest.MonkeyPatch) -> None:
    began, ended, make = asyncio.Event(), threading.Event(), BubblewrapPlace._make
    loop = asyncio.get_running_loop()

    def copy(place: BubblewrapPlace) -> int:
        loop.call_soon_threadsafe(began.set)
        copied_bytes = make(place)
        ended.set()
        return copied_bytes

    monkeypatch.setattr(BubblewrapPlace, "_make", copy)
    starting = asyncio.create_task(BubblewrapPlaces(PlaceSettings(root="/")).create(PlaceOrder(source=PlaceSource())))
    await began.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert ended.is_set()


async def test_what_a_killed_owner_left_is_swept(tmp_path: Path) -> None:
    dead = tmp_path / f"{PREFIX}{socket.gethostname()}-{os.getpid()}-1-x"
    (dead / "closed").mkdir(parents=True)
    (dead / "closed" / "file").touch()
    (dead / "closed").chmod(0)
    await asyncio.to_thread(sweep)
    assert not dead.exists(), "the process of this id began at another time"


@pytest.mark.parametrize(("agent", "reward"), [(ASK, 1.0), ("exit 1", None)], ids=["asks", "never calls its model"])
async def test_an_agent_and_the_tests_of_its_task(
    agent: str, reward: float | None, tmp_path: Path, model: HttpServer
) -> None:
    """The agent writes what the model said, and the tests find it, in the task's own folder of the place."""
    test = "#!/bin/sh\ngrep -q 'asked for' /answer && echo 1 > /logs/verifier/reward.txt"
    task = task_at(tmp_path / "task", test=test)
    problem = open_source(f"harbor:{task}").problem(0)
    command = f"{agent} > /answer" if agent != ASK else f"({agent}) > /answer"
    harbor = HarborAgent(HarborConfig(place="bubblewrap", root="/", command=command, memory_mb=128, disk_mb=32))
    work = AgentWork(problem=problem, base_url=f"{model.url}/v1", api_key="k", seed=0)
    if reward is None:
        with pytest.raises(HostedCodeError, match="never called the model"):
            await harbor.run(work)
    else:
        assert (await harbor.run(work)).reward == reward
