"""Records that somebody else wrote on topics with one writer: put aside, with the run going on as if nothing was."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from rftstream.contracts import codec
from rftstream.contracts.batches import BatchManifest, Experience
from rftstream.contracts.dead import DeadLetter
from rftstream.contracts.outcomes import GroupOutcome
from rftstream.contracts.records import NewRecord, Record
from rftstream.contracts.versions import StepRecord, VersionName
from rftstream.errors import ContractError
from rftstream.service.role import Log
from rftstream.testing import RoleDriver
from tests.flow.scene import Scene
from tests.flow.trained import trained

pytestmark = pytest.mark.law("fencing")


def letters(scene: Scene) -> list[DeadLetter]:
    return [one for one in scene.messages("dead") if isinstance(one, DeadLetter)]


def versions(scene: Scene) -> list[int]:
    return [one.name.version for one in scene.messages("steps") if isinstance(one, StepRecord)]


def record_of(scene: Scene, kind: type, batch: int) -> tuple[Record, BatchManifest | Experience]:
    for record in scene.records("batches"):
        message = codec.from_record(record)
        if isinstance(message, kind) and message.batch_sequence == batch:  # type: ignore[attr-defined]
            assert isinstance(message, BatchManifest | Experience)
            return record, message
    raise AssertionError(f"batch {batch} has no {kind}")


def again(scene: Scene, record: Record, value: bytes | None) -> NewRecord:
    return NewRecord("batches", record.partition, record.key, value, record.headers)


def changed(scene: Scene, kind: type, batch: int, **fields: object) -> NewRecord:
    """As its writer wrote it, but for these fields."""
    record, message = record_of(scene, kind, batch)
    return codec.to_record(
        dataclasses.replace(message, **fields), "batches", record.partition, run=scene.folder.run_id, writer_epoch=1  # type: ignore[arg-type]
    )  # fmt: skip


def repeated(scene: Scene, kind: type) -> NewRecord:
    record, _ = record_of(scene, kind, 0)
    return again(scene, record, record.value)


def unclaimed_manifest(scene: Scene) -> NewRecord:
    record, message = record_of(scene, BatchManifest, 0)
    return codec.to_record(message, "batches", record.partition, run=scene.folder.run_id, writer_epoch=2**40)


NOTHING = codec.digest_of_experiences([])
STRAY: dict[str, Callable[[Scene], NewRecord]] = {
    "noise": lambda scene: again(scene, record_of(scene, Experience, 0)[0], b"\xc1 no message"),
    "older manifest": lambda scene: repeated(scene, BatchManifest),
    "older experience": lambda scene: repeated(scene, Experience),
    "next manifest": lambda scene: changed(scene, BatchManifest, 0, batch_sequence=1),
    "empty manifest": lambda scene: changed(scene, BatchManifest, 0, batch_sequence=1, count=0, digest=NOTHING),
    "far manifest": lambda scene: changed(scene, BatchManifest, 0, batch_sequence=7),
    "next experience": lambda scene: changed(scene, Experience, 0, batch_sequence=1, reward=99.0),
    "unclaimed manifest": unclaimed_manifest,
}


@pytest.mark.parametrize("stray", STRAY)
def test_what_is_no_part_of_the_chain_is_put_aside_once_and_training_goes_on(tmp_path: Path, stray: str) -> None:
    calm = Scene(tmp_path / "calm")
    trained(calm, 3)

    scene = Scene(tmp_path / "foreign")
    trainer = RoleDriver(scene, "trainer")
    scene.batch(0)
    scene.put_raw(STRAY[stray](scene))
    trainer.work()
    assert versions(scene) == [0, 1]
    scene.batch(1)
    trainer.work()
    scene.batch(2)
    trainer.work()
    assert versions(scene) == [0, 1, 2, 3]
    steps = [[one.weights_digest for one in place.messages("steps") if isinstance(one, StepRecord)]
             for place in (calm, scene)]  # fmt: skip
    assert steps[0] == steps[1], "what somebody else wrote is not trained"
    assert [one.topic for one in letters(scene)] == ["batches"]
    assert letters(scene)[0].reason in ("foreign", "undecodable")
    RoleDriver(scene, "trainer", process="after").work()
    assert len(letters(scene)) == 1, "it is read again, and put aside once"


@pytest.mark.parametrize("kind", [Experience, BatchManifest])
def test_a_batch_that_was_committed_and_cannot_be_completed_ends_the_run(tmp_path: Path, kind: type) -> None:
    """Be it the newest one, or one with others behind it."""
    for behind in (False, True):
        scene = Scene(tmp_path / f"{behind}")
        scene.batch(0)
        place = record_of(scene, kind, 0)[0]
        if behind:
            scene.batch(1)
        records = scene.log.partitions[place.place].records
        index = next(number for number, one in enumerate(records) if one.offset == place.offset)
        records[index] = msgspec.structs.replace(records[index], value=b"\xc1")
        with pytest.raises(ContractError, match="batch 0 cannot be completed") as failed:
            RoleDriver(scene, "trainer").work()
        assert failed.value.exit_code == 4


def test_strays_between_the_records_of_a_batch_are_told_apart(tmp_path: Path) -> None:
    """Kafka lets them in: a transaction's records are not next to each other."""
    scene = Scene(tmp_path)
    scene.batch(0)
    records = scene.log.partitions[scene.records("batches")[0].place].records
    first, manifest = records[0], records[-1]
    strange = changed(scene, Experience, 0, reward=-5.0)
    scene.put_raw(
        strange,
        again(scene, manifest, codec.encode(dataclasses.replace(codec.from_record(manifest), total_groups=5, count=9))),  # type: ignore[type-var]
    )
    stray = records[-2:]
    del records[-2:]
    whole = [stray[0], *records[:1], stray[1], *records[1:]]
    records[:] = [msgspec.structs.replace(one, offset=first.offset + number) for number, one in enumerate(whole)]
    RoleDriver(scene, "trainer").work()
    assert versions(scene) == [0, 1]
    assert {one.reason for one in letters(scene)} == {"foreign"}
    assert sorted(one.offset for one in letters(scene)) == [0, 2]


def test_an_announcement_that_nobody_claimed_stops_no_explorer(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.announce(0)
    explorer = RoleDriver(scene, "explorer")
    name = VersionName(trainer_epoch=2**40, version=3)
    record = scene.records("weights")[0]
    announced = dataclasses.replace(codec.from_record(record), name=name)  # type: ignore[type-var]
    scene.put_raw(codec.to_record(announced, "weights", 0, run="flow", writer_epoch=2**40))
    explorer.work()
    assert explorer.service.health()["version"] == 0
    scene.announce(1)
    scene.announce(1, epoch=2, resumed=True)
    explorer.work()
    assert explorer.service.health()["version"] == 1
    assert explorer.service.health()["weights_refused"] == 0


def outcome_record(scene: Scene, place: int = -1) -> Record:
    return scene.records("outcomes")[place]


def rewritten(record: Record, value: bytes | None = None, **headers: bytes) -> NewRecord:
    """A record that stands on the log, written again with another value or other headers."""
    changed = tuple((name, headers.get(name, text)) for name, text in record.headers)
    return NewRecord(record.topic, record.partition, record.key, record.value if value is None else value, changed)


def of_another_epoch(scene: Scene) -> NewRecord:
    """Of a group that has no outcome yet."""
    siblings = scene.siblings(1)
    outcome = dataclasses.replace(codec.from_record(outcome_record(scene)), group_id=siblings[0].group_id, sequence=1)  # type: ignore[type-var]
    return codec.to_record(outcome, "outcomes", 0, run=scene.folder.run_id, writer_epoch=2**40)


OF_LATER = {"contract_version": b"99", "readable_since": b"99"}
FOREIGN_OUTCOMES: dict[str, Callable[[Scene], NewRecord]] = {
    "noise": lambda scene: rewritten(outcome_record(scene), b"\x80"),
    "noise of a release to come": lambda scene: rewritten(
        outcome_record(scene), b"\x80", contract_version=b"99", readable_since=b"99"
    ),
    "a copy": lambda scene: rewritten(outcome_record(scene)),
    "bytes": lambda scene: NewRecord("outcomes", 0, None, b"\xc1", ()),
    "unclaimed": of_another_epoch,
}


@pytest.mark.parametrize("kind", FOREIGN_OUTCOMES)
def test_foreign_outcomes_change_nothing(tmp_path: Path, kind: str) -> None:
    """Neither for those who are there, nor for those who start afterwards."""
    scene = Scene(tmp_path, manifest=False)
    scene.step(0, resumed=True)
    scene.announce(0)
    feeder, buffer, explorer = (RoleDriver(scene, role) for role in ("feeder", "buffer", "explorer"))
    feeder.work()
    buffer.work()
    scene.verify(0, (None, None))
    buffer.work()
    feeder.work()
    before = feeder.service.health()
    assert (before["admitted"], before["rejected"]) == (5, 1)
    scene.put_raw(FOREIGN_OUTCOMES[kind](scene))
    for driver in (feeder, buffer, explorer):
        driver.work()
    feeder, buffer = RoleDriver(scene, "feeder", process="f2"), RoleDriver(scene, "buffer", process="b2")
    feeder.work()
    assert (feeder.service.health()["admitted"], feeder.service.health()["rejected"]) == (5, 1)
    scene.verify(1)
    scene.verify(2)
    buffer.work()
    assert len([one for one in scene.messages("batches") if isinstance(one, BatchManifest)]) == 1
    assert buffer.service.health()["decided_groups"] == 3


def test_an_outcome_of_a_later_release_counts_by_its_headers(tmp_path: Path) -> None:
    scene = Scene(tmp_path, manifest=False)
    scene.step(0, resumed=True)
    for role in ("feeder", "buffer"):
        RoleDriver(scene, role).work()
    scene.verify(0, (None, None))
    RoleDriver(scene, "buffer", process="b1").work()
    records = scene.log.partitions[outcome_record(scene).place].records
    later = rewritten(outcome_record(scene), b"\x80", **OF_LATER)
    records[-1] = msgspec.structs.replace(records[-1], value=later.value, headers=later.headers)
    feeder, buffer = RoleDriver(scene, "feeder", process="f2"), RoleDriver(scene, "buffer", process="b2")
    feeder.work()
    assert (feeder.service.health()["admitted"], feeder.service.health()["rejected"]) == (5, 1)
    buffer.work()
    assert buffer.service.health()["decided_groups"] == 1


def test_copies_of_what_the_buffer_has_decided_are_no_latecomers(tmp_path: Path) -> None:
    """A group that was closed early has latecomers, each once."""
    scene = Scene(tmp_path, manifest=False, buffer__group_deadline_s=5.0, feeder__group_size=3)
    RoleDriver(scene, "feeder").work()
    buffer = RoleDriver(scene, "buffer")
    scene.verify(0, (None, None, None))
    scene.verify(1, (0.0,), only=[0])
    buffer.work()
    scene.clock.advance(6.0)
    buffer.work()
    for process in ("buffer", "b2"):
        scene.verify(1, (0.0,), only=[0])
        scene.verify(1, (0.0,), only=[2])
        scene.verify(0, (None,), only=[1])
        buffer = RoleDriver(scene, "buffer", process=process)
        buffer.work()
    outcomes = [one for one in scene.messages("outcomes") if isinstance(one, GroupOutcome)]
    assert [(one.sequence, one.late, len(one.rollouts)) for one in outcomes] == [
        (0, False, 3), (1, False, 1), (1, True, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("topic", ["steps", "weights"])
def test_versions_follow_one_by_one(tmp_path: Path, topic: str) -> None:
    """A forged one of the right epoch that jumps ahead is not believed, the true ones behind it are."""
    scene = Scene(tmp_path)
    put = scene.step if topic == "steps" else scene.announce
    put(0, resumed=True)
    put(1)
    put(1001)
    put(2)
    put(2, epoch=2, resumed=True)
    put(3, epoch=2)
    put(1003, epoch=2)
    found = [(one.name.trainer_epoch, one.name.version) for _, one in Log(scene.transport()).in_force(topic)]  # type: ignore[union-attr]
    assert found == [(1, 0), (1, 1), (1, 2), (2, 2), (2, 3)]


def test_an_announcement_may_pass_over_versions_that_were_trained(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    for version in range(5):
        scene.step(version, resumed=not version)
    for version in (0, 4, 1004):
        scene.announce(version)
    found = [one.name.version for _, one in Log(scene.transport()).in_force("weights")]  # type: ignore[union-attr]
    assert found == [0, 4]


def test_a_step_of_a_later_release_is_one_of_them(tmp_path: Path) -> None:
    """It cannot be read, and the next one follows it."""
    scene = Scene(tmp_path)
    for version in range(4):
        scene.step(version, resumed=not version)
    records = scene.log.partitions[scene.records("steps")[0].place].records
    records[2] = msgspec.structs.replace(records[2], value=b"\x80")
    found = [one.name.version for _, one in Log(scene.transport()).in_force("steps")]  # type: ignore[union-attr]
    assert found == [0, 1, 3]
