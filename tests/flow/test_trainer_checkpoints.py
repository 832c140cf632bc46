"""Which checkpoints a trainer leaves behind: when it is told to leave, every so often, the best."""

from __future__ import annotations

from pathlib import Path

import pytest

from rftstream.config import loader
from rftstream.contracts.control import RunFinished
from rftstream.errors import ConfigError, WeightsError
from rftstream.preflight import readiness
from rftstream.runs.roll_back import roll_back
from rftstream.testing import RoleDriver
from tests.flow.scene import Scene
from tests.flow.trained import checkpoints_of, digests_of, evaluated, names, steps_of, trained

# --------------------------------------------------------------------------------------------- leaving


@pytest.mark.law("twice", "replay")
def test_one_that_is_told_to_leave_saves_where_it_is_and_its_successor_trains_nothing_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path, trainer__checkpoint_every=50)
    trainer = trained(scene, 4)
    assert checkpoints_of(scene) == []
    assert (trainer.service.health()["version"], trainer.service.health()["saved"]) == (4, 0)
    trainer.stop()
    assert checkpoints_of(scene) == [(1, 4)] and trainer.service.health()["saved"] == 4
    successor = RoleDriver(scene, "trainer")
    successor.work()
    assert names(steps_of(scene))[5:] == [(2, 4)]
    successor.stop()
    assert checkpoints_of(scene) == [(1, 4)], "nothing was trained since"
    scene.batch(4)
    RoleDriver(scene, "trainer").work()
    calm = Scene(tmp_path / "calm")
    trained(calm, 5)
    assert digests_of(scene) == digests_of(calm)


def test_nothing_is_saved_before_the_first_step(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING")
    trainer = RoleDriver(scene, "trainer")
    trainer.work()
    trainer.stop()
    RoleDriver(scene, "trainer").work()
    assert checkpoints_of(scene) == [] and not caplog.records, "there is nothing that is trained again"


def test_a_store_that_fails_does_not_keep_it_from_leaving(tmp_path: Path) -> None:
    scene = Scene(tmp_path, trainer__checkpoint_every=50)
    trainer = RoleDriver(scene, "trainer")
    scene.batch(0)
    trainer.work()

    def refuse(point: str) -> None:
        raise WeightsError("simulated: no room")

    scene.store.fault = refuse
    trainer.stop()
    assert trainer.done
    assert checkpoints_of(scene) == []


def test_the_end_of_its_hours_leaves_a_checkpoint_and_a_run_that_can_go_on(tmp_path: Path) -> None:
    scene = Scene(tmp_path, run__hours=1.0, trainer__checkpoint_every=50)
    trainer = RoleDriver(scene, "trainer")
    scene.batch(0)
    trainer.work()
    scene.clock.advance(3600)
    scene.batch(1)
    trainer.work()
    assert trainer.done
    finished = [one for one in scene.messages("control") if isinstance(one, RunFinished)]
    assert [(one.reason, one.exit_code) for one in finished] == [("hours", 0)]
    assert checkpoints_of(scene) == [(1, finished[0].name.version)]


# --------------------------------------------------------------------------------------------- keeping


def test_each_nth_is_kept_beside_the_newest(tmp_path: Path) -> None:
    scene = Scene(tmp_path, trainer__checkpoint_every=2, trainer__keep_every=6)
    trained(scene, 17)
    assert [version for _, version in checkpoints_of(scene)] == [6, 12, 14, 16]


def test_the_best_is_kept_and_what_has_yet_to_be_judged(tmp_path: Path) -> None:
    scene = Scene(
        tmp_path,
        trainer__checkpoint_every=2,
        trainer__keep_best="held-out",
        evaluations={"held-out": {"source": "arithmetic", "every": 4}},
    )
    trainer = RoleDriver(scene, "trainer")
    trainer.work()

    def train_to(version: int) -> list[int]:
        while len(steps_of(scene)) - 1 < version:
            scene.batch(len(steps_of(scene)) - 1)
            trainer.work()
        return [version for _, version in checkpoints_of(scene)]

    assert train_to(12) == [4, 8, 10, 12], "4 and 8 are due"
    scene.put("evals", evaluated(4, 0.5, best=True), evaluated(8, 0.75, best=True))
    assert train_to(14) == [8, 12, 14]
    scene.put("evals", evaluated(12, 0.25))
    assert train_to(18) == [8, 16, 18]
    scene.put("evals", evaluated(16, 0.75))
    assert train_to(22) == [16, 20, 22], "of equals the newest"


def test_settings_that_would_keep_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keep_every: got 5, expected a multiple of trainer.checkpoint_every"):
        Scene(tmp_path, trainer__checkpoint_every=2, trainer__keep_every=5)
    with pytest.raises(ConfigError, match=r"trainer.keep_best: got 'held-out', expected an evaluation"):
        Scene(tmp_path, trainer__keep_best="held-out")
    swapped = {"swapped": {"source": "arithmetic", "canary": True}}
    config = Scene(tmp_path, trainer__keep_best="swapped", evaluations=swapped).config
    assert loader.from_toml(loader.to_toml(config)) == config, "a run that began so can be opened"
    assert any("trainer.keep_best: 'swapped' is a canary" in one.found for one in readiness.look(config))


# --------------------------------------------------------------------------------------------- going back


@pytest.mark.law("replay")
def test_a_run_goes_back_to_a_named_checkpoint(tmp_path: Path) -> None:
    scene = Scene(tmp_path, trainer__checkpoint_every=2)
    trained(scene, 5)
    roll_back(scene.transport(), scene.store, scene.folder.run_id, 2)
    going_on = RoleDriver(scene, "trainer")
    while names(steps_of(scene))[-1] != (3, 3):
        going_on.tick()
    assert going_on.service.health()["saved"] == 2, "that of version 4 is of another lineage"
    going_on.work()
    assert names(steps_of(scene))[6:] == [(2, 2), (3, 2), (3, 3), (3, 4), (3, 5)]
    assert all(len(digests) == 1 for digests in digests_of(scene).values()), "the same batches under the same settings"
    assert [(one.trained_groups, one.announced) for one in steps_of(scene)[6:8]] == [(4, False), (4, True)]
    roll_back(scene.transport(), scene.store, scene.folder.run_id, 0)
    RoleDriver(scene, "trainer").work()
    assert names(steps_of(scene))[-7:] == [(4, 0)] + [(5, version) for version in range(6)]


def test_a_version_without_a_checkpoint_is_refused_with_those_there_are(tmp_path: Path) -> None:
    scene = Scene(tmp_path, trainer__checkpoint_every=2)
    trained(scene, 5)
    before = scene.digest()
    for version, way in ((3, r"; or train .* `rftstream replay RUN --to 3 --into NEWRUN`"), (9, "$")):
        with pytest.raises(
            ConfigError, match=f"version {version} has no good checkpoint, expected one of 0, 2, 4{way}"
        ):
            roll_back(scene.transport(), scene.store, scene.folder.run_id, version)
    assert scene.digest() == before
