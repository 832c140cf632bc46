"""Publishing and following: digests are verified, and a replaced trainer's versions are refused or out of force."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from rftstream.contracts.versions import VersionName, WeightsAnnounced, WeightsKind
from rftstream.errors import WeightsError, WeightsGone
from rftstream.weights.follower import WeightsFollower
from rftstream.weights.lineage import Lineage
from rftstream.weights.publisher import WeightsPublisher, publish
from rftstream.weights.snapshot import RawTensor, state_digest
from rftstream.weights.stores.store import ObjectStore
from rftstream.weights.version_parts import object_name, parse_object_name

pytestmark = pytest.mark.law("lineage")


def name(epoch: int, version: int) -> VersionName:
    return VersionName(trainer_epoch=epoch, version=version)


def state(value: int) -> dict[str, RawTensor]:
    return {"w": RawTensor("F32", (4,), np.full(4, value, dtype=np.float32))}


def announcement(epoch: int, version: int, *, resumed: bool = False, model: str = "m") -> WeightsAnnounced:
    return WeightsAnnounced(
        model=model, name=name(epoch, version), kind=WeightsKind.full, parent=None, object="o", num_bytes=0, digest="",
        weights_digest="", dtype="float32", resumed=resumed,
    )  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore("file://weights", base=tmp_path)


def test_publish_then_fetch(store: ObjectStore) -> None:
    points: list[str] = []
    publisher = WeightsPublisher(store, "m", "float32", fault=points.append)
    told = publisher.publish(state(1), name(1, 5), announced_at=3.0)
    assert told.object == "versions/000001-00000005.safetensors"
    assert (told.kind, told.parent, told.resumed, told.announced_at) == (WeightsKind.full, None, False, 3.0)
    assert told.weights_digest == state_digest(state(1))
    assert points == ["object_written"]
    fetched = WeightsFollower(store, "m").fetch(told)
    assert np.frombuffer(fetched["w"].data, np.float32).tolist() == [1, 1, 1, 1]


def test_publishing_twice_is_fine_but_other_weights_are_not(store: ObjectStore) -> None:
    assert publish(store, state(1), name(1, 0), "m", "float32") == publish(store, state(1), name(1, 0), "m", "float32")
    with pytest.raises(WeightsError, match="other bytes"):
        publish(store, state(2), name(1, 0), "m", "float32")


def test_object_names_go_there_and_back() -> None:
    names = [object_name(name(3, 41), kind, part) for kind in WeightsKind for part in (None, 0, 12)]
    assert [parse_object_name(one) for one in names] == [name(3, 41)] * len(set(names))
    assert object_name(name(1, 9)) < object_name(name(1, 10)) < object_name(name(2, 0))
    others = (
        "versions/x-1.safetensors", "versions/1-2.bin", "checkpoints/1-2/manifest.json", "versions/1", "",
        "versions/1-2.x.delta", "versions/1-2..delta",
    )  # fmt: skip
    for other in others:
        assert parse_object_name(other) is None


def test_fetch_refuses_damage(store: ObjectStore, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    told = publish(store, state(1), name(1, 5), "m", "float32")
    follower = WeightsFollower(store, "m")
    path = tmp_path / "weights" / told.object
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(WeightsError, match=r"digest sha256:.*damaged"):
        follower.fetch(told)
    path.write_bytes(good[:-1])
    with pytest.raises(WeightsError, match="bytes, expected"):
        follower.fetch(told)
    path.write_bytes(good + b"\0")
    with pytest.raises(WeightsError, match="more than 160 bytes, expected as many"):
        follower.fetch(told)
    path.write_bytes(good)
    with pytest.raises(WeightsError, match="it is another state"):
        follower.fetch(dataclasses.replace(told, weights_digest="sha256:0"))
    path.unlink()
    with pytest.raises(WeightsGone):
        follower.fetch(told)
    assert caplog.text.count("reads the full snapshot of version 1/5") == 1, "not each second of a minute"


@pytest.mark.law("bounded")
def test_an_announcement_that_lies_about_a_size_takes_no_memory(store: ObjectStore) -> None:
    told = publish(store, state(1), name(1, 5), "m", "float32")
    follower = WeightsFollower(store, "m")
    with pytest.raises(WeightsError, match=f"found {told.num_bytes} bytes, expected {1 << 62}; it is damaged"):
        follower.fetch(dataclasses.replace(told, num_bytes=1 << 62))
    assert follower.fetch(told).keys() == {"w"}


def test_the_newest_announcement_is_the_one_to_be_on(store: ObjectStore) -> None:
    follower = WeightsFollower(store, "m")
    assert follower.newest() is None
    for version in (0, 1, 3):
        assert follower.announced(announcement(1, version, resumed=version == 0))
    newest = follower.newest()
    assert newest
    assert newest.name == name(1, 3)


@pytest.mark.law("bounded")
def test_a_worker_forgets_what_was_given_up_long_ago(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rftstream.weights.follower.MAX_GONE", 20)
    worker, tool = WeightsFollower(store, "m", forgets=True), WeightsFollower(store, "m")
    for version in range(200):
        gone = (name(1, version - 3),) if version > 5 and version % 50 else ()  # the best ones stay
        told = dataclasses.replace(announcement(1, version, resumed=version == 0), gone=gone)
        assert worker.announced(told) and tool.announced(told)
    assert len(tool.in_force()) == 200
    kept = [one.name.version for one in worker.in_force()]
    assert kept == [0, 1, 2, 47, 97, 147, *range(177, 200)]
    assert worker.fresh().announced(announcement(1, 0, resumed=True))


def test_a_newer_trainer_puts_what_it_does_not_build_on_out_of_force(store: ObjectStore) -> None:
    follower = WeightsFollower(store, "m")
    for version in range(6):
        follower.announced(announcement(1, version, resumed=version == 0))
    follower.announced(announcement(2, 3, resumed=True))
    assert [one.name for one in follower.in_force()] == [name(1, v) for v in range(4)] + [name(2, 3)]
    assert follower.find(name(1, 4)) is None
    newest = follower.newest()
    assert newest
    assert newest.name == name(2, 3)
    follower.announced(announcement(2, 4))
    follower.announced(announcement(5, 2, resumed=True))
    assert [one.name for one in follower.in_force()] == [name(1, 0), name(1, 1), name(1, 2), name(5, 2)]


@pytest.mark.law("fencing")
def test_a_replaced_trainer_is_refused(store: ObjectStore, caplog: pytest.LogCaptureFixture) -> None:
    follower = WeightsFollower(store, "m")
    follower.announced(announcement(1, 0, resumed=True))
    follower.announced(announcement(2, 0, resumed=True))
    assert not follower.announced(announcement(1, 7))
    assert not follower.announced(announcement(2, 0))
    assert not follower.announced(announcement(3, 1, model="other"))
    newest = follower.newest()
    assert newest
    assert newest.name == name(2, 0)
    assert follower.num_refused == 3
    assert "1/7 refused: its trainer was replaced by epoch 2" in caplog.text
    assert "of model 'other', expected 'm'" in caplog.text


def test_lineage() -> None:
    lineage = Lineage()
    assert lineage.epoch == 0
    assert lineage.accepts(1)
    assert lineage.in_force(name(1, 9))
    lineage.start(name(1, 0))
    lineage.start(name(2, 40))
    lineage.start(name(3, 20))
    assert lineage.epoch == 3
    assert not lineage.accepts(2)
    assert lineage.in_force(name(1, 20))
    assert not lineage.in_force(name(1, 21))
    assert not lineage.in_force(name(2, 40))
    assert lineage.in_force(name(3, 99))
