"""The explorer while new weights are fetched beside sampling: it goes on, and never samples with what is no use."""

from __future__ import annotations

from pathlib import Path

import pytest

from rftstream.roles.trainer.pending_update import DeferredExecutor
from rftstream.testing import RoleDriver
from tests.flow.scene import Scene
from tests.flow.test_explorer import SLOW, rollouts_of, versions_of, work_for

pytestmark = pytest.mark.law("lineage")


def test_it_samples_on_while_new_weights_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeferredExecutor, "LOOKS", 20)  # of 0.05 s
    scene = Scene(tmp_path, **SLOW, groups=[0])
    explorer = RoleDriver(scene, "explorer")
    work_for(scene, explorer, seconds=1.0)
    scene.announce(1)
    work_for(scene, explorer, seconds=0.5)
    assert explorer.service.health()["version"] == 0
    scene.announce(2)  # while 1 is fetched: the next one
    explorer.work()
    for rollout in rollouts_of(scene).values():
        (v0, first), (v1, second), (v2, third) = versions_of(rollout)
        assert (v0, v1, v2) == (0, 1, 2)
        assert first + second + third == 40
        assert 18 <= first <= 22
        assert 8 <= second <= 12


@pytest.mark.law("fencing")
def test_what_is_being_fetched_when_its_trainer_is_replaced_is_never_sampled_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeferredExecutor, "LOOKS", 1000)
    scene = Scene(tmp_path, **SLOW)
    scene.announce(0)
    scene.announce(1)
    scene.admit(0)
    explorer = RoleDriver(scene, "explorer")
    work_for(scene, explorer, seconds=1.0)
    scene.announce(2)
    work_for(scene, explorer, seconds=0.5)
    scene.announce(0, epoch=2, resumed=True)
    scene.admit(1)
    work_for(scene, explorer, seconds=0.5)
    health = explorer.service.health()
    assert (health["version"], health["sampling"]) == (0, 4)
    explorer.work()
    stamps = {(one.ids.sequence, tuple((span.trainer_epoch, span.version) for span in one.segments[0].versions))
              for one in rollouts_of(scene).values()}  # fmt: skip
    assert stamps == {(0, ((1, 1), (2, 0))), (1, ((2, 0),))}


def test_a_first_version_that_is_gone_is_said_at_the_second_try(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    scene = Scene(tmp_path, **SLOW, groups=[0])
    scene.store.delete("versions/000001-00000000.safetensors")
    explorer = RoleDriver(scene, "explorer")

    def told() -> list[str]:
        return [one.levelname for one in caplog.records if "nothing is sampled before" in one.getMessage()]

    work_for(scene, explorer, seconds=0.5)
    assert told() == ["INFO"]
    work_for(scene, explorer, seconds=2.0)
    assert told() == ["INFO", "WARNING"]


def test_an_explorer_that_cannot_load_the_weights_keeps_no_task_from_others(tmp_path: Path) -> None:
    scene = Scene(tmp_path, **SLOW, groups=[0])
    explorer = RoleDriver(scene, "explorer", process="sees-the-store")
    work_for(scene, explorer, seconds=0.5)
    scene.store.delete("versions/000001-00000000.safetensors")
    blind = RoleDriver(scene, "explorer", process="sees-another-store")
    work_for(scene, blind, seconds=0.5)
    assert blind.service.health()["partitions"] == 0
    for group in range(1, 6):
        scene.admit(group)
    explorer.work()
    assert len(rollouts_of(scene)) == 6 * 2, "of all partitions"
    scene.announce(1)
    work_for(scene, blind, explorer, seconds=2.0)
    assert blind.service.health()["partitions"] > 0, "it joins once it has weights"


def test_weights_that_go_while_they_are_fetched_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeferredExecutor, "LOOKS", 10)
    scene = Scene(tmp_path, **SLOW, groups=[0])
    explorer = RoleDriver(scene, "explorer")
    work_for(scene, explorer, seconds=1.0)
    scene.announce(1, skill=1)
    work_for(scene, explorer, seconds=0.2)
    scene.store.delete("versions/000001-00000001.safetensors")
    work_for(scene, explorer, seconds=1.0)
    assert explorer.service.health()["version"] == 0
    scene.announce(2)
    explorer.work()
    assert [[version for version, _ in versions_of(one)] for one in rollouts_of(scene).values()] == [[0, 2]] * 2
