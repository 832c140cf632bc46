"""Two real brokers for all tests of a run of pytest, made when the first one asks; where they can't be had, they fail.

Workers of xdist share them. Tests keep apart by run ids, which prefix all their topics, groups and producers.
"""

from __future__ import annotations

import fcntl
import gc
import itertools
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.broker.guarded import Guarded, start_guarded
from tests.broker.starting import owner, start_broker, warm_up
from tests.e2e.workplace import Workplace
from tests.waiting import wait_until

Made = Callable[[str, Callable[[Path], None]], Path]
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
def guarded(made: Made) -> Guarded:
    """The broker of all tests that stop none. Clients that come to it in the open may do everything, all others only
    what rights allow. It ends with the run of pytest, and takes its files along."""
    return Guarded.load(made("broker", lambda folder: start_guarded(folder, owner()).save()))


@pytest.fixture(scope="session")
def servers(made: Made) -> str:
    """The address of that broker, for those who may do everything. Tests of other folders import this fixture."""
    return Guarded.load(made("broker", lambda folder: start_guarded(folder, owner()).save())).open


@pytest.fixture(scope="session")
def secure(guarded: Guarded) -> Mapping[str, str]:
    """The other ways to the broker: security protocol -> address; options of clients."""
    return guarded.secure


@dataclass(frozen=True)
class OwnBroker:
    """A broker that a test may kill. It has no rights: everybody may do everything."""

    folder: Path
    address: str

    def kill(self) -> None:
        """Kill it, and wait until it can be started again."""
        self.kill_nodes()
        self.await_end()

    def kill_nodes(self) -> None:
        """Kill it."""
        for pid in json.loads((self.folder / "nodes.json").read_text()):
            psutil.Process(pid).kill()

    def await_end(self) -> None:
        """Wait until its keeper has noticed."""
        wait_until(lambda: not (self.folder / "keeper.pid").exists())

    def start(self) -> None:
        """Start it, at the same address."""
        assert start_broker(self.folder, owner(), "--port", self.address.rpartition(":")[2]) == self.address


@pytest.fixture
def own_broker(made: Made) -> Iterator[OwnBroker]:
    """One for all such tests, for one at a time. What one of them has killed the next one starts again, with what
    stands on it."""

    def make(folder: Path) -> None:
        address = start_broker(folder / "kafka", owner())
        warm_up(address)
        (folder / "address").write_text(address)

    base = made("own-broker", make)
    with (base / "in-use").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        broker = OwnBroker(base / "kafka", (base / "address").read_text())
        broker.start()
        yield broker


@pytest.fixture
def run_id() -> Callable[[], str]:
    """Names that no other test has."""
    return lambda: f"test-{os.getpid()}-{next(_numbers)}"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    """A folder for a run; what was started there ends with the test."""
    with Workplace(tmp_path / "place") as workplace:
        yield workplace
