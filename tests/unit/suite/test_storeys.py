"""What a run of the tests says of their storeys and seconds, and that it refuses tests that take too long."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.suite.each import each
from tests.suite.storeys import CACHED, DURATIONS, digest_of, storey_of

ROOT = Path(__file__).parents[3]


@each(
    ("marks", "folder", "expected"),
    [
        (set(), "unit", "unit"),
        ({"slow"}, "e2e", "process"),
        ({"process"}, "unit", "process"),
        ({"broker", "slow"}, "broker", "broker"),
        ({"broker", "long"}, "faults", "long"),
        ({"long", "gpu"}, "unit", "gpu"),
        (set(), "simulation", "simulation"),
    ],
)
def test_marks_say_more_than_folders(marks: set[str], folder: str, expected: str) -> None:
    assert storey_of(marks, folder) == expected


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A suite of one passing and one failing file, with the plugins of ours."""
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_configure  # noqa: F401\n")
    (tmp_path / "test_good.py").write_text("def test_good(): pass\n")
    (tmp_path / "test_bad.py").write_text("def test_bad(): raise AssertionError('a word')\n")
    return tmp_path


def run(suite: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", f"--rootdir={suite}", "-c", "/dev/null"]
    return subprocess.run(
        [*command, "-o", f"cache_dir={suite}/cache", *arguments, "."], cwd=suite, capture_output=True, text=True,
        check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_run_ends_with_storeys_and_files(suite: Path, workers: str) -> None:
    done = run(suite, "-n", workers)
    assert done.returncode == 1, done.stdout
    assert "minutes of 2 tests" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[1] for row in rows if row[:1] in (["unit"], ["test_bad.py"], ["test_good.py"])] == ["2", "1", "1"]
    took = json.loads((suite / "cache" / "v" / DURATIONS).read_text())
    assert took.keys() == {"test_good.py::test_good", "test_bad.py::test_bad"}


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_test_that_took_too_long_is_not_collected_again_before_it_is_changed(suite: Path, workers: str) -> None:
    row = suite / "cache" / "v" / CACHED
    row.parent.mkdir(parents=True)
    row.write_text(json.dumps({"test_good.py::test_good": [31.0, digest_of(suite / "test_good.py"), ""]}))
    refused = run(suite, "-n", workers)
    assert refused.returncode != 0
    assert "test_good.py::test_good: took 31 s in the last run, expected at most 20" in refused.stdout

    others = run(suite, "-n", workers, "-m", "not long", "-W", "ignore", "--deselect", "test_bad.py")
    assert others.returncode == 0, "a run of other marks goes on"

    (suite / "test_good.py").write_text("import pytest\n@pytest.mark.heavy('why')\ndef test_good(): pass\n")
    assert run(suite, "-n", workers, "-W", "ignore", "--deselect", "test_bad.py").returncode == 0
