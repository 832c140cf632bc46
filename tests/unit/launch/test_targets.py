"""targets.json: what Prometheus is told about a run's workers, as its file_sd_configs reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rftstream.launch.processes import WorkerCommand
from rftstream.launch.supervisor import Slot
from rftstream.launch.targets import WRITE_EVERY_S, Targets


class Scene:
    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self.file = folder / "targets.json"
        self.slots = [self.slot(folder, role) for role in ("feeder", "explorer")]
        self.targets = Targets(self.file, "sums", clock=lambda: self.now)

    @staticmethod
    def slot(folder: Path, role: str) -> Slot:
        process = f"{role}-0"
        return Slot(role, WorkerCommand(process=process, arguments=(), log=folder / f"{process}.log"), state="running")

    def port(self, index: int) -> Path:
        return self.slots[index].command.log.with_suffix(".port")

    def told(self) -> dict[str, str]:
        """Instance -> address, after another look."""
        self.now += WRITE_EVERY_S
        self.targets.update(self.slots)
        return {group["labels"]["instance"]: group["targets"][0] for group in json.loads(self.file.read_text())}


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_worker_is_told_once_its_port_is_known(scene: Scene) -> None:
    assert scene.told() == {}
    scene.port(0).write_text("9001\n")
    scene.port(1).write_text("")  # not all of it yet
    assert scene.told() == {"feeder-0": "127.0.0.1:9001"}
    assert json.loads(scene.file.read_text()) == [
        {"targets": ["127.0.0.1:9001"], "labels": {"job": "feeder", "instance": "feeder-0", "run": "sums"}}
    ]


def test_one_that_died_stays_until_its_successor_has_a_port_and_one_that_left_goes(scene: Scene) -> None:
    scene.port(0).write_text("9001\n")
    scene.port(1).write_text("9002\n")
    assert len(scene.told()) == 2
    scene.port(1).unlink()
    scene.slots[1].state = "to start"
    assert scene.told()["explorer-0"] == "127.0.0.1:9002"
    scene.port(1).write_text("9003\n")
    assert scene.told()["explorer-0"] == "127.0.0.1:9003"
    scene.slots[1].state = "left"
    assert scene.told() == {"feeder-0": "127.0.0.1:9001"}


def test_what_has_not_changed_is_not_written_again_and_the_file_ends_with_the_run(scene: Scene) -> None:
    scene.port(0).write_text("9001\n")
    scene.told()
    before = scene.file.stat().st_ino
    scene.told()
    assert scene.file.stat().st_ino == before
    scene.targets.close(failed=False)
    assert list(scene.file.parent.glob("targets*")) == []


def test_after_a_failure_all_workers_stay_named_so_that_somebody_sees_them_gone(scene: Scene) -> None:
    scene.targets.close(failed=True)
    assert not scene.file.exists(), "nobody was named yet"
    scene.port(0).write_text("9001\n")
    scene.port(1).write_text("9002\n")
    scene.told()
    for slot in scene.slots:
        slot.state = "left"
    assert scene.told() == {}
    scene.targets.close(failed=True)
    named = [(group["labels"]["instance"], group["targets"]) for group in json.loads(scene.file.read_text())]
    assert named == [("feeder-0", ["127.0.0.1:9001"]), ("explorer-0", ["127.0.0.1:9002"])]
