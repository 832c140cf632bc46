"""A run that an earlier version made is audited, replayed and gone on with by this one.

`recorded/before-rooms.tar.xz` is the run folder of six steps with the fake policy and backend on the embedded log,
without its logs, as version 0.1.0 left it before the package was laid out in rooms. It is never made again: a change
that cannot deal with it cannot deal with users' runs.
"""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import pytest

from tests.e2e.workplace import Workplace, sets

pytestmark = pytest.mark.law("replay")

RECORDED = Path(__file__).with_name("recorded") / "before-rooms.tar.xz"


def unpack_recorded(folder: Path) -> Path:
    """Return a copy of the recorded run, in a folder of its own below this one."""
    checks = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # not before Python 3.11.4
    shutil.unpack_archive(RECORDED, folder, **checks)
    return folder / "recorded"


@pytest.fixture
def recorded(place: Workplace) -> Path:
    return unpack_recorded(place.folder / "runs")


@pytest.mark.law("conservation")
def test_it_is_audited_and_replayed(place: Workplace, recorded: Path) -> None:
    audit = place.look("audit", recorded, "--json")
    assert audit.code == 0, audit.err
    assert audit.result["balanced"]
    assert audit.result["version"] == 6
    assert audit.result["groups"]["trained"] == 24
    replayed = place.look("replay", recorded, "--json")
    assert replayed.code == 0, replayed.err
    assert replayed.result["num_batches"] == 6
    assert replayed.result["num_digests"] == 7
    assert not replayed.result["differences"]


def test_it_goes_on(place: Workplace, recorded: Path) -> None:
    resumed = place.call("resume", recorded, "--json", *sets("run.steps=9"))
    assert resumed.code == 0, resumed.err
    assert (resumed.result["version"], resumed.result["reason"]) == (9, "steps")
    view = place.view("runs/recorded")
    view.assert_nothing_lost()
    replayed = place.look("replay", recorded, "--json")
    assert replayed.code == 0, replayed.err
    assert (replayed.result["num_batches"], replayed.result["differences"]) == (9, [])
