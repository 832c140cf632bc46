"""Checkpoints: all or nothing, verified, and never the last one lost."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from rftstream.errors import WeightsError
from rftstream.messages import VersionName
from rftstream.weights.checkpoints import CheckpointStore
from rftstream.weights.store import ObjectStore


class StoppedError(Exception):
    pass


def name(epoch: int, version: int) -> VersionName:
    return VersionName(trainer_epoch=epoch, version=version)


def fill(folder: Path) -> None:
    (folder / "masters.safetensors").write_bytes(b"masters" * 1000)
    (folder / "rank-0").mkdir()
    (folder / "rank-0" / "rng.json").write_text("{}")
    (folder / "empty").write_bytes(b"")


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    url = "file://weights" if request.param == "file" else f"memory://{uuid.uuid4().hex}"
    return ObjectStore(url, base=tmp_path)


def test_read_gives_back_what_was_written(store: ObjectStore, tmp_path: Path) -> None:
    checkpoints = CheckpointStore(store)
    assert checkpoints.newest() is None
    checkpoints.write(name(1, 20), fill, {"positions": [5, 7], "steps": 20})
    assert checkpoints.newest() == (name(1, 20), {"positions": [5, 7], "steps": 20})
    folder = tmp_path / "restored"
    folder.mkdir()
    assert checkpoints.read(name(1, 20), folder) == {"positions": [5, 7], "steps": 20}
    assert (folder / "masters.safetensors").read_bytes() == b"masters" * 1000
    assert (folder / "rank-0" / "rng.json").read_text() == "{}"
    assert (folder / "empty").read_bytes() == b""


def test_newest_is_the_newest_in_force(store: ObjectStore) -> None:
    checkpoints = CheckpointStore(store, keep=9)
    for one in (name(1, 20), name(1, 40), name(2, 30)):
        checkpoints.write(one, fill, {"version": one.version})
    assert checkpoints.names() == [name(1, 20), name(1, 40), name(2, 30)]
    newest = checkpoints.newest()
    assert newest
    assert newest[0] == name(2, 30)
    newest = checkpoints.newest(lambda one: one.version <= 20)
    assert newest
    assert newest[0] == name(1, 20)
    assert checkpoints.newest(lambda one: False) is None


def test_without_its_manifest_it_does_not_exist(store: ObjectStore) -> None:
    def stop(point: str) -> None:
        if point == "checkpoint_files_written":
            raise StoppedError

    CheckpointStore(store).write(name(1, 20), fill, {})
    with pytest.raises(StoppedError):
        CheckpointStore(store, fault=stop).write(name(1, 40), fill, {})
    checkpoints = CheckpointStore(store)
    assert checkpoints.names() == [name(1, 20)]
    checkpoints.write(name(1, 40), lambda folder: (folder / "other").write_bytes(b"other") and None, {})
    assert [one for one in store.list("checkpoints/000001-00000040/") if "masters" in one] == []
    newest = checkpoints.newest()
    assert newest
    assert newest[0] == name(1, 40)


def test_fault_points_in_order(store: ObjectStore) -> None:
    points: list[str] = []
    CheckpointStore(store, fault=points.append).write(name(1, 1), fill, {})
    assert points == [
        *["before_checkpoints"] * 3, "checkpoint_files_written", "before_checkpoints", "checkpoint_manifest_written",
    ]  # fmt: skip


def test_no_checkpoint_is_written_twice(store: ObjectStore) -> None:
    CheckpointStore(store).write(name(1, 20), fill, {})
    with pytest.raises(WeightsError, match="exists already"):
        CheckpointStore(store).write(name(1, 20), fill, {})


@pytest.mark.parametrize("damage", ["flipped", "shorter", "missing", "manifest", "other_manifest", "format"])
def test_a_damaged_one_is_skipped(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = CheckpointStore(ObjectStore("file://weights", base=tmp_path))
    checkpoints.write(name(1, 20), fill, {"good": True})
    checkpoints.write(name(1, 40), fill, {})
    folder = tmp_path / "weights" / "checkpoints" / "000001-00000040"
    masters, manifest = folder / "files" / "masters.safetensors", folder / "manifest.json"
    if damage == "flipped":
        masters.write_bytes(masters.read_bytes().replace(b"m", b"n", 1))
    elif damage == "shorter":
        masters.write_bytes(masters.read_bytes()[:-1])
    elif damage == "missing":
        masters.unlink()
    elif damage == "manifest":
        manifest.write_bytes(manifest.read_bytes()[:30])
    elif damage == "other_manifest":
        manifest.write_bytes((folder.parent / "000001-00000020" / "manifest.json").read_bytes())
    else:
        manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    assert checkpoints.newest() == (name(1, 20), {"good": True})
    assert "checkpoint skipped, the one before is taken" in caplog.text
    assert "checkpoints/000001-00000040" in caplog.text
    restored = tmp_path / "restored"
    restored.mkdir()
    with pytest.raises(WeightsError):
        checkpoints.read(name(1, 40), restored)


def test_trim(store: ObjectStore) -> None:
    checkpoints = CheckpointStore(store, keep=2)
    for version in (10, 20, 30, 40, 50):
        checkpoints.write(name(1, version), fill, {})
    assert checkpoints.trim(also=[name(1, 20)]) == [name(1, 20), name(1, 40), name(1, 50)]
    assert checkpoints.names() == [name(1, 20), name(1, 40), name(1, 50)]
    assert checkpoints.trim(keep=1) == [name(1, 50)]
    assert {one.split("/")[1] for one in store.list("checkpoints/")} == {"000001-00000050"}
    assert checkpoints.trim(keep=0) == [name(1, 50)]


def test_trim_counts_those_in_force_and_never_takes_the_newest(store: ObjectStore) -> None:
    checkpoints = CheckpointStore(store, keep=2)
    for one in (name(1, 10), name(1, 20), name(1, 30), name(2, 25), name(3, 12)):
        checkpoints.write(one, fill, {})
    kept = checkpoints.trim(in_force=lambda one: one in (name(1, 10), name(1, 20), name(2, 25)))
    assert kept == [name(1, 20), name(2, 25), name(3, 12)]


def test_trim_clears_up_what_never_was_complete(store: ObjectStore) -> None:
    store.put("checkpoints/000001-00000015/files/half", b"1")
    store.put("checkpoints/000002-00000030/files/just-being-written", b"1")
    checkpoints = CheckpointStore(store)
    checkpoints.write(name(1, 20), fill, {})
    checkpoints.trim()
    assert not store.list("checkpoints/000001-00000015/")
    assert store.list("checkpoints/000002-00000030/")


def test_a_state_that_is_no_json_is_refused(store: ObjectStore) -> None:
    with pytest.raises(ValueError, match="JSON"):
        CheckpointStore(store).write(name(1, 1), fill, {"loss": float("nan")})
    assert CheckpointStore(store).names() == []
