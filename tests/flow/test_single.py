"""Two of a single role at once: the later one wins, and the earlier one says who took over."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from rftstream.contracts import codec
from rftstream.contracts.control import Claim
from rftstream.contracts.records import NewRecord
from rftstream.errors import ProducerLost, TakenOver, TransactionAborted
from rftstream.testing import RoleDriver
from rftstream.testing.faults import Kill
from tests.flow.disturbed import FaultAt
from tests.flow.scene import Scene

pytestmark = pytest.mark.law("fencing")


@pytest.fixture(params=["feeder", "buffer", "trainer", "evaluator"])
def role(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def scene(tmp_path: Path, role: str) -> Scene:
    scene = Scene(
        tmp_path,
        manifest=role != "feeder",
        evaluations={"held-out": {"source": "arithmetic", "options": {"size": 3}, "every": 1}},
    )
    if role == "evaluator":
        scene.announce(0)
    return scene


def claims_of(scene: Scene, role: str) -> list[tuple[int, str]]:
    return [(one.epoch, one.process) for one in scene.messages("control")
            if isinstance(one, Claim) and one.role == role]  # fmt: skip


def happen(scene: Scene, role: str) -> None:
    """Something to do."""
    match role:
        case "feeder":
            scene.step(1)
        case "buffer":
            scene.verify(0)
            scene.verify(1)
        case "trainer":
            scene.batch(0)
        case "evaluator":
            scene.announce(1)


OUTPUT = {"feeder": "tasks", "buffer": "batches", "trainer": "steps", "evaluator": "evals"}


def test_the_later_one_wins(scene: Scene, role: str) -> None:
    first = RoleDriver(scene, role, process="first")
    first.work()
    second = RoleDriver(scene, role, process="second")
    second.work()
    assert claims_of(scene, role) == [(1, "first"), (2, "second")]
    before = len(scene.records(OUTPUT[role]))
    with pytest.raises(TakenOver) as taken_over:
        first.work()
    assert taken_over.value.exit_code == 5
    assert f"{role}: second, process " in str(taken_over.value)
    assert len(scene.records(OUTPUT[role])) == before
    happen(scene, role)
    second.work()
    assert len(scene.records(OUTPUT[role])) > before


def test_a_claim_behind_an_open_transaction_is_not_overlooked(scene: Scene, role: str) -> None:
    """Somebody died in the middle of a transaction on `control`: nobody can read what was committed there since."""
    first = RoleDriver(scene, role, process="first")
    writer = scene.transport("dead").producer("dead", timeout_s=30.0)
    writer.start()

    def dies_before_the_claim() -> None:
        transactions = scene.log.transactions
        transactions.append(transactions.begin("dead", 30.0), [NewRecord("control", 0, b"never", b"never")])

    scene.log.fault = FaultAt("before_commit", dies_before_the_claim, "first", most=1)
    first.tick()
    assert claims_of(scene, role) == []
    second = RoleDriver(scene, role, process="second")
    second.tick()
    scene.clock.advance(31.0)
    assert claims_of(scene, role) == [(1, "first")]
    second.work()
    assert claims_of(scene, role) == [(1, "first"), (2, "second")]


def test_one_that_is_idle_notices_too(scene: Scene, role: str) -> None:
    first = RoleDriver(scene, role, process="first")
    first.work()
    RoleDriver(scene, role, process="second").work()
    assert any(source.has_data() for source in first.service.sources())  # type: ignore[union-attr]
    with pytest.raises(TakenOver):
        first.tick()


def test_one_that_was_away_in_the_middle_of_a_commit_changes_nothing(scene: Scene, role: str) -> None:
    first = RoleDriver(scene, role, process="first")
    first.work()
    second = RoleDriver(scene, role, process="second")
    seen = 0

    def go_away() -> None:
        nonlocal seen
        second.work()
        seen = len(scene.records(OUTPUT[role]))

    scene.log.fault = away = FaultAt("before_commit", go_away, "first", most=1)
    happen(scene, role)
    with pytest.raises(TakenOver, match="second"):
        first.work()
    assert away.count == 1
    assert len(scene.records(OUTPUT[role])) == seen > 0


def test_fenced_before_the_claim_while_another_claims(scene: Scene, role: str) -> None:
    second = RoleDriver(scene, role, process="second")

    scene.log.fault = FaultAt("before_commit", second.work, "first", most=1)
    with pytest.raises(TakenOver, match="second"):
        RoleDriver(scene, role, process="first").work()
    assert claims_of(scene, role) == [(1, "second")]


def test_fenced_before_the_claim_by_the_one_that_is_replaced(scene: Scene, role: str) -> None:
    """It is quicker, twice: it finds no claim yet and takes the role again. The later one wins all the same."""
    first = RoleDriver(scene, role, process="first")
    first.work()

    def is_quicker() -> None:
        producer = scene.transport("first").producer(f"flow.{role}")
        producer.start()
        claim = [one for one in scene.messages("control") if isinstance(one, Claim) and one.role == role][-1]
        again = dataclasses.replace(claim, epoch=claim.epoch + 1)
        producer.commit([codec.to_record(again, "control", 0, run="flow", writer_epoch=again.epoch)])

    scene.log.fault = FaultAt("before_commit", is_quicker, "second", most=2)
    second = RoleDriver(scene, role, process="second")
    for _ in range(4):
        scene.clock.advance(max(second.tick(), 0.01))
    assert [process for _, process in claims_of(scene, role)] == ["first", "first", "first", "second"]
    with pytest.raises(TakenOver, match="second"):
        first.work()


def test_fenced_before_the_claim_by_one_that_dies_then(scene: Scene, role: str) -> None:
    """Nobody else has claimed: it waits a while and starts again."""
    start = scene.transport("second").producer(f"flow.{role}").start
    scene.log.fault = FaultAt("before_commit", start, "first", most=1)
    first = RoleDriver(scene, role, process="first")
    wait = first.tick()
    assert 0 < wait <= 1
    assert claims_of(scene, role) == []
    scene.clock.advance(wait)
    first.work()
    assert claims_of(scene, role) == [(1, "first")]


def test_fenced_before_the_claim_by_one_that_claims_while_it_waits(scene: Scene, role: str) -> None:
    """The later one wins; the earlier one does not even disturb it."""
    second = RoleDriver(scene, role, process="second")

    start = scene.transport("second").producer(f"flow.{role}").start
    scene.log.fault = FaultAt("before_commit", start, "first", most=1)
    first = RoleDriver(scene, role, process="first")
    scene.clock.advance(first.tick())
    second.work()
    with pytest.raises(TakenOver, match="second"):
        first.work()
    happen(scene, role)
    second.work()
    assert claims_of(scene, role) == [(1, "second")]


@pytest.mark.parametrize("point", ["before_commit", "after_commit"])
def test_a_claim_whose_commit_is_unknown_is_never_taken_for_another_ones(scene: Scene, role: str, point: str) -> None:
    scene.log.fault = FaultAt(point, ProducerLost, "first", most=1)
    first = RoleDriver(scene, role, process="first")
    first.work(within_s=0.999)
    epochs = [(1, "first")] if point == "before_commit" else [(1, "first"), (2, "first")]
    assert claims_of(scene, role) == epochs
    assert first.service.health()["epoch"] == len(epochs)


def test_a_claim_that_is_aborted_is_tried_again(scene: Scene, role: str) -> None:
    scene.log.fault = FaultAt("before_commit", TransactionAborted, "first", most=3)
    first = RoleDriver(scene, role, process="first")
    first.work(within_s=0.999)
    assert claims_of(scene, role) == [(1, "first")]
    assert len(scene.records(OUTPUT[role])) > 0 or role == "buffer"


@pytest.mark.parametrize("point", ["before_commit", "after_commit"])
def test_killed_at_its_claim(scene: Scene, role: str, point: str) -> None:
    scene.log.fault = FaultAt(point, Kill, "first", most=1)
    first = RoleDriver(scene, role, process="first")
    with pytest.raises(Kill):
        first.work()
    first.restart()
    first.work()
    assert [epoch for epoch, _ in claims_of(scene, role)] == ([1] if point == "before_commit" else [1, 2])


def test_three_in_turn(scene: Scene, role: str) -> None:
    drivers = [RoleDriver(scene, role, process=f"number-{n}") for n in range(3)]
    for driver in drivers:
        driver.work()
    for driver in drivers[:2]:
        with pytest.raises(TakenOver, match="number-2"):
            driver.work()
    drivers[2].work()
    drivers[0].restart()  # by a supervisor that knows nothing of the others
    drivers[0].work()
    with pytest.raises(TakenOver, match="number-0"):
        drivers[2].work()
    assert [epoch for epoch, _ in claims_of(scene, role)] == [1, 2, 3, 4]


def test_told_to_leave_it_leaves_between_two_transactions(scene: Scene, role: str) -> None:
    first = RoleDriver(scene, role, process="first")
    first.work()
    first.stop()
    assert first.done
    second = RoleDriver(scene, role, process="second")
    second.work()
    assert [epoch for epoch, _ in claims_of(scene, role)] == [1, 2]
