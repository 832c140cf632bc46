"""Who was busy when: shares and numbers in hand by hand, and the lanes of a simulated run, whole and in part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rftstream.contracts.control import Claim, DesiredState, RunState
from rftstream.contracts.versions import StepRecord, VersionName
from rftstream.queries.catalog.updating import CatalogUpdater
from rftstream.queries.curves import timeline
from rftstream.queries.curves.history import History, read_history
from rftstream.queries.curves.lines import over_steps, over_time
from rftstream.queries.curves.timeline import NUM_SLOTS, Activity, Lane, Timeline, busy_share, in_hand, read_timeline
from rftstream.runs.folder import OpenRun
from rftstream.service.role import Log
from rftstream.testing import Simulation
from rftstream.transport.memory.transport import MemoryLog
from tests.suite.each import each
from tests.unit.studio.studio_scene import make_config
from tests.unit.synthetic import SyntheticLog


@each(
    ("intervals", "share", "halves"),
    [
        ([], 0.0, (0, 0)),
        ([(0, 10)], 1.0, (1, 1)),
        ([(0, 5), (2.5, 5)], 0.5, (1.5, 0)),
        ([(-100, 2.5), (7.5, 100)], 0.5, (0.5, 0.5)),
        ([(0, 2.5), (2.5, 5), (5, np.inf)], 1.0, (1, 1)),
        ([(6, 4), (-5, -1), (11, 12), (np.inf, np.inf)], 0.0, (0, 0)),
    ],
)
def test_intervals_by_hand(intervals: list[tuple[float, float]], share: float, halves: tuple[float, float]) -> None:
    """In a stretch of ten seconds."""
    starts, stops = np.asarray(intervals, dtype=np.float64).reshape(-1, 2).T + 1_000_000.0
    assert busy_share(starts, stops, 1_000_000.0, 1_000_010.0) == pytest.approx(share)
    values = in_hand(starts, stops, 1_000_000.0, 1_000_010.0)
    assert len(values) == NUM_SLOTS
    assert values.reshape(2, -1).mean(axis=1) == pytest.approx(halves, abs=1e-6)


def step(version: int, at: float, *, wait: float, train: float, publish: float) -> StepRecord:
    return StepRecord(
        name=VersionName(trainer_epoch=1, version=version), batch_sequence=version - 1, positions=(0,),
        trained_groups=version, trained_rollouts=version, weights_digest=None, recorded_at=at,
        metrics={"wait_s": wait, "step_s": train, "publish_s": publish},
    )  # fmt: skip


def test_pauses_that_somebody_asked_for_take_no_time() -> None:
    """Each is from the last step on that was in flight; one before the first step, and one that goes on, are none."""
    log = SyntheticLog(MemoryLog(lambda: 0.0).connect())
    log.step(0, resumed=True)
    log.trained |= dict.fromkeys(range(9), 0)

    def ask(state: DesiredState, at: float) -> None:
        log.put("control", RunState(state=state, by="ada", since=at))

    for version, at in ((1, 100.0), (2, 110.0), (3, 112.0), (4, 165.0)):
        log.step(version, at=at)
    for state, at in (("paused", 50.0), ("running", 60.0), ("paused", 111.0), ("paused", 120.0), ("running", 160.0)):
        ask(DesiredState(state), at)
    ask(DesiredState.paused, 170.0)
    history = read_history(Log(log.transport))
    assert history.asked_pauses == history.pauses == ((112.0, 160.0),)
    axes = over_steps(history), over_time(history)
    assert [axis.pauses for axis in axes] == [((3.0, "pause of 48 s"),), ((12.0, "pause of 48 s"),)]
    assert not any(len(axis.resumes) for axis in axes) and axes[1].steps.tolist() == [0, 10, 12, 17]
    ask(DesiredState.draining, 180.0)
    log.step(4, epoch=2, resumed=True, at=300.0)
    assert read_history(Log(log.transport)).pauses == ((112.0, 160.0), (165.0, 300.0))


@each(
    ("waiting", "sampling", "scoring", "said"),
    [
        (0.1, 0.4, 0.1, "training is what takes the time; explorers had nothing to sample 60% of the time"),
        (0.1, None, None, "training is what takes the time."),
        (0.5, 0.9, 0.9, "50% of the time: sampling is"),
        (0.4, 0.9, 0.1, "trains 60% of the time, and waits for a batch 40% of it: training takes most, then sampling."),
        (0.66, 0.79, 0.19, "66% of the time: sampling is"),
        (0.5, 0.3, 0.9, "50% of the time: scoring is"),
        (0.5, 0.4, 0.3, "explorers have nothing to sample 60% of it: they wait for each other"),
        (0.5, None, None, "waits for a batch 50% of the time."),
    ],
)
def test_the_answer(waiting: float, sampling: float | None, scoring: float | None, said: str) -> None:
    def lane(role: str, **shares: float | None) -> Lane:
        some = tuple(Activity(name=name, values=np.zeros(1), share=share) for name, share in shares.items())
        return Lane(role=role, process="", activities=some, in_hand=False)

    def answer(training: float, *, restarted: bool = False) -> str:
        trainer = lane("trainer", training=training, **{"waiting for a batch": waiting})
        lanes = (lane("explorer", sampling=sampling), lane("verifier", scoring=scoring), trainer)
        return Timeline(
            first=1, last=2, begin=0.0, end=1.0, seconds=1.0, made=np.zeros(2), lanes=lanes, one_in=1,
            restarted=restarted, slowest=None,
        ).answer  # fmt: skip

    assert said in answer(1 - waiting, restarted=True) and "no trainer" not in answer(1 - waiting, restarted=True)
    assert "no trainer" not in answer(0.75 - waiting)  # what steps do not tell, such as commits
    assert answer(0.75 - waiting, restarted=True).endswith(" For 25% of it no trainer was at work.")


def waits_of(rows: Sequence[Mapping[str, Any]], found: Timeline) -> list[tuple[str, float]]:
    within = [row for row in rows if row["decided_at"] and found.begin <= row["decided_at"] <= found.end]
    return [(row["group_id"], row["waited"]) for row in within]


@pytest.mark.slow
def test_the_lanes_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(make_config(), folder=tmp_path / "run", seed=3)
    simulation.run()
    transport = simulation.transport()
    updater = CatalogUpdater(OpenRun(simulation.folder, simulation.config, transport), folder=tmp_path)
    updater.update()
    catalog = updater.open_catalog()
    assert catalog is not None
    claim = Claim(role="trainer", epoch=1, host="here", pid=1, process="trainer-0", claimed_at=0.0)
    history = read_history(Log(transport))
    with catalog:
        found = read_timeline(history, catalog, {"trainer": claim})
        assert found is not None and (found.first, found.last, found.one_in) == (1, 6, 1)
        roles = [lane.role for lane in found.lanes]
        assert roles == ["explorer", "verifier", "buffer", "batches", "trainer", "evaluator"]
        assert found.lane("trainer").process == "trainer-0@here"
        length = found.end - found.begin
        rows = catalog.rows(
            "SELECT g.admitted_at AS began, r.sampled_at AS ended FROM groups g JOIN rollouts r USING (sequence)"
        )
        seconds = sum(max(0.0, min(row["ended"], found.end) - max(row["began"], found.begin)) for row in rows)
        assert found.lane("explorer").activities[0].values.mean() * length == pytest.approx(seconds, rel=0.02)
        waits = catalog.rows("SELECT group_id, decided_at - admitted_at AS waited, decided_at FROM groups")
        assert found.slowest is not None and dict(waits_of(waits, found))[found.slowest[0]] == found.slowest[1]
        assert found.slowest[1] == max(waited for _, waited in waits_of(waits, found)) > 0
        last = read_timeline(history, catalog, {}, num_versions=2)
        assert last is not None and (last.first, last.begin) == (5, history.steps[3].recorded_at)
        monkeypatch.setattr(timeline, "MAX_ROLLOUTS", 9)
        part = read_timeline(history, catalog, {})
        assert part is not None and part.one_in > 1 and part.lane("explorer").activities[0].share is None
        steps = tuple(step(v, 100.0 + 10 * v, wait=5, train=3, publish=2) for v in range(1, 5001))
        many = read_timeline(History(steps=steps, resumes=(), evaluations=(), current=steps[-1]), catalog, {})
        assert many is not None and len(many.made) <= NUM_SLOTS
        shares = {one.name: one.share for one in many.lane("trainer").activities}
        assert shares == pytest.approx({"training": 0.3, "publishing": 0.2, "waiting for a batch": 0.5}, abs=0.01)
        waited = (*steps[:10], step(11, 1210.0, wait=1005, train=3, publish=2))
        pauses = ((200.0, 1200.0),)  # of which step 11 knows as a wait for its batch
        paused = History(steps=waited, resumes=(), evaluations=(), current=waited[-1], asked_pauses=pauses)
        idle = read_timeline(paused, catalog, {})
        assert idle is not None and (idle.paused_s, idle.seconds) == pytest.approx((1000.0, 110.0))
        shares = {one.name: one.share for one in idle.lane("trainer").activities}
        assert shares == pytest.approx({"training": 0.3, "publishing": 0.2, "waiting for a batch": 0.5}, abs=0.01)
        assert idle.made[-2:] == pytest.approx([100 / 110, 1.0])
        assert read_timeline(History(steps=(), resumes=(), evaluations=(), current=None), catalog, {}) is None
    updater.close()
