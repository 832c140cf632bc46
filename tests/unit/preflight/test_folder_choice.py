"""Which folder a run takes, by what the runs before it have come to."""

from __future__ import annotations

from pathlib import Path

import pytest

from rftstream.config import loader
from rftstream.errors import ConfigError
from rftstream.launch import start
from rftstream.preflight import folder_choice
from rftstream.runs.folder import RunFolder
from tests.unit.tiny_run import make_run, write_run_file


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write_run_file(tmp_path)


def test_the_folder_of_a_run_file(run_file: Path, tmp_path: Path) -> None:
    config = loader.load([run_file])
    runs = tmp_path / "runs"
    assert folder_choice.choose_folder(config, None).path == runs / "tiny"
    make_run(RunFolder(runs / "tiny"), run_file, finished=True)
    assert folder_choice.choose_folder(config, None).path == runs / "tiny-2"
    make_run(RunFolder(runs / "tiny-2"), run_file, finished=False)
    with pytest.raises(ConfigError, match="rftstream resume"):
        folder_choice.choose_folder(config, None)
    with RunFolder(runs / "tiny-2").held(), pytest.raises(ConfigError, match="this run is live"):
        folder_choice.choose_folder(config, None)


def test_a_folder_that_was_named(run_file: Path, tmp_path: Path) -> None:
    config = loader.load([run_file])
    mine = tmp_path / "mine"
    assert folder_choice.choose_folder(config, mine).path == mine
    make_run(RunFolder(mine), run_file, finished=True)
    for begin in (folder_choice.choose_folder, lambda config, mine: start.create(config, run_dir=mine)):
        with pytest.raises(ConfigError, match=r"mine: a run has ended in this folder.*--run-dir.*resume.*delete"):
            begin(config, mine)
    assert not (tmp_path / "mine-2").exists()
    with pytest.raises(ConfigError, match=r"other: .* log at .* has an ended run other, .*--run-dir.*delete"):
        folder_choice.folder_after(config, RunFolder(tmp_path / "other"), tmp_path / "other")


def test_the_number_of_a_run_is_after_the_newest(run_file: Path, tmp_path: Path) -> None:
    """Also where one in between was deleted: the run file means the one with the highest number."""
    config, runs = loader.load([run_file]), tmp_path / "runs"
    for name in ("tiny-2", "tiny-9"):
        make_run(RunFolder(runs / name), run_file, finished=True)
    assert folder_choice.choose_folder(config, None).path == runs / "tiny-10"
    own = loader.load([run_file], sets=["run.name=own-3"])
    assert folder_choice.choose_folder(own, None).path == runs / "own-3"
    make_run(RunFolder(runs / "own-3"), run_file, finished=True)
    assert folder_choice.choose_folder(own, None).path == runs / "own-3-2"


def test_a_name_that_ends_in_a_number_keeps_it(run_file: Path, tmp_path: Path) -> None:
    """Its second run is one that its run file finds again."""
    config = loader.load([run_file], sets=["run.name=tiny-2"], env={})
    for name in ("tiny-2", "tiny-2-2", "tiny-2-3"):
        chosen = folder_choice.choose_folder(config, None)
        assert chosen.path == tmp_path / "runs" / name
        make_run(chosen, run_file, finished=True)
        assert folder_choice.newest_folder(config, None) == chosen
