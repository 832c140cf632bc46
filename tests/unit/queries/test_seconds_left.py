"""When a run will be done, as `status` says it."""

from __future__ import annotations

from pathlib import Path

from rftstream.contracts.control import DesiredState, RunState
from rftstream.queries.curves.history import HistoryReader
from rftstream.queries.formatting import rates_text
from rftstream.queries.state.status_reading import read_status
from rftstream.runs.folder import OpenRun, RunFolder
from rftstream.service.role import Log
from rftstream.transport.memory.transport import MemoryLog
from tests.configs import small_run
from tests.unit.synthetic import SyntheticLog


def test_a_run_at_work_says_when_its_steps_will_be_done(tmp_path: Path) -> None:
    log = SyntheticLog(MemoryLog(lambda: 0.0).connect())
    log.step(0, resumed=True)
    for version in (1, 2, 3):
        log.trained[version] = version
        log.step(version, at=100.0 + version, metrics={"reward": 0.5, "wait_s": 0.25, "step_s": 0.75})
    config = small_run(run={"name": "demo", "steps": 8})
    run = OpenRun(RunFolder(tmp_path), config, log.transport)
    assert read_status(run, now=104.0).seconds_left is None, "nobody is at work here"
    with RunFolder(tmp_path).held():
        found = read_status(run, now=104.0)
        assert found.to_json()["seconds_left"] == found.seconds_left == 5.0
        assert "3 of 8, trainer epoch 1, recorded 1 s ago; some 5 s left\n" in found.to_text(104.0)
        assert "no batch for" not in found.to_text(104.0)
        assert "trains 75%, publishes 0% (last 3 steps); now it has had no batch for 47 s" in (found.to_text(150.0))
        assert read_status(run, now=150.0).seconds_left is None, "this step takes far longer"
        assert read_status(run, now=999.0).seconds_left is None, "it stands still"
        log.put("control", RunState(state=DesiredState.paused, by="me", reason="lunch"))
        assert read_status(run, now=104.0).seconds_left is None


def test_fast_steps_are_averaged_over_a_minute(tmp_path: Path) -> None:
    log = SyntheticLog(MemoryLog(lambda: 0.0).connect())
    log.step(0, resumed=True)
    for version in range(1, 32):
        log.trained[version] = version
        log.step(version, at=100.0 + version + 2 * max(0, version - 21), metrics={"reward": 0.5})
    run = OpenRun(RunFolder(tmp_path), small_run(run={"name": "demo", "steps": 61}), log.transport)
    with RunFolder(tmp_path).held():
        assert read_status(run, now=152.0).seconds_left == 50.0, "30 steps took 50 s, and the last 9 of them 27 s"


def test_a_glance_at_a_fast_run_averages_only_steps_that_it_has(tmp_path: Path) -> None:
    """It has the first 256 and the newest 512 steps, which may all be of the last minute."""
    log = SyntheticLog(MemoryLog(lambda: 0.0).connect())
    log.step(0, resumed=True)
    for version in range(1, 1_001):
        log.trained[version] = version
        log.step(version, at=100.0 + version / 32, metrics={"step_s": 0.03, "rollouts": 4.0, "tokens": 100.0})
    reader = HistoryReader(Log(log.transport))
    reader.read()
    glance = reader.glance()
    assert len(glance.steps) < glance.num_steps == 1_000
    assert glance.speed_texts()[1] == "128 rollouts/s, 3,200 trained tokens/s (last 16 s of steps)"
    assert glance.seconds_left(1_032, 131.25) == 1.0


def test_demonstrations_alone_are_no_rollouts() -> None:
    assert rates_text([{"rollouts": 0.0, "tokens": 12.0}, {"rollouts": 0.0, "tokens": 18.0}], 20.0) == [
        "1.5 trained tokens/s (last 20 s of steps)"
    ]
