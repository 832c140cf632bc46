"""Tasksets whose rollouts fail are named, in `status`, the progress line and the studio."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rftstream.config.loader import from_dict
from rftstream.contracts.rollouts import RolloutStatus
from rftstream.queries.state.flow_map import what_is_wrong
from rftstream.queries.state.standstill import find_failing
from rftstream.queries.state.status_reading import read_status
from rftstream.runs.folder import OpenRun, RunFolder
from rftstream.transport.memory.transport import MemoryLog
from tests.unit.synthetic import SyntheticLog, rollout

CONFIG = {
    "run": {"name": "demo", "steps": 8},
    "model": {"path": "fake"},
    "tasksets": {"sums": {"source": "arithmetic"}},
}


@pytest.mark.parametrize(
    ("num_failed", "num_good", "num_skipped", "says"),
    [
        (60, 0, 0, "60 of the newest 60 rollouts of sums failed: the agent failed: KeyError: 59"),
        (100, 100, 0, "64 of the newest 64 rollouts"),  # those that failed came last
        (4, 0, 50, "4 of the newest 4 rollouts"),
        (3, 0, 0, None),
        (20, 21, 0, None),
        (0, 60, 0, None),
    ],
)
def test_who_fails_is_named(tmp_path: Path, num_failed: int, num_good: int, num_skipped: int, says: str | None) -> None:
    now = 0.0
    log = SyntheticLog(MemoryLog(lambda: now).connect())
    statuses = [RolloutStatus.completed] * num_good + [RolloutStatus.failed] * num_failed
    for number, status in enumerate([*statuses, *[RolloutStatus.skipped] * num_skipped]):
        now += 1.0
        (one, *_) = log.siblings(number)
        error = f"the agent failed: KeyError: {number}" if status is RolloutStatus.failed else None
        log.put("rollouts", replace(rollout(one), status=status, error=error))
    found = find_failing(log.transport)
    assert [one.to_text()[: len(says or "")] for one in found] == ([] if says is None else [says])
    status = read_status(OpenRun(RunFolder(tmp_path), from_dict(CONFIG), log.transport))
    assert status.failing == found and status.to_json()["failing"] == [one.to_json() for one in found]
    assert (says or "fails  ") in status.to_text() or says is None
    titles = [one.title for one in what_is_wrong(status, now=now)]
    assert ("rollouts of sums fail" in titles) == (says is not None)
