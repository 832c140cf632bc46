"""The examples learn with other seeds than the one that they were made with: a good recipe has a margin."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rftstream.preflight.first_file import write
from rftstream.preflight.first_problems import FirstFile
from tests.e2e.workplace import EXAMPLES, Workplace, sets

LEAST_S = 3600.0
"""Seconds that a run has at least: on a busy machine."""
LEAST = {"arithmetic": 0.9, "mix": 0.8, "tools": 0.8, "init": 0.9}
"""Example -> what its evaluation reaches at the end."""


def run_file(name: str, folder: Path) -> Path:
    if name == "init":
        return write(FirstFile(folder=folder)).run_file
    shutil.copytree(EXAMPLES, folder, ignore=shutil.ignore_patterns("runs"))
    return folder / f"{name}.toml"


@pytest.mark.long
@pytest.mark.timeout(2 * LEAST_S)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", LEAST)
def test_an_example_learns_with_another_seed(place: Workplace, name: str, seed: int) -> None:
    file = run_file(name, place.folder / "first")
    done = place.call("run", file, "--run-dir", "it", *sets(f"run.seed={seed}"), "--json", timeout_s=LEAST_S)
    assert done.code == 0, done.err
    [result] = place.look("status", "it", "--json").result["evaluations"].values()
    assert result["newest"]["mean"] >= LEAST[name], result
