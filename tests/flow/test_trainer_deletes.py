"""What a trainer deletes: said first, and nothing that anybody needs, however late somebody who was away comes back."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rftstream.contracts.control import Claim, Trimmed
from rftstream.contracts.outcomes import GroupResult
from rftstream.contracts.records import NewRecord, TopicPartition
from rftstream.contracts.versions import VersionName, WeightsAnnounced
from rftstream.errors import ConfigError, ProducerLost, TakenOver, TransportError, WeightsError
from rftstream.replay.again import replay
from rftstream.runs.roll_back import roll_back
from rftstream.service.control_view import read_control
from rftstream.testing import RoleDriver
from rftstream.testing.faults import Kill
from rftstream.transport.base import Position, Producer
from rftstream.weights.checkpoints import CheckpointStore
from tests.flow.disturbed import FaultAt
from tests.flow.scene import Scene
from tests.flow.test_replay import InMemory
from tests.flow.trained import checkpoints_of, digests_of, names, steps_of, trained, versions_kept

KEEPING = {"trainer__checkpoint_every": 2, "retention": {"checkpoints": 2}}


def scene_of(folder: Path, batches: int = 8, **settings: object) -> Scene:
    scene = Scene(folder, **{**KEEPING, **settings})
    trained(scene, batches)
    return scene


def said_of(scene: Scene) -> Trimmed:
    said = read_control(scene.transport()).trimmed
    assert said is not None
    return said


def begin_of_batches(scene: Scene) -> tuple[int, ...]:
    return tuple(offset for _, offset in sorted(scene.transport().admin.begin_offsets("batches").items()))


def name(epoch: int, version: int) -> VersionName:
    return VersionName(trainer_epoch=epoch, version=version)


# --------------------------------------------------------------------------------------------- batches


@pytest.mark.law("bounded")
@pytest.mark.parametrize("shares", [1, 2])
def test_batches_below_the_oldest_of_the_kept_checkpoints_go(tmp_path: Path, shares: int) -> None:
    scene = scene_of(tmp_path, trainer__shares=shares)
    said = said_of(scene)
    assert (said.name, said.checkpoints, said.version) == (name(1, 8), (name(1, 6), name(1, 8)), 6)
    step = next(one for one in steps_of(scene) if one.name.version == 6)
    assert begin_of_batches(scene) == said.offsets["batches"] == step.positions
    assert checkpoints_of(scene) == [(1, 6), (1, 8)]


def test_without_the_section_the_log_stays_whole(tmp_path: Path) -> None:
    scene = scene_of(tmp_path, retention=None)
    assert checkpoints_of(scene) == [(1, 6), (1, 8)]
    assert not any(begin_of_batches(scene))
    assert (said_of(scene).offsets, said_of(scene).version) == ({}, 0)


def test_more_checkpoints_than_are_kept_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"retention.checkpoints: got 3, expected at most trainer.keep_checkpoints"):
        Scene(tmp_path, retention={"checkpoints": 3})


@pytest.mark.law("replay")
@pytest.mark.parametrize("version", [4, 6, 8])
def test_each_kept_checkpoint_can_be_gone_back_to_and_gives_the_same_weights(tmp_path: Path, version: int) -> None:
    """With three of them; the run goes on two batches further than it was."""
    settings = {"trainer__keep_checkpoints": 3, "retention": {"checkpoints": 3}}
    calm, scene = scene_of(tmp_path / "calm", 10, retention=None), scene_of(tmp_path / "trimmed", **settings)
    assert begin_of_batches(scene) == next(one for one in steps_of(calm) if one.name.version == 4).positions
    roll_back(scene.transport(), scene.store, scene.folder.run_id, version)
    for number in (8, 9):
        scene.batch(number)
    RoleDriver(scene, "trainer").work()
    assert names(steps_of(scene))[-1] == (3, 10)
    assert digests_of(scene) == digests_of(calm)


def test_what_was_given_up_is_not_gone_back_to(tmp_path: Path) -> None:
    scene = scene_of(tmp_path, trainer__keep_every=4)
    assert checkpoints_of(scene) == [(1, 4), (1, 6), (1, 8)]
    for version, way in ((0, "deleted$"), (4, r'deleted; .*: model.init_from = "RUN@4"$')):
        with pytest.raises(ConfigError, match=f"{version} has no good checkpoint, expected one of 6, 8; batch.*{way}"):
            roll_back(scene.transport(), scene.store, scene.folder.run_id, version)


def test_damaged_ones_are_passed_over_and_without_any_it_says_what_is_missing(tmp_path: Path) -> None:
    scene = scene_of(tmp_path, trainer__keep_every=4)
    for one in scene.store.list("checkpoints/000001-00000008/files"):
        scene.store.objects[one] = b"damaged"
    trainer = RoleDriver(scene, "trainer")
    trainer.work()
    assert names(steps_of(scene))[-3:] == [(2, 6), (2, 7), (2, 8)]
    for one in scene.store.list("checkpoints/"):
        if "files" in one and "00000004" not in one:
            scene.store.objects[one] = b"damaged"
    with pytest.raises(ConfigError, match=r"no usable checkpoint, .* expected a checkpoint of version 6 or above"):
        RoleDriver(scene, "trainer").work()


@pytest.mark.parametrize(
    ("lost", "keep", "found", "expected"),
    [
        ("checkpoints/", 2, "no checkpoint", "one of 1/6, 1/8"),
        ("", 20, "no checkpoint", "the weights that the log names"),  # which names no checkpoint, as none was deleted
        ("damaged", 20, "no usable checkpoint", "one of 1/2, 1/4, 1/6, 1/8"),
    ],
)
def test_a_store_that_lost_its_checkpoints_is_refused_until_the_run_goes_back_to_the_beginning(
    tmp_path: Path, lost: str, keep: int, found: str, expected: str
) -> None:
    scene = scene_of(tmp_path, retention=None, trainer__keep_checkpoints=keep)
    digests = digests_of(scene)
    for one in [*scene.store.list("checkpoints/" if lost == "damaged" else lost)]:
        if lost != "damaged":
            del scene.store.objects[one]
        elif "/files/" in one:
            scene.store.objects[one] = b"damaged"
    match = f"has {found}, expected {expected}.* to go on from version 8; .* --set run.resume=0"
    with pytest.raises(ConfigError, match=match):
        RoleDriver(scene, "trainer").work()
    roll_back(scene.transport(), scene.store, scene.folder.run_id, 0)
    RoleDriver(scene, "trainer").work()
    assert names(steps_of(scene))[-1][1] == 8
    assert digests_of(scene) == digests


@pytest.mark.law("replay")
def test_replay_says_from_which_version_it_can_begin(tmp_path: Path) -> None:
    scene = scene_of(tmp_path)
    with pytest.raises(ConfigError, match="replay with --from 6"):
        replay(InMemory(scene), first=3)
    found = replay(InMemory(scene), first=6)
    assert found.equal
    assert (found.start, found.num_batches) == (6, 2)


# --------------------------------------------------------------------------------------------- the flow


def read_up_to(scene: Scene, **groups: int) -> None:
    """What the readers of the flow have committed: everything up to so many records of each partition."""
    topics = {"explorer": "tasks", "verifier": "rollouts", "buffer": "verified"}
    producer = scene.transport().producer("readers")
    producer.start()
    for group, offset in groups.items():
        places = scene.transport().admin.end_offsets(topics[group])
        producer.commit([], positions={place: Position(min(offset, end)) for place, end in places.items()}, group=group)


def count_admitted(scene: Scene, admitted: int) -> None:
    producer = scene.transport().producer("feeder")
    producer.start()
    cursor = f'{{"admitted":{admitted},"drawn":{{}},"left_out":{{}}}}'
    producer.commit([], positions={TopicPartition("steps", 0): Position(0, cursor)}, group="feeder")


def flow(scene: Scene, *sequences: int) -> None:
    """Sampled and verified."""
    scene.admit(*sequences)
    for sequence in sequences:
        scene.put("rollouts", *(scene.rollout(one) for one in scene.siblings(sequence)))
        scene.verify(sequence)
    count_admitted(scene, max(sequences) + 1)


def begins(scene: Scene) -> dict[str, int]:
    """Records that are gone, by topic."""
    admin = scene.transport().admin
    return {topic: sum(admin.begin_offsets(topic).values()) for topic in ("tasks", "rollouts", "verified")}


@pytest.mark.law("lost", "bounded")
def test_the_flow_goes_once_its_groups_are_through_and_everybody_has_read_it(tmp_path: Path) -> None:
    scene = Scene(tmp_path, **KEEPING)
    trainer = RoleDriver(scene, "trainer")

    def train_to(version: int) -> dict[str, int]:
        while len(steps_of(scene)) - 1 < version:
            scene.batch(max(0, len(steps_of(scene)) - 1))
            trainer.work()
        return begins(scene)

    trainer.work()
    flow(scene, *range(4))
    assert train_to(2) == {"tasks": 0, "rollouts": 0, "verified": 0}
    for sequence in range(3):
        scene.decide(sequence, GroupResult.batched, batch=sequence)
    flow(scene, 4, 5)
    nothing = {"tasks": 0, "rollouts": 0, "verified": 0}
    assert train_to(4) == nothing, "3 has no outcome"
    scene.decide(3, GroupResult.dead)
    assert train_to(6) == nothing, "nobody has committed that he read them"
    read_up_to(scene, explorer=99, verifier=99, buffer=99)
    assert train_to(8) == {"tasks": 8, "rollouts": 8, "verified": 8}
    scene.decide(4, GroupResult.batched, batch=3)
    scene.decide(5, GroupResult.expired)
    assert train_to(10) == {"tasks": 12, "rollouts": 12, "verified": 12}
    said = said_of(scene)
    assert (said.sequence, said.version) == (6, 8)
    assert said.groups == {"trained": 4, "dead": 1, "expired": 1}
    assert said.rollouts == {"trained": 8, "dead": 2, "expired": 2}


@pytest.mark.slow
@pytest.mark.law("lost")
@pytest.mark.parametrize("question", range(1, 10))
def test_a_group_that_comes_while_it_looks_is_not_taken_for_an_older_one(tmp_path: Path, question: int) -> None:
    """Group 4 flows through everybody between two of the trainer's questions after the first checkpoint."""
    scene = Scene(tmp_path, **KEEPING)
    trainer = RoleDriver(scene, "trainer")
    trainer.work()
    flow(scene, *range(4))
    left = [question]

    def come(point: str, process: str) -> None:
        if (point, process) != ("question", "trainer") or not checkpoints_of(scene):
            return
        left[0] -= 1
        if left[0] == 0:
            flow(scene, 4)

    scene.log.fault = come
    for number in range(2):
        scene.batch(number)
    trainer.work()
    scene.log.fault = None
    for sequence in range(4):
        scene.decide(sequence, GroupResult.dead)
    for number in range(2, 10):
        read_up_to(scene, explorer=99, verifier=99, buffer=99)
        scene.batch(number)
        trainer.work()
    assert said_of(scene).sequence == 4
    assert all(count <= 8 for count in begins(scene).values())
    if left[0] <= 0:
        for topic in ("tasks", "rollouts", "verified"):
            assert [one for one in scene.records(topic) if one.header("sequence") == b"4"], f"{topic}: group 4 is gone"


# --------------------------------------------------------------------------------------------- coming late


def objects_of(scene: Scene) -> set[tuple[int, int]]:
    """Checkpoints of which anything is there."""
    folders = {one.split("/")[1] for one in scene.store.list("checkpoints/")}
    return {(int(epoch), int(version)) for epoch, _, version in (one.partition("-") for one in folders)}


class Successor:
    """Runs inside a trainer that stands still at a point, and goes on far beyond it."""

    def __init__(self, scene: Scene, point: str, occurrence: int, *, batches: int = 14) -> None:
        self._scene, self._point, self._left, self._batches = scene, point, occurrence, batches
        self.trainer: RoleDriver | None = None
        scene.store.fault = self
        scene.log.fault = lambda point, process: self(point) if process == "trainer" else None

    def __call__(self, point: str) -> None:
        if self.trainer is not None or point != self._point:
            return
        self._left -= 1
        if self._left > 0:
            return
        self.trainer = RoleDriver(self._scene, "trainer", process="successor")
        self.trainer.work()
        for number in range(8, self._batches):
            self._scene.batch(number)
        self.trainer.work()


def go_on(trainer: RoleDriver) -> None:
    """Until it notices that it was replaced."""
    for _ in range(200):
        trainer.tick()
        trainer.run.clock.advance(1.0)


POINTS = [("before_delete", n) for n in (1, 2, 5, 9, 14, 20)] + [
    ("before_checkpoints", 7), ("after_checkpoints", 7), ("after_checkpoints", 6), ("before_versions", 8),
    ("after_commit", 6), ("after_commit", 8), ("before_commit", 7),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.law("fencing")
@pytest.mark.parametrize(("point", "occurrence"), POINTS)
def test_one_that_was_away_takes_nothing_from_its_successor(tmp_path: Path, point: str, occurrence: int) -> None:
    """Wherever it stood still, in the middle of its deletions, too: each of the successor's checkpoints is there."""
    scene = Scene(tmp_path, **KEEPING, weights__keep=3)
    for number in range(8):
        scene.batch(number)
    away = Successor(scene, point, occurrence)
    zombie = RoleDriver(scene, "trainer")
    with pytest.raises(TakenOver):
        go_on(zombie)
    assert away.trainer is not None
    said = said_of(scene)
    assert [one.version for one in said.checkpoints] == [12, 14]
    assert {(one.trainer_epoch, one.version) for one in said.checkpoints} <= objects_of(scene)
    store = CheckpointStore(scene.store)
    assert all(store.verify(one)["version"] == one.version for one in said.checkpoints)
    assert begin_of_batches(scene) == tuple(store.state(said.checkpoints[0])["positions"])
    newest = [one for one in scene.messages("weights") if isinstance(one, WeightsAnnounced)][-3:]
    assert {one.object for one in newest} <= set(scene.store.objects)
    for version in (12, 14):
        roll_back(scene.transport(), scene.store, scene.folder.run_id, version)
        RoleDriver(scene, "trainer", process=f"from {version}").work()
    assert all(len(digests) == 1 for digests in digests_of(scene).values())


def test_going_back_sees_what_was_given_up_a_moment_before(tmp_path: Path) -> None:
    """A trainer that stands still before it deletes comes back after somebody has chosen where to begin."""
    scene = scene_of(tmp_path, batches=4, trainer__keep_every=2)
    away = RoleDriver(scene, "trainer", process="away")
    chosen: list[str] = []

    def fault(point: str, process: str) -> None:
        if point != "before_delete" or process != "away" or chosen or said_of(scene).version < 4:
            return
        for version in (2, 4):
            try:
                roll_back(scene.transport(), scene.store, scene.folder.run_id, version)
            except ConfigError as error:
                chosen.append(str(error))

    for number in (4, 5):
        scene.batch(number)
    scene.log.fault = fault
    with pytest.raises(TakenOver):
        go_on(away)
    assert len(chosen) == 1, "2 was given up; its batches were still there"
    assert "version 2 has no good checkpoint, expected one of 4, 6" in chosen[0]


@pytest.mark.slow
@pytest.mark.law("bounded")
@pytest.mark.parametrize("occurrence", range(1, 24, 3))
def test_killed_between_saying_and_deleting_its_successor_does_it(tmp_path: Path, occurrence: int) -> None:
    calm = scene_of(tmp_path / "calm", 12)
    scene = Scene(tmp_path / "killed", **KEEPING)
    left = [occurrence]

    def fault(point: str) -> None:
        left[0] -= point == "before_delete"
        if not left[0]:
            left[0] = -1000
            raise Kill(point)

    scene.store.fault = fault
    scene.log.fault = lambda point, process: fault(point)
    trainer = RoleDriver(scene, "trainer")
    for number in range(12):
        scene.batch(number)
    try:
        trainer.work()
    except Kill:
        trainer.restart()
        trainer.work()
    assert begin_of_batches(scene) == begin_of_batches(calm)
    assert [version for _, version in checkpoints_of(scene)] == [10, 12]
    assert {version for _, version in versions_kept(scene)} == {version for _, version in versions_kept(calm)}
    assert digests_of(scene) == digests_of(calm)


def test_what_cannot_be_deleted_for_now_goes_later(tmp_path: Path) -> None:
    calm = scene_of(tmp_path / "calm", 12)
    scene = Scene(tmp_path / "refused", **KEEPING)
    refused: list[type[Exception]] = []

    def no_right(error: type[Exception], point: str) -> None:
        if point == "before_delete" and len(steps_of(scene)) < 10:
            refused.append(error)
            raise error("simulated: no right to delete")

    def refuse(point: str) -> None:
        no_right(WeightsError, point)

    def refuse_too(point: str, process: str) -> None:
        no_right(TransportError, point)

    scene.store.fault, scene.log.fault = refuse, refuse_too
    trained(scene, 12)
    assert set(refused) == {WeightsError, TransportError}
    assert begin_of_batches(scene) == begin_of_batches(calm)
    assert checkpoints_of(scene) == checkpoints_of(calm)
    assert versions_kept(scene) == versions_kept(calm)


def test_nothing_is_deleted_while_what_was_said_cannot_be_read(tmp_path: Path) -> None:
    """Somebody's open transaction on `control` hides it: who reads then would miss what was deleted."""
    calm = scene_of(tmp_path / "calm", 10)
    scene = Scene(tmp_path / "hidden", **KEEPING)
    trainer = RoleDriver(scene, "trainer")
    trainer.work()
    scene.put("control", Claim(role="buffer", epoch=1, host="", pid=0, process="buffer", claimed_at=0.0))
    other = hide_control(scene)
    for number in range(8):
        scene.batch(number)
    trainer.work()
    assert names(steps_of(scene))[-1] == (1, 8)
    assert not any(begin_of_batches(scene))
    assert (1, 2) in checkpoints_of(scene)
    other.start()
    for number in (8, 9):
        scene.batch(number)
    trainer.work()
    assert begin_of_batches(scene) == begin_of_batches(calm)
    assert checkpoints_of(scene) == checkpoints_of(calm)


# --------------------------------------------------------------------------------------------- at the end of the run

ENDS = {**KEEPING, "run__steps": 8}


def hide_control(scene: Scene) -> Producer:
    """Somebody begins a transaction on `control` and dies in it; `start` of the producer ends it."""
    other = scene.transport("other").producer("other")
    other.start()

    scene.log.fault = FaultAt("in_commit", Kill, "other")
    with pytest.raises(Kill):
        other.commit([NewRecord("control", 0, b"other", b"")])
    scene.log.fault = None
    return other


def assert_carried_out(scene: Scene) -> None:
    said = said_of(scene)
    assert sum(said.offsets["batches"]) > 0
    assert begin_of_batches(scene) == said.offsets["batches"]
    assert checkpoints_of(scene) == [(one.trainer_epoch, one.version) for one in said.checkpoints]


def ended_while_hidden(folder: Path) -> tuple[Scene, RoleDriver, Producer]:
    """A trainer that has trained all, has said what goes, and cannot delete it yet."""
    scene = Scene(folder, **ENDS)
    trainer = trained(scene, 7)
    other = hide_control(scene)
    scene.batch(7)
    trainer.work()
    assert names(steps_of(scene))[-1] == (1, 8)
    return scene, trainer, other


def test_what_was_said_is_deleted_before_the_trainer_leaves_a_finished_run(tmp_path: Path) -> None:
    scene, trainer, other = ended_while_hidden(tmp_path)
    assert not trainer.done, "what it has said is still there"
    other.start()
    trainer.work(within_s=1.0)
    assert trainer.done
    assert said_of(scene).name == name(1, 8)
    assert_carried_out(scene)
    assert names(steps_of(scene))[-1] == (1, 8), "nothing is published after the end"


def test_what_was_said_is_deleted_between_two_checkpoints(tmp_path: Path) -> None:
    """It does not wait for the next one, which may be hours away."""
    scene = Scene(tmp_path, **KEEPING)
    trainer = trained(scene, 5)
    other = hide_control(scene)
    scene.batch(5)
    trainer.work()
    other.start()
    scene.clock.advance(1.0)
    trainer.work()
    assert said_of(scene).name == name(1, 6)
    assert_carried_out(scene)


@pytest.mark.parametrize("trimming", [1, 2, 3, 4])
def test_killed_when_the_run_is_finished_its_successor_deletes_and_claims_nothing(
    tmp_path: Path, trimming: int
) -> None:
    """Between saying and deleting, the log hidden or not."""
    scene, trainer, other = ended_while_hidden(tmp_path)
    trainer.restart()
    if trimming > 1:
        trainer.work()
        assert not trainer.done
        scene.clock.advance(float(trimming))
    before = scene.log.num_changes
    other.start()
    trainer.work(within_s=1.0)
    assert trainer.done
    assert_carried_out(scene)
    assert read_control(scene.transport()).claims["trainer"].epoch == 1
    assert scene.log.num_changes > before
    assert names(steps_of(scene))[-1] == (1, 8)


def test_a_successor_whose_deletion_fails_for_now_asks_again_and_claims_nothing(tmp_path: Path) -> None:
    scene, trainer, other = ended_while_hidden(tmp_path)
    trainer.restart()
    other.start()
    refused: list[str] = []

    def refuse(point: str, process: str) -> None:
        if point == "before_delete" and len(refused) < 2:
            refused.append(process)
            raise TransportError("simulated: ask again later")

    scene.log.fault = refuse
    began = scene.clock.now()
    while not trainer.done:
        assert scene.clock.now() - began < 100
        scene.clock.advance(max(trainer.tick(), 0.001))
    assert len(refused) == 2
    assert read_control(scene.transport()).claims["trainer"].epoch == 1, "a finished run has no use for a trainer"
    assert_carried_out(scene)


def test_a_log_that_never_deletes_does_not_keep_a_finished_run_for_ever(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(tmp_path, **ENDS)

    def refuse(point: str, process: str) -> None:
        if point == "before_delete":
            raise TransportError("simulated: ask again later")

    scene.log.fault = refuse
    trainer = trained(scene, 8)
    assert not trainer.done
    began = scene.clock.now()
    with caplog.at_level(logging.WARNING):
        while not trainer.done:
            assert scene.clock.now() - began < 1000
            scene.clock.advance(max(trainer.tick(), 0.001))
    assert scene.clock.now() - began > 60, "as long as the transaction of a dead process may stay open"
    assert not any(begin_of_batches(scene))
    assert "`rftstream resume` deletes it" in caplog.text


def test_without_the_right_to_delete_a_run_ends_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As a broker says it whose ACLs do not allow it."""
    scene = Scene(tmp_path, **ENDS)

    def refuse(point: str, process: str) -> None:
        if point == "before_delete":
            raise ConfigError("simulated: no right to delete")

    scene.log.fault = refuse
    for number in range(8):
        scene.batch(number)
    trainer = RoleDriver(scene, "trainer")
    with caplog.at_level(logging.WARNING):
        trainer.work()
    assert trainer.done
    assert not any(begin_of_batches(scene))
    assert checkpoints_of(scene) == [(1, 6), (1, 8)], "what may be deleted is"
    assert "no right to delete; what was given up is deleted later" in caplog.text


def test_a_trainer_that_lost_its_producer_at_the_end_publishes_nothing_more(tmp_path: Path) -> None:
    """It does not know whether what goes was said, reads the log again, and leaves with that done."""
    scene = Scene(tmp_path, **ENDS)
    trainer = RoleDriver(scene, "trainer")
    for number in range(8):
        scene.batch(number)

    refused: list[str] = []

    def fault(point: str, process: str) -> None:
        if process != "trainer" or read_control(scene.transport()).finished is None:
            return
        if point == "after_commit" and said_of(scene).name == name(1, 8) and not refused:
            refused.append(point)
            raise ProducerLost("simulated: the result of the commit is unknown")
        if point == "before_delete" and len(refused) < 4:
            refused.append(point)
            raise TransportError("simulated: no answer")

    scene.log.fault = fault
    trainer.work(within_s=5.0)
    assert len(refused) == 4
    assert trainer.done
    assert_carried_out(scene)
    assert names(steps_of(scene))[-1] == (1, 8)
