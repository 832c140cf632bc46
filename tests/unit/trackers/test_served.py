"""Trackers behind a service: written once and in order over restarts, read back from MLflow's and W&B's own stores."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rftstream.errors import ConfigError
from rftstream.trackers import served
from rftstream.trackers.served import ServedTracker, Unwritten, Written
from rftstream.trackers.tracked import TrackedRun
from tests.unit.trackers.test_trackers import evaluation, step


def run_in(folder: Path, *, created_at: float = 1.5) -> TrackedRun:
    config = {"run": {"name": "sums"}, "trainer": {"lr": 1e-3, "device": None}, "tasksets": {"sums": {"source": "a"}}}
    return TrackedRun(folder=folder / "sums", created_at=created_at, config=config)


class Store:
    """A service in memory, which fails as often as it is told to."""

    shows_samples = False

    def __init__(self, *, failures: int = 0) -> None:
        self.failures = failures
        self.written, self.points = Written(), list[tuple[int, int]]()
        self.closed: list[bool] = []
        self.tried = threading.Event()

    def open(self) -> Written:
        self._fail()
        return self.written

    def write(self, news: Sequence[served.News], written: Written) -> None:
        self._fail()
        self.points += [(one.name.trainer_epoch, one.name.version) for one in news]
        self.written = written

    def close(self, *, ended: bool) -> None:
        self.closed.append(ended)

    def _fail(self) -> None:
        self.tried.set()
        if self.failures:
            self.failures -= 1
            raise OSError("refused by http://user:secret@host/api")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(served, "PAUSE_S", 0.01)
    return []


def test_what_a_service_has_is_left_out() -> None:
    unwritten = Unwritten(Written(1, 2, 1))
    due = unwritten.take([step(1), step(2), evaluation(0, 0.1), step(3), evaluation(2, 0.2)])
    assert [one.name.version for one in due] == [3, 2]
    assert unwritten.written == Written(1, 3, 2)
    assert unwritten.take([step(3), step(2, epoch=2)]) == [step(3), step(2, epoch=2)][1:], "3 is not in force any more"
    assert unwritten.written == Written(2, 2, 2)
    assert unwritten.take([]) == []
    assert unwritten.written == Written(2, 2, 2)


def test_a_restart_writes_each_point_once_and_in_order(said: list[str]) -> None:
    store, log = Store(), [step(1), step(2), step(3)]
    first = ServedTracker("store", store, said.append)
    first.update(log)
    first.close(ended=False)
    log += [step(3, epoch=2), evaluation(3, 0.5, epoch=2), step(4, epoch=2)]
    second = ServedTracker("store", store, said.append)
    second.update(log)
    second.close(ended=True)
    assert store.points == [(1, 1), (1, 2), (1, 3), (2, 3), (2, 3), (2, 4)]
    assert store.closed == [False, True]
    assert said == []


def test_a_service_that_is_away_is_asked_until_it_is_back(said: list[str]) -> None:
    store = Store(failures=2)
    tracker = ServedTracker("store", store, said.append)
    tracker.update([step(1)])
    while len(store.points) < 1:
        store.tried.wait(120.0)
    store.failures = 1
    tracker.update([step(2)])
    while len(store.points) < 2:
        store.tried.wait(120.0)
    tracker.close(ended=False)
    assert store.points == [(1, 1), (1, 2)]
    assert len(said) == 2
    assert "refused by http://***@host/api; tried again until it works" in said[0]


def test_a_run_that_leaves_does_not_wait_for_a_service_that_is_away(said: list[str]) -> None:
    store = Store(failures=10**9)
    tracker = ServedTracker("store", store, said.append)
    tracker.update([step(1)])
    assert store.tried.wait(120.0)
    tracker.close(ended=False)
    assert store.points == []
    assert store.closed == []
    assert len(said) == 2
    assert said[1] == "store: 1 records of the log are missing there; `rftstream resume` writes them"


def test_what_cannot_work_is_given_up_with_a_word(said: list[str]) -> None:
    class Closed(Store):
        def open(self) -> Written:
            raise ConfigError("trackers.store: no key")

    tracker = ServedTracker("store", Closed(), said.append)
    tracker.update([step(1)])
    tracker.close(ended=False)
    assert said[0] == "store: trackers.store: no key" and "1 records of the log are missing" in said[1]


@pytest.mark.law("bounded")
def test_few_records_wait_for_a_service_and_the_log_keeps_the_others(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "MAX_WAITING", 4)
    log, store = [step(number) for number in range(1, 9)], Store(failures=10**9)
    tracker = ServedTracker("store", store, said.append)
    for one in log:
        tracker.update([one])
    assert tracker._news.qsize() <= 4
    assert store.tried.wait(120.0)
    store.failures = 0
    while len(store.points) < 4:
        store.tried.wait(120.0)
    tracker.close(ended=False)
    assert said[-1] == "store: 4 records of the log are missing there; `rftstream resume` writes them"
    again = ServedTracker("store", store, said.append)
    again.update(log)
    again.close(ended=True)
    assert store.points == [(1, number) for number in range(1, 9)]


# ------------------------------------------------------------------------------------------------ MLflow


@pytest.fixture
def mlflow_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of MLflow's file store."""
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/store")
    from mlflow import MlflowClient

    return MlflowClient()


def tracked_by_mlflow(run: TrackedRun, news: Sequence[served.News], said: list[str], *, ended: bool = False) -> None:
    from rftstream.trackers.mlflow import Mlflow

    tracker = ServedTracker("mlflow", Mlflow("sums", run), said.append)
    tracker.update(news)
    tracker.close(ended=ended)


@pytest.mark.slow
def test_mlflow_has_one_run_with_every_step_once(mlflow_store: Any, tmp_path: Path, said: list[str]) -> None:
    run = run_in(tmp_path)
    log: list[served.News] = [step(1), step(2), evaluation(0, 0.25), step(3, loss=float("nan"), reward=0.375)]
    tracked_by_mlflow(run, log, said)
    (found,) = mlflow_store.search_runs(["0", *(one.experiment_id for one in mlflow_store.search_experiments())])
    assert found.info.status == "KILLED"
    log += [step(4), evaluation(4, 0.5)]
    tracked_by_mlflow(run, log, said, ended=True)
    assert said == []

    (found,) = mlflow_store.search_runs([mlflow_store.get_experiment_by_name("sums").experiment_id])
    assert (found.info.run_name, found.info.status) == ("sums", "FINISHED")
    assert found.data.params == {"run.name": "sums", "trainer.lr": "0.001", "tasksets.sums.source": "a"}

    def series(name: str) -> list[tuple[int, float]]:
        return [(one.step, one.value) for one in mlflow_store.get_metric_history(found.info.run_id, name)]

    assert series("train/reward") == [(1, 0.125), (2, 0.25), (3, 0.375), (4, 0.5)]
    assert series("train/reward.sums") == [(1, 0.5), (2, 0.5), (4, 0.5)], "no name is a folder of another"
    assert series("eval/held-out.mean") == [(0, 0.25), (4, 0.5)]
    assert series("eval/held-out.best_4") == [(0, 1.0), (4, 1.0)]
    times = [one.timestamp for one in mlflow_store.get_metric_history(found.info.run_id, "train/reward")]
    assert times == [1_001_000, 1_002_000, 1_003_000, 1_004_000]


@pytest.mark.slow
def test_another_run_of_the_same_name_is_another_one_in_mlflow(
    mlflow_store: Any, tmp_path: Path, said: list[str]
) -> None:
    tracked_by_mlflow(run_in(tmp_path), [step(1)], said)
    tracked_by_mlflow(run_in(tmp_path, created_at=2.5), [step(1)], said)
    assert len(mlflow_store.search_runs([mlflow_store.get_experiment_by_name("sums").experiment_id])) == 2


# ------------------------------------------------------------------------------------------------ Weights & Biases


def offline_rows(folder: Path) -> Iterator[tuple[str, Any]]:
    """Kind and content of every record of W&B's own files, in order of their making: a log of chunks as LevelDB's,
    in blocks of 32 KiB, each chunk after its checksum, length and kind."""
    from wandb.proto import wandb_internal_pb2

    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        data, at, record = file.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            length, kind = struct.unpack_from("<HB", data, at + 4)
            record += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # whole, or the last part
                message = wandb_internal_pb2.Record.FromString(record)
                record = b""
                yield message.WhichOneof("record_type"), message


def tracked_by_wandb(run: TrackedRun, news: Sequence[served.News], said: list[str], *, ended: bool = False) -> None:
    from rftstream.trackers.wandb import WeightsAndBiases

    tracker = ServedTracker("wandb", WeightsAndBiases("team/sums", run), said.append)
    tracker.update(news)
    tracker.close(ended=ended)


@pytest.fixture
def wandb_offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("sys.argv", ["rftstream", "run", "--set", "what-stands-on-the-command-line"])
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_API_KEY", "a-key-that-nobody-writes-down" + "0" * 11)
    yield
    import wandb

    wandb.teardown()


@pytest.mark.long  # on a busy machine its `finish` may take all of its minute, and leave the second file short
def test_wandb_has_one_run_with_every_step_once(wandb_offline: None, tmp_path: Path, said: list[str]) -> None:
    run = run_in(tmp_path)
    log: list[served.News] = [step(1), step(2), evaluation(0, 0.25), step(3, loss=float("nan"), reward=0.375)]
    tracked_by_wandb(run, log, said)
    log += [step(3, epoch=2), evaluation(2, 0.5)]
    tracked_by_wandb(run, log, said)
    assert said == []
    records = list(offline_rows(run.folder))
    runs = [message.run for kind, message in records if kind == "run"]
    names = {(one.run_id, one.project, one.entity, one.display_name) for one in runs}
    assert names == {(run.key, "sums", "team", "sums")}
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in message.history.item}
        for kind, message in records if kind == "history"
    ]  # fmt: skip
    assert [row["_step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    shown = [(row["version"], row.get("train/reward"), row.get("eval/held-out/mean")) for row in rows]
    assert shown == [
        (1, 0.125, None), (2, 0.25, None), (0, None, 0.25), (3, 0.375, None), (3, 0.375, None), (2, None, 0.5),
    ]  # fmt: skip
    assert [row["_timestamp"] for row in rows[:2]] == [1001.0, 1002.0]
    axes = {message.metric.glob_name: message.metric.step_metric for kind, message in records if kind == "metric"}
    assert axes["train/*"] == axes["eval/*"] == "version"
    written = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    for private in (b"a-key-that-nobody-writes-down", b"what-stands-on-the-command-line", b"hypothesis=="):
        assert private not in written


def test_wandb_without_a_key_does_not_ask_at_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    tracked_by_wandb(run_in(tmp_path), [step(1)], said)
    assert "WANDB_API_KEY is not set" in said[0]
    assert not (tmp_path / "sums").exists()
