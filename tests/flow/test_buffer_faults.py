"""The buffer alone, killed and refused at any moment: what it decides stays what it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rftstream.errors import ProducerLost, TransactionAborted
from rftstream.testing import RoleDriver
from rftstream.testing.faults import Kill
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
    count = 0

    def work() -> None:
        nonlocal count
        count += 1
        if count % every == 0:
            buffer.restart()
        buffer.work()

    assert decided_by(scene, buffer, work) == undisturbed


@pytest.mark.parametrize(("point", "fault"), [
    ("before_commit", Kill), ("after_commit", Kill), ("before_commit", ProducerLost), ("after_commit", ProducerLost),
    ("before_commit", TransactionAborted),
])  # fmt: skip
@pytest.mark.parametrize("rate", [0.3, 0.6])
def test_no_fault_at_a_commit_changes_anything(
    tmp_path: Path, undisturbed: Any, point: str, fault: type[BaseException], rate: float
) -> None:
    scene, random, count = Scene(tmp_path, **SETTINGS), Random(3), 0

    def now_and_then(at: str, process: str) -> None:
        nonlocal count
        if at == point and process == "buffer" and random.random() < rate:
            count += 1
            raise fault("simulated")

    scene.log.fault = now_and_then
    buffer = RoleDriver(scene, "buffer")

    def work() -> None:
        """A little; records come while a commit is tried again."""
        for _ in range(3):
            try:
                scene.clock.advance(buffer.tick())
            except Kill:
                buffer.restart()

    assert decided_by(scene, buffer, work) == undisturbed
    assert count > 5
