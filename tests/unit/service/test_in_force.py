"""The one rule of topics with one writer: epochs that were claimed, and records that follow from what stands before."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest

from rftstream.contracts import codec
from rftstream.contracts.control import Claim, RunFinished, RunManifest, TasksEnded, Trimmed
from rftstream.contracts.messages import Message
from rftstream.contracts.records import Record
from rftstream.contracts.versions import StepRecord, VersionName
from rftstream.errors import ForeignRecord
from rftstream.service.control_view import read_control
from rftstream.service.records.in_force import RecordsInForce
from rftstream.service.role import Log
from tests.flow.scene import Scene

pytestmark = pytest.mark.law("fencing")


def claim(role: str, epoch: int) -> Claim:
    return Claim(role=role, epoch=epoch, host="h", pid=1, process=f"{role}-{epoch}", claimed_at=0.0)


def finished(epoch: int) -> RunFinished:
    return RunFinished(reason="steps", name=VersionName(trainer_epoch=epoch, version=1), finished_at=1.0)


def step(version: int, epoch: int) -> StepRecord:
    return StepRecord(
        name=VersionName(trainer_epoch=epoch, version=version), batch_sequence=version - 1, positions=(0,),
        trained_groups=0, trained_rollouts=0, weights_digest=None, metrics={}, recorded_at=0.0,
    )  # fmt: skip


class Said:
    """A log on which anybody says anything, under any epoch."""

    def __init__(self, folder: Path) -> None:
        self.scene = Scene(folder)
        self.log = Log(self.scene.transport())

    def put(self, message: Message, epoch: int, topic: str = "control") -> None:
        self.scene.put_raw(codec.to_record(message, topic, 0, run="flow", writer_epoch=epoch))

    def in_force(self, topic: str = "control") -> list[Message | None]:
        """As somebody sees it who reads from the beginning, without the manifest."""
        found = Log(self.scene.transport()).in_force(topic)
        return [message for _, message in found if not isinstance(message, RunManifest)]


@pytest.fixture
def said(tmp_path: Path) -> Said:
    return Said(tmp_path)


def test_claims_follow_one_another_by_one(said: Said) -> None:
    said.put(claim("trainer", 2), 2)
    for epoch in (1, 2, 2, 1, 4, 2**63 - 1, 3):
        said.put(claim("trainer", epoch), epoch)
    said.put(claim("buffer", 1), 1)
    assert said.in_force() == [*(claim("trainer", epoch) for epoch in (1, 2, 3)), claim("buffer", 1)]
    assert {role: one.epoch for role, one in read_control(said.scene.transport()).claims.items()} == {
        "trainer": 3, "buffer": 1,
    }  # fmt: skip


def test_the_first_good_manifest_is_the_manifest(said: Said) -> None:
    before = read_control(said.scene.transport()).manifest
    assert before is not None
    record = said.scene.records("control")[0]
    said.put(dataclasses.replace(before, seed=99), 1)
    said.scene.put_raw(msgspec.structs.replace(codec.to_record(before, "control", 0, run="flow"), value=b"\xc1"))
    assert read_control(said.scene.transport()).manifest == before
    found = [one for one in Log(said.scene.transport()).messages("control") if isinstance(one.message, RunManifest)]
    assert [one.record.offset for one in found] == [record.offset], "and nobody who recovers fails over the others"


def test_the_run_is_finished_by_the_trainer_in_force_alone(said: Said) -> None:
    said.put(finished(1), 1)
    said.put(claim("trainer", 1), 1)
    said.put(finished(2), 2)
    said.put(finished(2), 1)
    said.put(finished(1), 0)
    assert read_control(said.scene.transport()).finished is None
    said.put(finished(1), 1)
    assert read_control(said.scene.transport()).finished == finished(1)
    said.put(claim("trainer", 2), 2)
    assert read_control(said.scene.transport()).finished == finished(1), "it was in force where it stands"
    said.put(dataclasses.replace(finished(1), reason="late"), 1)
    assert read_control(said.scene.transport()).finished == finished(1)


def test_the_end_of_tasks_is_said_by_the_feeder_in_force(said: Said) -> None:
    said.put(claim("feeder", 1), 1)
    said.put(claim("feeder", 2), 2)
    said.put(TasksEnded(admitted=3, reason="taskset"), 1)
    said.put(TasksEnded(admitted=4, reason="imported"), 0)
    assert read_control(said.scene.transport()).ended is None
    said.put(TasksEnded(admitted=5, reason="taskset"), 2)
    assert read_control(said.scene.transport()).ended == TasksEnded(admitted=5, reason="taskset")


def test_what_is_deleted_contradicts_neither_the_log_nor_what_was_said(said: Said) -> None:
    said.scene.admit(0, 1, 2)
    said.put(claim("trainer", 1), 1)
    said.scene.step(2)
    name = VersionName(trainer_epoch=1, version=2)
    ends = [end for _, end in sorted(said.scene.transport().admin.end_offsets("tasks").items())]
    good = Trimmed(name=name, checkpoints=(), offsets={"tasks": tuple(ends)}, version=2, sequence=3)
    for strange, epoch in (
        (dataclasses.replace(good, offsets={"tasks": (ends[0] + 1, *ends[1:])}), 1),
        (dataclasses.replace(good, offsets={"tasks": (0,)}), 1),
        (dataclasses.replace(good, offsets={"nothing": (0,)}), 1),
        (dataclasses.replace(good, version=3), 1),
        (dataclasses.replace(good, name=VersionName(trainer_epoch=1, version=3)), 1),
        (dataclasses.replace(good, name=VersionName(trainer_epoch=0, version=2)), 1),
        (good, 2),
        (good, 0),
    ):
        said.put(strange, epoch)
    assert read_control(said.scene.transport()).trimmed is None
    said.put(good, 1)
    for strange in (
        dataclasses.replace(good, version=1),
        dataclasses.replace(good, sequence=2),
        dataclasses.replace(good, offsets={"tasks": tuple(0 for _ in ends)}),
    ):
        said.put(strange, 1)
    assert read_control(said.scene.transport()).trimmed == good


def test_steps_are_of_claimed_epochs_and_newer_than_those_before(said: Said) -> None:
    said.put(claim("trainer", 1), 1)
    said.put(claim("trainer", 2), 2)
    for version, epoch, writer in (
        (1, 1, 1), (1, 1, 1), (2, 1, 1), (1, 1, 1), (9, 2**40, 2**40), (3, 1, 2), (3, 3, 3), (2, 2, 2), (3, 1, 1),
        (3, 2, 2), (2, 1, 1),
    ):  # fmt: skip
        said.put(step(version, epoch), writer, "steps")
    record = said.scene.records("steps")[-1]
    said.scene.put_raw(msgspec.structs.replace(codec.to_record(step(4, 2), "steps", 0, run="flow"), value=b"\xc1"))
    assert record.topic == "steps"
    # (1, 3) is what a replaced trainer wrote: its own, and out of force by its lineage.
    assert said.in_force("steps") == [step(1, 1), step(2, 1), step(2, 2), step(3, 1), step(3, 2)]


def test_a_record_may_be_read_before_the_claim_it_stands_on(said: Said) -> None:
    """Nobody waits: `control` is read to its end, and in the ordinary case not once more."""
    transport = said.scene.transport("reader")
    rule = RecordsInForce(transport)
    said.put(claim("trainer", 1), 1)
    said.put(step(1, 1), 1, "steps")
    questions = 0

    def count(point: str, process: str) -> None:
        nonlocal questions
        questions += (point, process) == ("question", "reader")

    said.scene.log.fault = count
    rule.decode(said.scene.records("steps")[0])
    assert questions > 0
    questions = 0
    for version in range(2, 50):
        said.put(step(version, 1), 1, "steps")
    records = said.scene.records("steps")
    for record in records:
        rule.decode(record)
    assert questions == 0
    said.put(claim("trainer", 2), 2)
    said.put(step(49, 2), 2, "steps")
    rule.decode(said.scene.records("steps")[-1])
    assert rule.decode(said.scene.records("control")[-1]) == claim("trainer", 2), "delivered later, judged as then"


def test_the_same_record_is_judged_the_same_again(said: Said) -> None:
    said.put(claim("trainer", 1), 1)
    said.put(claim("trainer", 7), 7)
    for version in (1, 1, 2):
        said.put(step(version, 1), 1, "steps")
    rule = RecordsInForce(said.scene.transport())

    def judged(record: Record) -> bool:
        try:
            rule.decode(record)
        except ForeignRecord:
            return False
        return True

    for _ in range(3):
        assert [judged(one) for one in said.scene.records("steps")] == [True, False, True]
        assert [judged(one) for one in said.scene.records("control")] == [True, True, False]


def test_a_log_of_before_may_have_lost_its_first_claims(said: Said) -> None:
    """Its `control` was compacted: of each key only the newest may be left."""
    scene = said.scene
    settings = scene.log.topic("control")
    said.put(finished(3), 3)
    said.put(claim("trainer", 4), 4)
    said.put(step(1, 2), 2, "steps")
    assert said.in_force() == []
    scene.log.settings["control"] = dataclasses.replace(settings, compacted=True)
    assert said.in_force() == [finished(3), claim("trainer", 4)]
    assert said.in_force("steps") == [step(1, 2)]
    said.put(claim("trainer", 9), 9)
    assert said.in_force()[-1] == claim("trainer", 4), "from there on they follow one another"
