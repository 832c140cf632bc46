"""A real broker for all tests of a session, made when the first one asks; where it can't be had, they fail.

Workers of xdist share it. Tests keep apart by run ids, which prefix all their topics, groups and producers.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from kafka import KafkaAdminClient
from kafka.errors import KafkaError

from tests.e2e.workplace import Workplace

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "kafka"
WARM_S = 900.0
_numbers = itertools.count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The client leaves sockets of failed connections to the garbage collector, which warns."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed <s:ResourceWarning"))


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Here, and not in a test of others."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="session")
def broker_folder(made: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    """The folder of the broker. The broker ends with the run of pytest, and takes its files along."""
    owner = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()

    def make(folder: Path) -> None:
        started = start_broker(folder / "kafka", owner, "--secure")
        warm_up(started)
        (folder / "address").write_text(started)

    return made("broker", make)


@pytest.fixture(scope="session")
def servers(broker_folder: Path) -> str:
    """The address of the broker."""
    return (broker_folder / "address").read_text()


@pytest.fixture(scope="session")
def secure(broker_folder: Path) -> dict[str, str]:
    """The other ways to the broker: security protocol -> address; options of clients."""
    found: dict[str, str] = json.loads((broker_folder / "kafka" / "secure.json").read_text())
    return found


def start_broker(folder: Path, owner: int, *options: str) -> str:
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "start", "--dir", str(folder), "--owner", str(owner), *options],
        capture_output=True,
        text=True,
        timeout=700,
    )
    assert run.returncode == 0, f"no broker for the tests: {run.stderr}"
    return run.stdout.splitlines()[-1]


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """One that a test may kill: its folder and address."""
    folder = tmp_path / "kafka"
    yield folder, start_broker(folder, os.getpid())
    subprocess.run([sys.executable, str(SCRIPT), "stop", "--dir", str(folder)], check=True, capture_output=True)
    shutil.rmtree(folder)


def kill_broker(folder: Path) -> None:
    """Kill all nodes of a broker, and wait until it can be started again."""
    for pid in json.loads((folder / "nodes.json").read_text()):
        psutil.Process(pid).kill()
    deadline = time.monotonic() + WARM_S
    while (folder / "keeper.pid").exists():
        assert time.monotonic() < deadline, f"{folder}: the keeper of a killed broker does not end"
        time.sleep(0.05)


def warm_up(servers: str) -> None:
    """A new broker makes its topic of positions when it is asked for one, which takes longer than a run waits."""
    client = KafkaAdminClient(bootstrap_servers=servers.split(","))
    deadline = time.monotonic() + WARM_S
    try:
        while True:
            try:
                client.list_group_offsets({"nobody": None})
                return
            except KafkaError:
                client._manager.cluster._coordinators.clear()
                assert time.monotonic() < deadline, f"{servers} does not give positions of groups"
                time.sleep(0.2)
    finally:
        client.close()


@pytest.fixture
def run_id() -> Callable[[], str]:
    """Names that no other test has."""
    return lambda: f"test-{os.getpid()}-{next(_numbers)}"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    """A folder for a run; what was started there ends with the test."""
    workplace = Workplace(tmp_path / "place")
    try:
        yield workplace
    finally:
        workplace.end()
