"""A workplace for each test; what was started there ends with the test. A run that has ended, made once for all."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.broker.conftest import own_broker
from tests.e2e.workplace import FAKE, Workplace

__all__ = ["own_broker"]


@pytest.fixture
def place(place: Workplace) -> Workplace:
    """With a run file `tiny.toml` in it."""
    place.write("tiny.toml", FAKE)
    return place


@pytest.fixture
def finished_run(place: Workplace, made: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    """`runs/tiny` of the workplace: a copy of a whole run of `tiny.toml` by `rftstream run`. Tests may change it."""
    path = place.folder / "runs" / "tiny"
    shutil.copytree(made("finished-run", run_tiny) / "runs" / "tiny", path)
    return path


def run_tiny(folder: Path) -> None:
    """Run FAKE to its end with real processes."""
    workplace = Workplace(folder)
    try:
        workplace.write("tiny.toml", FAKE)
        done = workplace.call("run", "tiny.toml", "--json")
        assert done.code == 0, f"{done.err}\n{workplace.report()}"
        assert (done.result["steps"], done.result["reason"]) == (6, "steps")
    finally:
        workplace.end()
