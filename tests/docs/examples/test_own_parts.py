"""The whole run of own_parts.toml in one process, with two kills."""

from __future__ import annotations

from pathlib import Path

from rftstream.config.loader import load
from rftstream.testing import Faults, Simulation

RUN_FILE = Path(__file__).with_name("own_parts.toml")


def test_own_parts(tmp_path: Path) -> None:
    simulation = Simulation(load([RUN_FILE]), folder=tmp_path, seed=7, faults=Faults(kills=2))
    simulation.run()
    report = simulation.audit()
    assert report.fine, report.to_text()
    assert report.groups.trained == 3 * 4
    assert (simulation.folder.final / "config.json").is_file()
