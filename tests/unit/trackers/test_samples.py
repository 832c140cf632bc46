"""Trackio, SwanLab and tables of samples: with the real packages where they are, else with their calls alone."""

from __future__ import annotations

import importlib.util
import sqlite3
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rftstream.contracts import ids
from rftstream.contracts.tasks import RolloutIds
from rftstream.contracts.versions import VersionName
from rftstream.queries.records import newest_samples as tables
from rftstream.testing.memory_run import MemoryRun
from rftstream.trackers import served
from rftstream.trackers.served import ServedTracker, Unwritten, Written
from rftstream.trackers.swanlab import SwanLab
from rftstream.trackers.tracked import SampledRow, SampleTable
from rftstream.trackers.trackio import Trackio
from tests.configs import small_run
from tests.unit.synthetic import verified
from tests.unit.trackers.test_served import Store, run_in
from tests.unit.trackers.test_trackers import evaluation, step

ROW = SampledRow(version=2, reward=None, prompt="1+1=", completion="2")
TABLE = SampleTable(name=VersionName(trainer_epoch=1, version=2), rows=(ROW,))
LOG: list[served.News] = [step(1), step(2), TABLE, evaluation(2, 0.5)]


def sibling(number: int) -> RolloutIds:
    group = ids.group_id("sums", 0, number, 0)
    return RolloutIds(
        rollout_id=ids.rollout_id(group, 0), group_id=group, taskset="sums", sibling=0, group_size=1, sequence=number,
        min_version=0,
    )  # fmt: skip


def tracked(service: Any, said: list[str], news: list[served.News]) -> None:
    tracker = ServedTracker("service", service, said.append)
    tracker.update(news)
    tracker.close(ended=False)


def test_tables_go_to_those_that_show_them_and_once() -> None:
    for shows, points in ((False, 3), (True, 4)):
        store, said = Store(), list[str]()
        store.shows_samples = shows
        tracked(store, said, LOG)
        tracked(store, said, [*LOG, step(3)])
        assert (len(store.points), said) == (points + 1, [])
    assert Unwritten(Written(1, 2, 1)).take(LOG) == []


class Fake:
    """Every call of a tracker's package, by the names and arguments that it has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.inits, self.rows, self.finished = list[dict[str, Any]](), list[tuple[int, dict[str, Any]]](), 0
        run = SimpleNamespace(
            log=lambda values, step: self.rows.append((step, values)), finish=self._finish,
            define_metric=lambda key, *, x_axis: None,
        )  # fmt: skip
        module: Any = ModuleType(name)
        module.init = lambda **given: self.inits.append(given) or run
        module.Table = lambda columns, data: (columns, data)
        module.Settings = lambda **given: SimpleNamespace(mode="offline", api_key=None)
        table = SimpleNamespace(rows=[])
        table.add = lambda columns, rows: table.rows.append((columns, rows))
        module.echarts = SimpleNamespace(Table=lambda: table)
        monkeypatch.setitem(sys.modules, name, module)

    def _finish(self) -> None:
        self.finished += 1


@pytest.mark.parametrize(("service", "steps"), [(Trackio, [1, 2, 2, 2, 3]), (SwanLab, [0, 1, 2, 3, 4])])
def test_a_resumed_run_goes_on_after_what_is_written(service, steps, tmp_path, monkeypatch):
    fake, said, run = Fake(monkeypatch, service.__name__.lower()), [], run_in(tmp_path)
    tracked(service("team/sums" if service is SwanLab else "sums", run), said, LOG)
    tracked(service("sums", run), said, [*LOG, step(3)])
    assert said == []
    assert [number for number, _ in fake.rows] == steps
    assert [values.get("train/reward") for _, values in fake.rows] == [0.125, 0.25, None, None, 0.375]
    assert fake.rows[3][1]["eval/held-out/mean"] == 0.5 and "samples" in fake.rows[2][1]
    assert (fake.inits[0]["project"], fake.inits[0]["resume"], fake.finished) == ("sums", "allow", 2)
    assert fake.inits[0]["name"].startswith("sums")


def test_swanlab_without_a_key_says_what_to_set(tmp_path, monkeypatch):
    fake, said = Fake(monkeypatch, "swanlab"), list[str]()
    sys.modules["swanlab"].Settings = lambda **given: SimpleNamespace(mode="online", api_key=None)  # type: ignore[attr-defined]
    tracked(SwanLab("sums", run_in(tmp_path)), said, LOG)
    assert "SWANLAB_API_KEY is not set" in said[0] and not fake.inits


# ------------------------------------------------------------------------------------------------ the packages


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="trackio is not installed")
def test_trackio_has_every_row(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "board"))
    said, run = list[str](), run_in(tmp_path)
    tracked(Trackio("sums", run), said, LOG)
    tracked(Trackio("sums", run), said, [*LOG, step(3)])
    assert said == []
    with sqlite3.connect(next((tmp_path / "board").glob("*.db"))) as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert len({name for name, _, _ in rows}) == 1
    assert [number for _, number, _ in rows] == [1, 2, 2, 2, 3]
    assert "1+1=" in rows[2][2].decode() and "trackio.table" in rows[2][2].decode()


@pytest.mark.skipif(importlib.util.find_spec("swanlab") is None, reason="swanlab is not installed")
def test_swanlab_has_every_row(tmp_path, monkeypatch):
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    said, run = list[str](), run_in(tmp_path)
    tracked(SwanLab("team/sums", run), said, LOG)
    tracked(SwanLab("team/sums", run), said, [*LOG, step(3)])
    assert said == []
    first, second = sorted((run.folder / "swanlab").glob("run-*/*.swanlab"))
    assert b"train/reward" in first.read_bytes() and b"eval/held-out/mean" in first.read_bytes()
    assert b"train/reward" in second.read_bytes() and b"eval/held-out/mean" not in second.read_bytes()
    assert [file.read_text().count("1+1=") for file in (run.folder / "swanlab").glob("run-*/media/echarts/*")] == [1]


# ------------------------------------------------------------------------------------------------ from the log


def test_the_newest_rollouts_are_shown_and_bounded(tmp_path, monkeypatch):
    run = MemoryRun(small_run(), folder=tmp_path)
    assert tables.newest_samples(run.transport(), None) == ()
    for number in range(40):
        run.put("verified", verified(sibling(number), reward=number / 40))
    rows = tables.newest_samples(run.transport(), None, most=5)
    assert len(rows) == 5 and all(row.prompt and row.reward is not None for row in rows)
    monkeypatch.setattr(tables, "MOST_CHARACTERS", 2)
    assert all(len(row.prompt) <= 2 for row in tables.newest_samples(run.transport(), None))
    made = tables.SampleTables(run.transport(), None)
    assert [len(made.take([step(1)])), len(made.take([step(2)])), len(made.take([]))] == [1, 0, 0], "now and then"
