"""Which of the tests that are alike a run takes, and that all its processes take the same."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.unit.suite.test_storeys import run, suite

__all__ = ["suite"]

ALIKE = """
import pytest
@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", range(10))
def test_number(number): pass
@pytest.mark.sampled(1, "kind")
def test_one(): pass
@pytest.mark.sampled(1, "kind")
def test_other(): pass
"""
HOOKS = "pytest_configure, pytest_collection_finish, pytest_collection_modifyitems, pytest_terminal_summary"


@pytest.mark.slow
def test_some_of_each_kind_and_all_where_they_are_asked_for(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (suite / "test_bad.py").write_text(ALIKE)
    (suite / "conftest.py").write_text(f"from tests.conftest import {HOOKS}  # noqa: F401\n")

    def taken(*arguments: str, seed: str = "7") -> set[str]:
        monkeypatch.setenv("SAMPLE_SEED", seed)
        done: subprocess.CompletedProcess[str] = run(suite, "-vv", "-W", "ignore", *arguments)
        assert f"SAMPLE_SEED={seed}" in done.stdout, done.stdout
        words = [word for line in done.stdout.splitlines() if "PASSED" in line for word in line.split()]
        return {word.partition("::")[2] for word in words if word.startswith("test_bad.py::")}

    found = taken("-n", "0", "-m", "not long")
    assert (len(found), len({one for one in found if "number" in one})) == (4, 3)
    assert found == taken("-n", "2", "-m", "not long") != taken("-n", "0", "-m", "not long", seed="8")
    assert len(taken("-n", "0")) == len(taken("-n", "0", "-m", "long")) == 12
    assert len(taken("-n", "0", "-m", "not long", "-k", "number")) == 10, "who names tests gets them"
    assert len(taken("-n", "2", "-m", "not long", "test_bad.py")) == 12
