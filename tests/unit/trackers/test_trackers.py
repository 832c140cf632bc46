"""Event files, read back by TensorBoard's own reader: every step in force once and in order, however often written."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rftstream.config.loader import from_dict
from rftstream.contracts.versions import EvalResult, StepRecord, VersionName
from rftstream.errors import ConfigError
from rftstream.trackers import TRACKERS, check_trackers, open_trackers
from rftstream.trackers.tensorboard import TensorBoard
from rftstream.trackers.tracked import TrackedRun

if TYPE_CHECKING:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

BASE = {"run": {"name": "t", "steps": 1}, "model": {"make": {}}, "tasksets": {"t": {"source": "arithmetic"}}}


def step(version: int, *, epoch: int = 1, **metrics: float) -> StepRecord:
    return StepRecord(
        name=VersionName(trainer_epoch=epoch, version=version), batch_sequence=version - 1, positions=(0,),
        trained_groups=version, trained_rollouts=version, weights_digest=None, recorded_at=1000.0 * epoch + version,
        metrics=metrics or {"reward": version / 8, "reward/sums": 0.5},
    )  # fmt: skip


def evaluation(version: int, mean: float, *, epoch: int = 1, name: str = "held-out") -> EvalResult:
    return EvalResult(
        evaluation=name, name=VersionName(trainer_epoch=epoch, version=version), num_tasks=1, num_samples=1,
        num_unscored=0, metrics={"mean": mean, "best@4": 1.0}, generations=None, evaluated_at=2000.0 + version,
    )  # fmt: skip


def read(folder: Path) -> EventAccumulator:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return accumulator


def series(accumulator: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def test_every_metric_is_a_series(tmp_path: Path) -> None:
    tracker = TensorBoard(tmp_path / "new" / "folder")
    tracker.update([step(1), step(2), evaluation(0, 0.25), evaluation(2, 0.5)])
    tracker.update([])
    tracker.update([step(3, loss=float("nan"), reward=0.375)])
    tracker.close(ended=False)
    found = read(tmp_path / "new" / "folder")
    assert found.Tags()["scalars"] == [
        "train/reward", "train/reward/sums", "eval/held-out/mean", "eval/held-out/best@4", "train/loss",
    ]  # fmt: skip
    assert series(found, "train/reward") == [(1, 0.125), (2, 0.25), (3, 0.375)]
    assert series(found, "eval/held-out/mean") == [(0, 0.25), (2, 0.5)]
    assert [event.wall_time for event in found.Scalars("train/reward")] == [1001.0, 1002.0, 1003.0]


def test_what_it_wrote_is_there_at_once(tmp_path: Path) -> None:
    tracker = TensorBoard(tmp_path)
    tracker.update([step(1)])
    assert series(read(tmp_path), "train/reward") == [(1, 0.125)]
    tracker.close(ended=False)


def test_a_trainer_that_goes_back_is_drawn_once(tmp_path: Path) -> None:
    tracker = TensorBoard(tmp_path)
    tracker.update([step(version) for version in range(1, 6)] + [evaluation(4, 0.1)])
    shown = read(tmp_path)
    tracker.update([step(3, epoch=2, reward=0.75), evaluation(4, 0.9, epoch=2)])
    tracker.update([step(4, epoch=2, reward=1.0)])
    tracker.close(ended=False)
    shown.Reload()  # of somebody who was looking on
    for found in (shown, read(tmp_path)):
        assert series(found, "train/reward") == [(1, 0.125), (2, 0.25), (3, 0.75), (4, 1.0)]
        assert series(found, "eval/held-out/mean") == [(4, pytest.approx(0.9))]


def test_a_start_reads_the_whole_log_and_draws_what_is_in_force(tmp_path: Path) -> None:
    """As an observer hands it over: steps that were trained again come after those that they replace."""
    tracker = TensorBoard(tmp_path)
    news = [step(1), step(2), step(3), evaluation(2, 0.2), step(2, epoch=2, reward=0.5), evaluation(0, 0.0)]
    tracker.update(news)
    tracker.close(ended=False)
    found = read(tmp_path)
    assert series(found, "train/reward") == [(1, 0.125), (2, 0.5)]
    assert series(found, "eval/held-out/mean") == [(0, 0.0), (2, pytest.approx(0.2))]


def test_a_resumed_run_goes_on_with_the_same_series(tmp_path: Path) -> None:
    first = TensorBoard(tmp_path)
    first.update([step(1), step(2)])
    first.close(ended=False)
    shown = read(tmp_path)
    second = TensorBoard(tmp_path)
    second.update([step(1), step(2)])
    second.update([step(3)])
    second.close(ended=False)
    shown.Reload()
    for found in (shown, read(tmp_path)):
        assert series(found, "train/reward") == [(1, 0.125), (2, 0.25), (3, 0.375)]
    assert len(list(tmp_path.iterdir())) == 2


def test_an_evaluation_of_an_older_version_waits_for_the_next_start(tmp_path: Path) -> None:
    tracker = TensorBoard(tmp_path)
    tracker.update([evaluation(4, 0.5)])
    tracker.update([evaluation(2, 0.25), evaluation(2, 0.25, name="other")])
    tracker.close(ended=False)
    found = read(tmp_path)
    assert series(found, "eval/held-out/mean") == [(4, 0.5)]
    assert series(found, "eval/other/mean") == [(2, 0.25)]


def test_it_is_off_by_default_and_lies_in_the_run_folder(tmp_path: Path) -> None:
    run = TrackedRun(folder=tmp_path, created_at=1.0, config={})
    assert open_trackers(from_dict(BASE), run, print) == []
    (tracker,) = open_trackers(from_dict({**BASE, "trackers": {"tensorboard": "board"}}), run, print)
    tracker.close(ended=False)
    assert (tmp_path / "board").is_dir()


def test_an_absent_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in TRACKERS:
        wanted = from_dict({**BASE, "trackers": {name: "board"}})
        with pytest.raises(
            ConfigError, match=rf"trackers.{name}: needs the package {name}; `rftstream doctor --install {name}`"
        ):
            check_trackers(wanted)
    check_trackers(from_dict(BASE))
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    with pytest.raises(ConfigError, match="needs the package tensorboard"):
        TensorBoard(tmp_path)


def test_mlflow_is_told_where_its_store_is_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = from_dict({**BASE, "trackers": {"mlflow": "sums"}})
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ConfigError, match=r"trackers\.mlflow: MLFLOW_TRACKING_URI is not set, .*; export it"):
        check_trackers(wanted)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    check_trackers(wanted)


@pytest.mark.parametrize("scheme", ["sqlite", "postgresql+psycopg2"])
def test_a_database_of_mlflow_needs_what_speaks_to_it(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    wanted, there = from_dict({**BASE, "trackers": {"mlflow": "sums"}}), {"mlflow", "alembic"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in there else None)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"{scheme}:////tmp/mlflow.db")
    with pytest.raises(ConfigError, match="names a database, which needs sqlalchemy; pip install mlflow, or"):
        check_trackers(wanted)
    there.add("sqlalchemy")
    check_trackers(wanted)


@pytest.mark.slow
def test_nothing_imports_it_unless_it_is_asked_for() -> None:
    names = repr(set(TRACKERS))
    code = f"import sys, rftstream.launch.start, rftstream.commands.views; sys.exit(bool({names} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
