"""Checkpoints: all or nothing, verified, and never the last one lost."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import IO

import pytest

from rftstream.contracts.control import Trimmed
from rftstream.contracts.versions import VersionName
from rftstream.errors import StoreUnreachable, WeightsError
from rftstream.weights.checkpoints import CheckpointStore, is_gone
from rftstream.weights.stores.store import ObjectStore

pytestmark = pytest.mark.law("replay")


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


@pytest.mark.law("lineage")
def test_newest_is_the_newest_in_force(store: ObjectStore) -> None:
    checkpoints = CheckpointStore(store)
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


@pytest.mark.parametrize("folder", [None, "restored"])
def test_a_store_that_is_away_says_nothing_of_a_checkpoint(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str | None
) -> None:
    """The one before is not taken in its place, nor is it called damaged."""
    checkpoints, opened = CheckpointStore(store), store.open
    for version in (20, 40):
        checkpoints.write(name(1, version), fill, {})

    def open_or_not(place: str) -> IO[bytes]:
        if place.startswith("checkpoints/000001-00000040/files"):
            raise StoreUnreachable(f"{place}: given up")
        return opened(place)

    monkeypatch.setattr(store, "open", open_or_not)
    with pytest.raises(StoreUnreachable):
        checkpoints.newest(folder=None if folder is None else tmp_path)


def test_what_is_deleted_leaves_nothing(store: ObjectStore) -> None:
    checkpoints = CheckpointStore(store)
    for version in (10, 20, 30):
        checkpoints.write(name(1, version), fill, {"version": version})
    assert checkpoints.state(name(1, 20)) == {"version": 20}
    assert checkpoints.older_than(name(1, 30)) == {name(1, 10), name(1, 20)}
    checkpoints.delete(name(1, 20))
    assert checkpoints.names() == [name(1, 10), name(1, 30)]
    assert {one.split("/")[1] for one in store.list("checkpoints/")} == {"000001-00000010", "000001-00000030"}


def test_what_was_never_complete_is_old_too_and_what_is_being_written_is_not(store: ObjectStore) -> None:
    store.put("checkpoints/000001-00000015/files/half", b"1")
    store.put("checkpoints/000002-00000030/files/just-being-written", b"1")
    checkpoints = CheckpointStore(store)
    checkpoints.write(name(1, 20), fill, {})
    assert checkpoints.older_than(name(1, 20)) == {name(1, 15)}
    checkpoints.delete(name(1, 15))
    assert not store.list("checkpoints/000001-00000015/")


def test_gone_is_what_was_not_named_among_the_older_ones() -> None:
    said = Trimmed(name=name(2, 30), checkpoints=(name(1, 10), name(2, 30)))
    ages = {name(1, 10): False, name(1, 20): True, name(1, 40): True, name(2, 25): True, name(2, 30): False,
            name(2, 31): False, name(3, 5): False}  # fmt: skip
    assert {one: is_gone(one, said) for one in ages} == ages
    assert not is_gone(name(1, 20), None)


def test_a_state_that_is_no_json_is_refused(store: ObjectStore) -> None:
    with pytest.raises(ValueError, match="JSON"):
        CheckpointStore(store).write(name(1, 1), fill, {"loss": float("nan")})
    assert CheckpointStore(store).names() == []


def test_the_newest_is_read_once_and_a_damaged_one_leaves_nothing(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = CheckpointStore(store)
    for version in (10, 20, 30, 40):
        checkpoints.write(name(1, version), fill, {"version": version})
    damaged = "checkpoints/000001-00000030/files/rank-0/rng.json"
    store.delete(damaged)
    store.put(damaged, b"other")
    opened: list[str] = []
    original = store.open
    monkeypatch.setattr(store, "open", lambda where: opened.append(where) or original(where))
    folder = tmp_path / "restored"
    folder.mkdir()
    found = checkpoints.newest(lambda one: True, lambda one, state: state["version"] != 40, folder=folder)
    assert found == (name(1, 20), {"version": 20})
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == {
        "masters.safetensors",
        "rank-0/rng.json",
        "empty",
    }
    assert (folder / "rank-0" / "rng.json").read_text() == "{}"
    files = [where for where in opened if "/files/" in where]
    assert len(files) == len(set(files)), "each once"
    assert not any("00000040" in where for where in files)


def test_the_manifest_is_deleted_first(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is killed in the middle leaves no checkpoint that lacks files."""
    checkpoints, deleted, delete = CheckpointStore(store), list[str](), ObjectStore.delete
    checkpoints.write(name(1, 2), fill, {})

    def noted(self: ObjectStore, text: str) -> None:
        deleted.append(text)
        delete(self, text)

    monkeypatch.setattr(ObjectStore, "delete", noted)
    checkpoints.delete(name(1, 2))
    assert deleted[0].endswith("manifest.json") and len(deleted) > 1
