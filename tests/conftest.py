"""Which tests are slow: those that start processes or simulate many runs, by folder, and what says so itself. And how
busy the machine was while they ran, in the last lines."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests import surroundings
from tests.load import LoadReport
from tests.made import made_once, shared_folder
from tests.s3 import S3Server
from tests.suite.sampling import SEED, draw_seed, mark_rest
from tests.suite.storeys import StoreyMarks, StoreyReport

if TYPE_CHECKING:
    from tests.e2e.workplace import Workplace

# The conformance suite lives in the package; its assertions shall explain themselves all the same.
pytest.register_assert_rewrite("rftstream.testing", "tests.flow.scene", "tests.simulation.laws", "tests.exporters")

HERE = Path(__file__).parent
SLOW = ("e2e", "simulation", "parity")
"""Folders; `make test-fast` leaves them out."""


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # till the tests are collected: imports leave little to collect, and it took a quarter of that time
    draw_seed()
    surroundings.enter()  # before test modules import what reads variables: torch, transformers, matplotlib
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as `make test &` in a script has it, for all that it starts
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # How long an example takes says more of the machine than of the code. They differ each time, so a run of all
    # tests needs fewer than a look at one file.
    num_examples = 40 if "not long" in config.option.markexpr else 100
    settings.register_profile(
        "any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=num_examples
    )
    settings.load_profile("any speed")
    is_worker, has_workers = hasattr(config, "workerinput"), bool(config.getoption("numprocesses", None))
    if is_worker or not has_workers:  # it runs tests
        config.pluginmanager.register(StoreyMarks(config), "storey marks")
    if not is_worker:  # it prints
        config.pluginmanager.register(LoadReport(), "load report")
        config.pluginmanager.register(StoreyReport(config), "storey report")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out whole folders of slow tests where none of them is asked for: each process would import all of them, and
    what they import."""
    is_slow = collection_path.parent == HERE and collection_path.name in SLOW
    return True if is_slow and "not slow" in config.option.markexpr else None


def pytest_collection_finish() -> None:
    """Take what was imported out of what the garbage collector looks through, which takes half a second each time."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = tuple(f"{HERE / name}{os.sep}" for name in SLOW)
    for item in items:
        if str(item.path).startswith(slow):
            item.add_marker(pytest.mark.slow)
    mark_rest(items, config)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"the same tests of each sample again: {SEED}={os.environ[SEED]}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Keep what the client of Kafka says out of the tests without a broker: clients of one that an earlier test of this
    process has ended go on trying for a while, and say so."""
    if item.get_closest_marker("broker") is not None:
        return (yield)  # type: ignore[return-value]
    kafka = logging.getLogger("kafka")
    captured = item.config.pluginmanager.get_plugin("logging-plugin").caplog_handler
    before, kafka.propagate = kafka.propagate, False
    captured.addFilter(no_word_of_kafka)  # a client's thread may be in the middle of a word
    try:
        return (yield)  # type: ignore[return-value]
    finally:
        captured.removeFilter(no_word_of_kafka)
        kafka.propagate = before


def no_word_of_kafka(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] != "kafka"


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """Started when the first test asks for it."""
    server = S3Server()
    yield server
    server.close()


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
    """`made(name, make)`: a folder that `make` fills once for the whole run of pytest. Tests only read it."""
    return lambda name, make: made_once(shared_folder(tmp_path_factory), name, make)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    """A folder for runs. What a test starts there ends with it."""
    from tests.e2e.workplace import Workplace

    with Workplace(tmp_path) as workplace:
        yield workplace


@pytest.fixture(scope="module")
def spec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A made model; the module says by MODEL what is special about it. Tests only read it."""
    from tests.unit import tiny

    return tiny.make(tmp_path_factory.mktemp("model"), **getattr(request.module, "MODEL", {}))  # type: ignore[no-untyped-call]
