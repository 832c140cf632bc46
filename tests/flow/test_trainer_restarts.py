"""The trainer's restarts: from which checkpoint it goes on, and that the weights are the same ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rftstream.contracts.versions import VersionName, WeightsAnnounced, WeightsKind
from rftstream.errors import ProducerLost, TransactionAborted, WeightsError, WeightsGone
from rftstream.roles.trainer.version_publisher import LOOK_BACK_S
from rftstream.testing import RoleDriver
from rftstream.testing.faults import Kill
from rftstream.weights.checkpoints import CheckpointStore
from rftstream.weights.publisher import WeightsPublisher
from tests.flow.disturbed import FaultAt, work_on
from tests.flow.scene import Scene
from tests.flow.trained import checkpoints_of, digests_of, finished_of, names, steps_of, trained

pytestmark = pytest.mark.law("replay")

# --------------------------------------------------------------------------------------------- restarts


def announced(scene: Scene) -> list[WeightsAnnounced]:
    return [one for one in scene.messages("weights") if isinstance(one, WeightsAnnounced)]


def test_a_successor_goes_on_from_the_checkpoint_and_ends_with_the_same_weights(tmp_path: Path) -> None:
    scene = Scene(tmp_path, trainer__checkpoint_every=3)
    trainer = trained(scene, 5)
    assert checkpoints_of(scene) == [(1, 3)]
    before = {version: next(iter(digests)) for version, digests in digests_of(scene).items()}
    trainer.restart()
    scene.batch(5)
    trainer.work()
    assert names(steps_of(scene))[6:] == [(2, 3), (2, 4), (2, 5), (2, 6)]
    anchor = steps_of(scene)[6]
    assert anchor.resumed
    assert anchor.positions == steps_of(scene)[3].positions
    assert (anchor.trained_groups, anchor.trained_rollouts) == (6, 12)
    announcement = announced(scene)[6]
    assert (announcement.name.version, announcement.resumed) == (3, True)
    for version, digest in before.items():
        assert digests_of(scene)[version] == {digest}
    assert checkpoints_of(scene) == [(1, 3), (2, 6)]


def test_without_a_checkpoint_everything_is_trained_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path, trainer__checkpoint_every=50)
    trainer = trained(scene, 4)
    trainer.restart()
    trainer.work()
    assert names(steps_of(scene))[5:] == [(2, version) for version in range(5)]
    assert all(len(digests) == 1 for digests in digests_of(scene).values())


def damage(scene: Scene, folder: str) -> None:
    name = next(name for name in scene.store.list(f"checkpoints/{folder}/") if name.endswith("fake.json"))
    data = scene.store.objects[name]
    scene.store.objects[name] = data[:-2] + bytes([data[-2] ^ 1]) + data[-1:]


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["a byte", "no JSON", "no manifest", "the log lost power"])
def test_a_checkpoint_that_is_of_no_use_is_passed_over(tmp_path: Path, harm: str) -> None:
    scene = Scene(tmp_path, trainer__checkpoint_every=2)
    trainer = trained(scene, 5)
    assert checkpoints_of(scene) == [(1, 2), (1, 4)]
    objects, manifest = scene.store.objects, "checkpoints/000001-00000004/manifest.json"
    match harm:
        case "a byte":
            damage(scene, "000001-00000004")
        case "no JSON":
            objects[manifest] = b"{"
        case "no manifest":
            del objects[manifest]
        case _:  # the store has what the log has not
            state = json.loads(objects[manifest])
            state["state"]["positions"] = [1000]
            objects[manifest] = json.dumps(state).encode()
    trainer.restart()
    trainer.work()
    assert names(steps_of(scene))[6:] == [(2, 2), (2, 3), (2, 4), (2, 5)]
    assert all(len(digests) == 1 for digests in digests_of(scene).values())


@pytest.mark.parametrize("fate", ["gone", "short", "other bytes"])
def test_weights_that_are_lost_are_published_anew(tmp_path: Path, fate: str) -> None:
    """The batches that it waits for may have to be sampled with them."""
    scene = Scene(
        tmp_path, trainer__checkpoint_every=50, weights__anchor_every=20, backends={"fake": {"elements": 2048}}
    )
    trainer = trained(scene, 3)
    second = announced(scene)[2]
    assert second.kind is WeightsKind.delta
    whole = scene.store.objects.pop(second.object)
    if fate != "gone":
        scene.store.objects[second.object] = whole[:-1] + (b"" if fate == "short" else bytes([whole[-1] ^ 1]))
    scene.clock.advance(LOOK_BACK_S - 1)
    trainer.work()
    scene.clock.advance(2)
    with pytest.raises(WeightsGone, match=f"{second.object}.*begins anew"):
        trainer.work()
    trainer.restart()
    trainer.work()
    newest = announced(scene)[-1]
    assert (newest.name, newest.kind) == (VersionName(trainer_epoch=2, version=3), WeightsKind.full)
    assert names(steps_of(scene))[4:] == [(2, 3)], "nothing is trained again"
    assert newest.weights_digest == announced(scene)[3].weights_digest


def test_a_trainer_that_waits_looks_back_ever_less_often(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = RoleDriver(scene, "trainer")
    looked: list[float] = []

    def check_back(self: WeightsPublisher) -> None:
        looked.append(scene.clock.now())
        raise WeightsError("the store does not answer")

    monkeypatch.setattr(WeightsPublisher, "check_back", check_back)
    trainer.work()
    began = scene.clock.now()
    for _ in range(1000):
        scene.clock.advance(1.0)
        trainer.work()
    assert [round(at - began) for at in looked] == [60, 120, 240, 480, 960]


@pytest.mark.law("lineage")
def test_a_checkpoint_that_is_not_in_force_is_passed_over(tmp_path: Path) -> None:
    """A zombie's: its version is beyond the one that its successor began with."""
    scene = Scene(tmp_path, trainer__checkpoint_every=2)
    trainer = trained(scene, 3)
    zombie = CheckpointStore(scene.store)
    saved = zombie.verify(VersionName(trainer_epoch=1, version=2))
    for version in (3, 7):  # one known by `steps`, but left behind; one never recorded

        def fill(folder: Path) -> None:
            (folder / "fake.json").write_text("{}")

        zombie.write(VersionName(trainer_epoch=1, version=version), fill, {**saved, "version": version})
    scene.step(2, epoch=2, resumed=True)  # the successor, which claimed its epoch
    trainer.restart()
    trainer.work()
    assert names(steps_of(scene))[5:] == [(3, 2), (3, 3)], "from version 2, neither from 3 nor from 7"


@pytest.mark.law("fencing")
def test_a_replaced_trainers_records_are_not_in_force(tmp_path: Path) -> None:
    scene = Scene(tmp_path, trainer__checkpoint_every=2)
    trainer = trained(scene, 3)
    trainer.restart()
    trainer.work()
    assert checkpoints_of(scene) == [(1, 2)]
    scene.step(9, epoch=1)
    trainer.restart()
    scene.batch(3)
    trainer.work()
    assert names(steps_of(scene))[-3:] == [(3, 2), (3, 3), (3, 4)]


def test_after_a_lost_producer_nothing_is_kept_of_what_was_not_committed(tmp_path: Path) -> None:
    """Also where no checkpoint is left to load: the backend begins anew."""
    scene = Scene(tmp_path, trainer__checkpoint_every=2)
    trainer = trained(scene, 2)
    calm = digests_of(scene)
    commits = 0

    def lose_the_anchor(point: str, process: str) -> None:
        nonlocal commits
        commits += process == "trainer" and point == "before_commit"
        if commits == 2:  # the claim was the first
            scene.log.fault = None
            del scene.store.objects["checkpoints/000001-00000002/manifest.json"]
            raise ProducerLost("simulated")

    scene.log.fault = lose_the_anchor
    scene.batch(2)
    trainer.restart()
    trainer.work(within_s=0.9)
    assert commits == 2
    assert names(steps_of(scene))[-4:] == [(3, 0), (3, 1), (3, 2), (3, 3)]
    assert {version: digests_of(scene)[version] for version in calm} == calm


@pytest.mark.slow
@pytest.mark.parametrize(("point", "fault"), [
    ("before_commit", Kill), ("after_commit", Kill), ("before_commit", ProducerLost), ("after_commit", ProducerLost),
    ("before_commit", TransactionAborted), ("before_versions", Kill), ("after_versions", Kill),
    ("before_checkpoints", Kill), ("after_checkpoints", Kill),
])  # fmt: skip
@pytest.mark.parametrize("every", [2, 3])
def test_no_fault_changes_the_weights(tmp_path: Path, point: str, fault: type[BaseException], every: int) -> None:
    settings = {"trainer__checkpoint_every": 2, "run__steps": 9, "trainer__publish_every": 2}
    calm, scene = Scene(tmp_path / "calm", **settings), Scene(tmp_path, **settings)
    scene.log.fault = scene.store.fault = disturbed = FaultAt(point, fault, "trainer", every=every, most=29 // every)
    for one in (calm, scene):
        for number in range(9):
            one.batch(number)
    RoleDriver(calm, "trainer").work()
    trainer = RoleDriver(scene, "trainer")
    work_on(trainer, within_s=0.9)
    assert trainer.done
    assert disturbed.num_visits > every
    finished = finished_of(scene)
    assert finished is not None
    assert finished.name.version == 9
    for version, digests in digests_of(calm).items():
        assert digests_of(scene).get(version, digests) == digests
    assert digests_of(scene)[9] == digests_of(calm)[9]
    twins = [record.key for topic in ("steps", "weights") for record in scene.records(topic)]
    assert len(set(twins)) == len(twins)
    epochs = [name[0] for name in names(steps_of(scene))]
    assert epochs == sorted(epochs)


CHARACTERS = "".join(chr(0x4E00 + number) for number in range(220))
"""As many tokens as the scene's segments name."""


@pytest.mark.slow
@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_the_reference_is_version_0_after_a_restart_too(tmp_path: Path, kl_in: str) -> None:
    kept: list[dict[int, set[str]]] = []
    for restarts in (False, True):
        scene = Scene(
            tmp_path / str(restarts),
            trainer__checkpoint_every=2,
            trainer__backend="torch",
            trainer__lr=1e-2,
            model__path=None,
            model__make={"characters": CHARACTERS, "width": 16},
            algorithms__grpo={"kl_coef": 1.0, "kl_in": kl_in, "kl_estimator": "k2"},
        )
        trainer = RoleDriver(scene, "trainer")
        for number in range(6):
            scene.batch(number, rewards=(0.0, 1.0) if number else (1.0, 1.0))
            trainer.work()
            if restarts and number in (2, 4):
                trainer.restart()
        kept.append(digests_of(scene))
        assert steps_of(scene)[-1].metrics["kl"] > 0
    assert kept[0] == kept[1]
    assert sorted(kept[0]) == list(range(7))
    assert all(len(digests) == 1 for digests in kept[1].values())
