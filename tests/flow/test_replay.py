"""Training again what was recorded: equal digests, the first difference, settings of each trainer, damaged records."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from rftstream.backends.fake import FakeBackend
from rftstream.clock import SystemClock
from rftstream.commands import cli
from rftstream.config import loader
from rftstream.contracts import codec
from rftstream.contracts.records import NewRecord
from rftstream.contracts.versions import StepRecord
from rftstream.errors import ConfigError
from rftstream.replay import again
from rftstream.replay.again import ReplayReport, replay
from rftstream.roles.trainer.assembly import Batch
from rftstream.runs.folder import OpenRun, RunFolder, create_log
from rftstream.runs.services import build_service, role_context
from rftstream.testing import RoleDriver
from rftstream.transport.embedded.transport import EmbeddedTransport
from rftstream.weights.stores.store import ObjectStore
from tests.flow.scene import Scene
from tests.flow.trained import checkpoints_of, names, steps_of, trained

pytestmark = pytest.mark.law("replay")


class InMemory(OpenRun):
    """A scene as the command sees a run."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene.folder, scene.config, scene.transport())
        object.__setattr__(self, "_store", scene.store)

    __slots__ = ("_store",)
    _store: ObjectStore

    def store(self) -> ObjectStore:
        return self._store


def replayed(scene: Scene, **versions: Any) -> ReplayReport:
    return replay(InMemory(scene), **versions)


def scene_of(folder: Path, batches: int = 8, **settings: Any) -> Scene:
    scene = Scene(folder, **{"trainer__checkpoint_every": 3, **settings})
    trained(scene, batches)
    return scene


# --------------------------------------------------------------------------------------------- equal


@pytest.mark.parametrize("shares", [1, 2])
def test_the_same_batches_give_the_same_digests_from_the_model_and_from_a_checkpoint(
    tmp_path: Path, shares: int
) -> None:
    scene = scene_of(tmp_path, trainer__shares=shares, feeder__groups_per_batch=4, trainer__lr_schedule="linear")
    before = scene.digest()
    whole = replayed(scene)
    assert whole.equal
    assert (whole.start, whole.checkpoint, whole.num_batches, whole.num_digests) == (0, None, 8, 9)
    assert whole.num_metrics >= 8 * 6
    assert whole.not_promised == []
    part = replayed(scene, first=7, last=7)
    assert part.equal
    assert (part.start, part.checkpoint, part.num_batches, part.num_digests) == (6, "1/6", 1, 2)
    assert "equal bit for bit, versions 6 to 7" in part.to_text()
    assert scene.digest() == before, "the log is as it was"
    assert checkpoints_of(scene) == [(1, 3), (1, 6)]


def test_only_versions_in_force_are_trained_again(tmp_path: Path) -> None:
    """The second trainer begins at 3; the third at 0, for the checkpoints are gone, and with another learning rate."""
    scene = scene_of(tmp_path, batches=5)
    RoleDriver(scene, "trainer").work()
    for name in scene.store.list("checkpoints/"):
        scene.store.delete(name)
    scene.config = loader.replace(
        scene.config, trainer__lr=0.5, trainer__threads=2, backends={"fake": {"skill_rate": 0.5}}
    )
    scene.batch(5)
    RoleDriver(scene, "trainer").work()
    assert names(steps_of(scene))[-7:] == [(3, version) for version in range(7)]
    found = replayed(scene)
    assert found.equal, found.to_text()
    assert (found.num_batches, found.num_digests) == (6, 1 + 1 + 6), "version 0 has two anchors in force"


def test_settings_that_a_resume_changed_count_from_there_on(tmp_path: Path) -> None:
    scene = scene_of(tmp_path, batches=6)
    scene.config = loader.replace(scene.config, trainer__lr=0.5, backends={"fake": {"skill_rate": 0.5}})
    for number in (6, 7):
        scene.batch(number)
    RoleDriver(scene, "trainer").work()
    assert {step.metrics["lr"] for step in steps_of(scene) if step.name.version > 6} == {0.5}
    found = replayed(scene)
    assert found.equal, found.to_text()
    assert found.num_batches == 8


def test_a_skipped_batch_is_skipped_again(tmp_path: Path) -> None:
    scene = scene_of(tmp_path, backends__fake={"nan_at": [2]})
    assert [step.name.version for step in steps_of(scene) if step.skipped] == [3]
    assert replayed(scene).equal


def test_a_batch_that_was_skipped_changes_nothing_even_where_it_would_train_now(tmp_path: Path) -> None:
    scene = scene_of(tmp_path, backends__fake={"nan_at": [2]})
    change_steps(scene, lambda step: replace(step, config="", computed_with={}))  # as if what gave the NaN were unknown
    scene.config = loader.replace(scene.config, backends={"fake": {}})
    found = replayed(scene)
    assert next(one.what for one in found.differences if one.version == 3) == "skipped"
    assert not any(one.what == "weights" for one in found.differences if one.version == 3)
    assert "the run does not say" in found.not_promised[0]


def change_steps(scene: Scene, change: Callable[[StepRecord], StepRecord]) -> None:
    """Change each step record on the log."""
    for place, partition in scene.log.partitions.items():
        for at, record in enumerate(partition.records if place.topic == "steps" else ()):
            step = codec.from_record(record)
            assert isinstance(step, StepRecord)
            partition.records[at] = msgspec.structs.replace(record, value=codec.encode(change(step)))


def test_mini_batches_of_a_run_of_before_are_cut_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first trainer does not say by which formulas it computed; the second does."""
    scene = scene_of(tmp_path, batches=4)
    change_steps(scene, without_formulas)
    for number in (4, 5):
        scene.batch(number)
    RoleDriver(scene, "trainer").work()
    update, cut = FakeBackend.update, []

    def noted(self: FakeBackend, rows: Any, algorithm: Any, plan: Any) -> Any:
        cut.append(plan.stratified)
        return update(self, rows, algorithm, plan)

    monkeypatch.setattr(FakeBackend, "update", noted)
    found = replayed(scene)
    assert found.equal
    assert cut == [False] * 3 + [True] * 3, "the second began at version 3"
    assert [reason for reason in found.not_promised if "formulas: recorded with 1, here 3" in reason]


def without_formulas(step: StepRecord) -> StepRecord:
    said = {name: value for name, value in step.computed_with.items() if name != "formulas"}
    assert not step.resumed or said != step.computed_with
    return replace(step, computed_with=said)


# --------------------------------------------------------------------------------------------- different


def test_the_first_difference_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = scene_of(tmp_path)
    update = again.Training.update

    def changed(self: Any, batch: Any, lr: float) -> Any:
        return update(self, batch, lr) if batch.sequence != 4 else update(self, _reversed(batch), lr)

    monkeypatch.setattr(again.Training, "update", changed)
    found = replayed(scene)
    assert not found.equal
    assert (found.differences[0].version, found.differences[0].batch) == (5, 4)
    assert {one.version for one in found.differences} == {5, 6, 7, 8}
    assert "FIRST DIFFERENCE at version 5 (batch 4)" in found.to_text()
    assert "4 of 9 versions differ" in found.to_text()


def _reversed(batch: Batch) -> Batch:
    return replace(batch, experiences=batch.experiences[::-1])


def test_other_libraries_are_named_as_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = scene_of(tmp_path)
    here = again.computed_with
    monkeypatch.setattr(again, "computed_with", lambda *of: {**here(*of), "numpy": "0.0"})
    found = replayed(scene)
    assert found.equal
    assert found.not_promised[0].startswith("numpy: recorded with ")


def test_versions_that_are_not_there(tmp_path: Path) -> None:
    scene = scene_of(tmp_path)
    for versions in ({"first": 9}, {"last": 9}, {"first": 5, "last": 4}):
        with pytest.raises(ConfigError, match="expected 0 <= --from <= --to <= 8"):
            replayed(scene, **versions)
    with pytest.raises(ConfigError, match="no trainer has recorded anything yet"):
        replayed(Scene(tmp_path / "empty"))


def test_where_batches_were_deleted_it_says_from_which_version_it_can_begin(tmp_path: Path) -> None:
    scene = scene_of(tmp_path)
    admin = scene.transport().admin
    (place,) = admin.begin_offsets("batches")
    step = next(one for one in steps_of(scene) if one.name.version == 6)
    admin.delete_before({place: step.positions[0]})
    with pytest.raises(ConfigError, match="replay with --from 6"):
        replayed(scene, first=2)
    assert replayed(scene, first=6).equal


# --------------------------------------------------------------------------------------------- a damaged log


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Five versions on an embedded log, as a trainer by itself made them."""
    scene = Scene(tmp_path / "scene", run__steps=5, trainer__checkpoint_every=50)
    for number in range(5):
        scene.batch(number)
    folder = RunFolder(tmp_path / "runs" / "flow")
    folder.path.mkdir(parents=True)
    transport = EmbeddedTransport(folder.log)
    create_log(transport, scene.config)
    producer = transport.producer("scene")
    producer.start()
    for topic in ("control", "batches"):
        producer.commit([NewRecord(topic, one.partition, one.key, one.value, one.headers)
                         for one in scene.records(topic)])  # fmt: skip
    producer.close()
    folder.config_file.write_text(loader.to_toml(scene.config))
    context = role_context(
        config=scene.config, folder=folder, transport=transport, clock=SystemClock(), process="trainer-0"
    )
    trainer = build_service("trainer", context)
    while not trainer.done:
        trainer.tick()
    trainer.close()
    transport.close()
    return folder


def command(run: RunFolder, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["replay", str(run.path), *arguments])


def test_the_command(run: RunFolder) -> None:
    fine = command(run)
    assert fine.exit_code == 0, fine.output
    assert "equal bit for bit, versions 0 to 5: 6 digests of weights" in fine.output
    told = json.loads(command(run, "--from", "5", "--json").stdout)
    assert (told["equal"], told["start"], told["checkpoint"], told["num_batches"]) == (True, 5, "1/5", 0)
    wrong = command(run, "--to", "6")
    assert wrong.exit_code == 2
    assert "newest version in force" in wrong.output


def test_a_new_run_is_compared_with_the_settings_that_trained_these_batches(run: RunFolder) -> None:
    """Not with those that a resume has brought since."""

    def changed(*sets: str) -> list[str]:
        planned = command(run, "--into", str(run.path.with_name("into")), "--dry-run", "--json",
                          *(word for one in sets for word in ("--set", one)))  # fmt: skip
        assert planned.exit_code == 0, planned.output
        found: list[str] = json.loads(planned.stdout)["changed"]
        return found

    assert changed() == []
    config = loader.load([run.config_file], env={})
    run.config_file.write_text(loader.to_toml(loader.replace(config, trainer__lr=0.5, evaluator__threads=2)))
    assert changed() == ["trainer.lr 1e-06 -> 0.5"]
    assert changed("trainer.lr=1e-6", "evaluator.threads=3") == ["evaluator.threads 2 -> 3"]


@pytest.mark.parametrize("seed", [None, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(12))])
def test_one_changed_byte_of_a_recorded_batch_is_found_and_its_step_named(run: RunFolder, seed: int | None) -> None:
    """None: any byte, another one each time."""
    seed = SystemRandom().randrange(10**6) if seed is None else seed
    print(f"seed {seed}")
    random = Random(seed)
    batch = random.randrange(5)
    change_a_byte(run.log, batch, random)
    found = command(run)
    assert found.exit_code == 1, found.output
    assert f"FIRST DIFFERENCE at version {batch + 1} (batch {batch}): batch:" in found.output
    assert "batches[0]@" in found.output
    assert found.exception is None or isinstance(found.exception, SystemExit)
    into = command(run, "--into", str(run.path.with_name("into")))
    assert into.exit_code == 2, into.output
    assert f"batch {batch} cannot be trained: batches[0]@" in into.output
    assert not run.path.with_name("into").exists()


def change_a_byte(log: Path, batch: int, random: Random) -> None:
    """One bit of one experience, on an embedded log."""
    database = sqlite3.connect(log / "log.sqlite")
    with database:
        rows = [
            (number, value)
            for number, headers, value in database.execute(
                "SELECT records.id, headers, value FROM records, partitions "
                "WHERE records.id >> 40 = partitions.id AND topic = 'batches' ORDER BY records.id"
            )
            if {("contract", b"experience"), ("batch_sequence", b"%d" % batch)}
            <= {(name, data) for name, data in msgspec.msgpack.decode(headers)}
        ]
        number, value = random.choice(rows)
        at = random.randrange(len(value))
        changed = value[:at] + bytes([value[at] ^ 1 << random.randrange(8)]) + value[at + 1 :]
        database.execute("UPDATE records SET value = ? WHERE id = ?", (changed, number))
    database.close()
