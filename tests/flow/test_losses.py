"""Records that somebody else deletes before they were read: told at once, with a way on, and never a standstill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rftstream.contracts.batches import Experience
from rftstream.contracts.control import DesiredState, RunState, Trimmed
from rftstream.contracts.outcomes import GroupOutcome, GroupResult
from rftstream.contracts.records import TopicPartition
from rftstream.contracts.versions import EvalResult, VersionName
from rftstream.errors import RUN_LOST, ConfigError, LogRefused, LogTruncated, PositionMissing, RecordsDeleted
from rftstream.launch.log_watch import LogWatch
from rftstream.metrics import LOST, WRONG_TOPICS
from rftstream.runs.folder import wanted_topics
from rftstream.runs.log_settings import check_log, dangers, explained
from rftstream.service.records.losses import deleted_unsaid
from rftstream.service.service import CALM_S
from rftstream.testing import RoleDriver
from rftstream.transport.base import Position, TopicSettings
from rftstream.transport.memory.transport import MemoryLog
from tests.flow.disturbed import FaultAt
from tests.flow.scene import Scene, make_config

pytestmark = pytest.mark.law("lost")


def delete(scene: Scene, topic: str, *, partition: int = 0, upto: int | None = None) -> int:
    """As the retention of a topic does, which asks nobody. Return up to where."""
    place = TopicPartition(topic, partition)
    end = scene.transport().admin.end_offsets(topic)[place] if upto is None else upto
    scene.transport().admin.delete_before({place: end})
    return end


def admit(scene: Scene) -> None:
    scene.announce(0)
    scene.admit(0, 3, 6)


def sample(scene: Scene) -> None:
    admit(scene)
    for sequence in (0, 3, 6):
        scene.put("rollouts", *(scene.rollout(one) for one in scene.siblings(sequence)))


def verify(scene: Scene) -> None:
    for sequence in (0, 3, 6):
        scene.verify(sequence)


READERS: list[tuple[str, str, Callable[[Scene], None]]] = [
    ("explorer", "tasks", admit), ("verifier", "rollouts", sample), ("buffer", "verified", verify),
]  # fmt: skip


@pytest.mark.parametrize(("role", "topic", "write"), READERS)
@pytest.mark.parametrize("while_running", [True, False])
def test_what_nobody_has_read_is_missed_at_once(
    scene: Scene, role: str, topic: str, write: Callable[[Scene], None], while_running: bool
) -> None:
    driver = RoleDriver(scene, role)
    driver.work()
    if not while_running:
        driver.service.close()
    write(scene)
    delete(scene, topic, upto=4)
    before = LOST.labels(role, topic)._value.get()
    with pytest.raises(RecordsDeleted) as lost:
        (driver if while_running else RoleDriver(scene, role, process="after")).work()
    assert lost.value.exit_code == RUN_LOST
    assert f"{topic}[0] from 0 to 3" in str(lost.value)
    assert 'model.init_from = "flow"' in str(lost.value)
    assert LOST.labels(role, topic)._value.get() == before + 4


@pytest.mark.parametrize(("role", "topic", "write"), READERS)
def test_newest_records_that_a_log_has_lost_are_counted(
    scene: Scene, role: str, topic: str, write: Callable[[Scene], None]
) -> None:
    """As after an unclean election: the log ends before what somebody has read already."""
    driver = RoleDriver(scene, role)
    write(scene)
    driver.work()
    partition = scene.log.partitions[TopicPartition(topic, 0)]
    end = partition.end
    partition.keep(lambda record: False)
    partition.end = partition.written = 0
    before = LOST.labels(role, topic)._value.get()
    with pytest.raises(LogTruncated, match=rf"{topic}\[0\]@{end}: beyond the end of the log \(0\), .* lost {end} off"):
        driver.work()
    assert LOST.labels(role, topic)._value.get() == before + end


PATIENCE_S = 20.0


def decide(scene: Scene) -> None:
    """Let the feeder admit one more group."""
    scene.decide(sum(isinstance(one, GroupOutcome) for one in scene.messages("outcomes")), GroupResult.dead)


@pytest.mark.parametrize(("role", "write"), [("explorer", admit), ("verifier", sample), ("feeder", decide)])
def test_a_log_that_refuses_a_worker_which_is_at_work_is_waited_for_within_patience(
    tmp_path: Path, role: str, write: Callable[[Scene], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rights or credentials were taken away. They may come back."""
    monkeypatch.setenv("BROKER_PASSWORD", "simulated")  # which the error has
    scene = Scene(tmp_path, manifest=role != "feeder", transport__patience_s=PATIENCE_S)
    driver = RoleDriver(scene, role)
    driver.work()

    def work_for(seconds: float) -> None:
        until = scene.clock.now() + seconds
        while scene.clock.now() < until:
            scene.clock.advance(min(0.5, max(driver.tick(), 0.01)))

    scene.log.fault = refusing = FaultAt("before_commit", LogRefused, role)
    began = scene.clock.now()
    write(scene)
    work_for(PATIENCE_S - 1)
    assert driver.service.health()["failure"] == "***", "secrets are left out"
    refusing.most = refusing.count
    work_for(CALM_S + 1)
    assert refusing.count > 3 and driver.service.health()["failure"] == ""
    assert driver.service.health()["failures_in_a_row"] == 0 and driver.service.last_progress_at > began
    refusing.most = float("inf")
    write(scene)
    with pytest.raises(LogRefused) as refused:
        work_for(2 * PATIENCE_S)
    assert refused.value.exit_code == 2


def test_what_the_run_itself_deletes_is_no_loss(scene: Scene) -> None:
    verify(scene)
    ends = [end for _, end in sorted(scene.transport().admin.end_offsets("verified").items())]
    name = VersionName(trainer_epoch=1, version=0)
    scene.put("control", Trimmed(name=name, checkpoints=(), offsets={"verified": (4, *ends[1:])}))
    delete(scene, "verified", upto=4)
    driver = RoleDriver(scene, "buffer")
    driver.work()
    assert driver.service.health()["open_groups"] + driver.service.health()["decided_groups"] == 1  # type: ignore[operator]


@pytest.mark.parametrize(
    ("topic", "role"),
    [("outcomes", "feeder"), ("outcomes", "buffer"), ("steps", "trainer"), ("steps", "explorer"),
     ("weights", "explorer"), ("weights", "trainer"), ("control", "verifier"), ("evals", "trainer")],
)  # fmt: skip
def test_a_log_without_its_beginning_is_named(scene: Scene, topic: str, role: str) -> None:
    scene.step(0, resumed=True)
    scene.announce(0)
    if topic == "outcomes":
        scene.decide(0, GroupResult.dead)
    if topic == "evals":
        scene.put("evals", EvalResult(evaluation="e", name=VersionName(trainer_epoch=1, version=0), num_tasks=1,
                                      num_samples=1, num_unscored=0, metrics={}, generations=None))  # fmt: skip
    upto = delete(scene, topic, upto=1)
    with pytest.raises(RecordsDeleted, match=f"has lost its beginning .offsets {upto} of {topic}"):
        RoleDriver(scene, role, process="after").work()
    said = Trimmed(name=VersionName(trainer_epoch=0, version=0), checkpoints=())
    assert deleted_unsaid(scene.transport(), said, ["tasks", topic]) == {topic: 1}


def test_a_danger_pauses_the_run_with_the_cause(tmp_path: Path) -> None:
    scene = Scene(tmp_path, manifest=False)
    feeder = RoleDriver(scene, "feeder")
    feeder.work()
    admitted = feeder.service.health()["admitted"]
    for _ in range(2):  # it is said once as long as it lasts
        feeder.service.pause_run("flow: tasks: retention.ms is 604800000, expected -1")
        feeder.work()
    states = [one for one in scene.messages("control") if isinstance(one, RunState)]
    assert [(one.state, one.by, one.reason[:12]) for one in states] == [(DesiredState.paused, "feeder", "flow: tasks:")]
    scene.decide(0, GroupResult.dead)
    feeder.work()
    assert feeder.service.health()["admitted"] == admitted
    scene.ask(DesiredState.running)
    feeder.work()
    assert feeder.service.health()["admitted"] == admitted + 1  # type: ignore[operator]


def test_each_worker_looks_at_the_topics_that_it_reads_and_the_feeder_pauses_for_all(tmp_path: Path) -> None:
    scene = Scene(tmp_path, manifest=False)
    feeder, explorer = RoleDriver(scene, "feeder"), RoleDriver(scene, "explorer")
    feeder.work()
    scene.log.settings["rollouts"] = replace(scene.log.settings["rollouts"], compacted=True)
    del scene.log.settings["verified"]  # as if rights hid it from both
    for driver, paused in ((explorer, 0), (feeder, 1)):
        watch = LogWatch(scene.config, "flow", driver.service.spec)
        watch.look(driver.service.transport)
        watch.act(driver.service)
        driver.work()
        assert WRONG_TOPICS._value.get() == 1
        states = [one for one in scene.messages("control") if isinstance(one, RunState)]
        assert [one.reason.partition("; ")[0] for one in states] == [
            "flow: rollouts: is compacted, expected not"
        ] * paused


CHANGES: dict[str, tuple[Callable[[TopicSettings], TopicSettings], str]] = {
    "partitions": (lambda one: replace(one, partitions=one.partitions + 2), "tasks: has 5 partitions, expected 3 "),
    "compacted": (lambda one: replace(one, compacted=True), "tasks: is compacted, expected not"),
    "size": (lambda one: replace(one, max_record_bytes=1000), "tasks: takes records of 1000 bytes, expected 8388608"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_topics_of_another_shape_are_refused_with_a_way_on(change: str) -> None:
    config = make_config()
    changed, sentence = CHANGES[change]
    topics = {name: changed(one) if name == "tasks" else one for name, one in wanted_topics(config).items()}
    transport = MemoryLog(lambda: 0.0).connect()
    transport.admin.ensure_topics(topics)
    with pytest.raises(ConfigError, match=f"^flow: {sentence}") as refused:
        check_log(transport, config, "flow", begun=True)
    assert str(refused.value).count("; ") >= 1, "it says what to do"
    missing = explained(PositionMissing("group explorer: no position for tasks[4]"), transport, config, "flow")
    assert str(missing).startswith(f"group explorer: no position for tasks[4]; flow: {sentence}")
    transport.admin.delete_topics(["tasks"])
    assert explained(PositionMissing("x"), transport, config, "flow").exit_code == RUN_LOST != missing.exit_code
    assert dangers(transport, config, begun=True) == ["tasks: is gone, expected the topic"]
    assert dangers(transport, config, begun=False) == []


# --------------------------------------------------------------------------------------------- moved positions


def move(scene: Scene, group: str, topic: str, offsets: Sequence[int]) -> None:
    """As an administrator resets the positions of a group: without the metadata that stood beside them."""
    producer = scene.transport().producer("an administrator")
    producer.start()
    moved = {TopicPartition(topic, partition): Position(offset) for partition, offset in enumerate(offsets)}
    producer.commit([], positions=moved, group=group)


def ends_of(scene: Scene, topic: str) -> list[int]:
    return [end for _, end in sorted(scene.transport().admin.end_offsets(topic).items())]


@pytest.mark.parametrize("to", ["latest", "earliest", "nowhere"])
@pytest.mark.parametrize(("role", "topic", "write"), READERS)
def test_positions_that_somebody_has_moved_lose_nothing_and_repeat_nothing(
    scene: Scene, role: str, topic: str, write: Callable[[Scene], None], to: str
) -> None:
    write(scene)
    if role == "buffer":
        scene.verify(1)
    before = RoleDriver(scene, role, process="before")
    before.work()
    before.service.close()
    if role == "explorer":
        scene.admit(9, 1)
    elif role == "verifier":
        scene.put("rollouts", *(scene.rollout(one) for number in (9, 1) for one in scene.siblings(number)))
    else:
        scene.verify(9)
    if to == "nowhere":  # somebody has deleted the group
        scene.log.group(role).positions.clear()
    else:
        move(scene, role, topic, ends_of(scene, topic) if to == "latest" else [0, 0, 0])
    RoleDriver(scene, role, process="after").work()
    after = {"tasks": "rollouts", "rollouts": "verified", "verified": "outcomes"}[topic]
    if role == "buffer":
        scene.verify(2)
        RoleDriver(scene, role, process="once more").work()
        assert len([one for one in scene.messages("batches") if isinstance(one, Experience)]) == 2 * 4
        assert not [one for one in scene.messages("outcomes") if isinstance(one, GroupOutcome) and one.late]
        return
    ids = [record.header("rollout_id") for record in scene.records(after)]
    assert len(ids) == len(set(ids)) == 10, "each has one record, and nobody has two"


def test_a_feeder_whose_cursor_is_gone_says_so(tmp_path: Path) -> None:
    scene = Scene(tmp_path, manifest=False)
    RoleDriver(scene, "feeder").work()
    move(scene, "feeder", "steps", [0])
    with pytest.raises(PositionMissing, match="somebody has reset the positions of the feeder's group") as reset:
        RoleDriver(scene, "feeder", process="after").work()
    assert reset.value.exit_code == RUN_LOST
