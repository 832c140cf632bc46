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
from rftstream.contracts.records import NewRecord, Record
from rftstream.contracts.versions import StepRecord, VersionName
from rftstream.errors import ContractError
from rftstream.testing import RoleDriver
from tests.flow.scene import Scene

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


def noise(scene: Scene) -> NewRecord:
    return again(scene, record_of(scene, Experience, 0)[0], b"\xc1 no message")


def older_manifest(scene: Scene) -> NewRecord:
    record, _ = record_of(scene, BatchManifest, 0)
    return again(scene, record, record.value)


def older_experience(scene: Scene) -> NewRecord:
    record, _ = record_of(scene, Experience, 0)
    return again(scene, record, record.value)


def next_manifest(scene: Scene) -> NewRecord:
    return changed(scene, BatchManifest, 0, batch_sequence=1)


def empty_manifest(scene: Scene) -> NewRecord:
    nothing = codec.digest_of_experiences([])
    return changed(scene, BatchManifest, 0, batch_sequence=1, count=0, digest=nothing)


def far_manifest(scene: Scene) -> NewRecord:
    return changed(scene, BatchManifest, 0, batch_sequence=7)


def next_experience(scene: Scene) -> NewRecord:
    return changed(scene, Experience, 0, batch_sequence=1, reward=99.0)


def unclaimed_manifest(scene: Scene) -> NewRecord:
    record, message = record_of(scene, BatchManifest, 0)
    return codec.to_record(message, "batches", record.partition, run=scene.folder.run_id, writer_epoch=2**40)


STRAY = [
    noise, older_manifest, older_experience, next_manifest, empty_manifest, far_manifest, next_experience,
    unclaimed_manifest,
]  # fmt: skip


@pytest.mark.parametrize("make", STRAY, ids=lambda one: one.__name__)
def test_what_is_no_part_of_the_chain_is_put_aside_once_and_training_goes_on(
    tmp_path: Path, make: Callable[[Scene], NewRecord]
) -> None:
    calm = Scene(tmp_path / "calm")
    for number in range(3):
        calm.batch(number)
    RoleDriver(calm, "trainer").work()

    scene = Scene(tmp_path / "foreign")
    trainer = RoleDriver(scene, "trainer")
    scene.batch(0)
    scene.put_raw(make(scene))
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
