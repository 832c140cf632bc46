"""The buffer alone, killed and refused at any moment: what it decides stays what it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rftstream.service.role_claim import MAX_WAIT_S
from rftstream.testing import RoleDriver
from tests.flow.disturbed import FaultAt, at_commits, restarting, tick_on
from tests.flow.test_buffer import TIMEOUT, Scene, batches_of, end, outcomes_of

pytestmark = pytest.mark.law("lost", "twice", "order")

SETTINGS = {"feeder__group_size": 3, "buffer__zero_variance": "replace", "transport__partitions": 2,
            "trainer__shares": 2, "buffer__max_body_bytes": 700}  # fmt: skip


def happenings(scene: Scene) -> list[Callable[[], None]]:
    random = Random(5)
    records = []
    for sequence in range(14):
        rewards: Any = [(0.0, 1.0, 0.5), (1.0, 1.0, 1.0), (TIMEOUT, TIMEOUT, 0.0), (0.0, TIMEOUT, 1.0)]
        records += [(sequence, n, reward) for n, reward in enumerate(rewards[0 if sequence < 2 else sequence % 4])]
    records.sort(key=lambda one: one[0] + 4 * random.random())
    happens = [lambda one=one: scene.verify(one[0], (one[2],), only=(one[1],)) for one in records]
    return [*happens, lambda: end(scene, 14)]


def decided_by(scene: Scene, buffer: RoleDriver, after: Callable[[], None]) -> Any:
    for happens in happenings(scene):
        happens()
        after()
    scene.log.fault = None
    scene.clock.advance(MAX_WAIT_S)  # for a successor's claim, after many commits that were lost
    buffer.work(within_s=0.9)
    batches_of(scene)
    outcomes = {one.group_id: (one.result, one.reason, one.rollouts, one.batch_sequence) for one in outcomes_of(scene)}
    assert len(outcomes) == len(outcomes_of(scene)) == 14
    return [record.value for record in scene.records("batches")], outcomes


@pytest.fixture
def undisturbed(tmp_path: Path) -> Any:
    scene = Scene(tmp_path / "undisturbed", **SETTINGS)
    buffer = RoleDriver(scene, "buffer")
    return decided_by(scene, buffer, buffer.work)


@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_a_restart_changes_nothing(tmp_path: Path, undisturbed: Any, every: int) -> None:
    scene = Scene(tmp_path, **SETTINGS)
    buffer = RoleDriver(scene, "buffer")
    assert decided_by(scene, buffer, restarting(buffer, every)) == undisturbed


@at_commits
@pytest.mark.parametrize("rate", [0.3, 0.6])
def test_no_fault_at_a_commit_changes_anything(
    tmp_path: Path, undisturbed: Any, point: str, fault: type[BaseException], rate: float
) -> None:
    scene = Scene(tmp_path, **SETTINGS)
    scene.log.fault = happens = FaultAt(point, fault, "buffer", share=rate)
    buffer = RoleDriver(scene, "buffer")
    assert decided_by(scene, buffer, lambda: tick_on(buffer)) == undisturbed
    assert happens.count > 5
