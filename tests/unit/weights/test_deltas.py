"""Versions as deltas: what is published when, and how followers come from what they have to what is announced."""

from __future__ import annotations

import dataclasses
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from rftstream.contracts.versions import VersionName, WeightsAnnounced, WeightsKind
from rftstream.errors import StoreUnreachable, WeightsError, WeightsGone
from rftstream.weights.deltas import kernels
from rftstream.weights.follower import WeightsFollower
from rftstream.weights.publisher import WeightsPublisher, publish
from rftstream.weights.snapshot import RawTensor, state_digest
from rftstream.weights.stores import anchors
from rftstream.weights.stores.anchors import AnchorCache
from rftstream.weights.stores.store import ObjectStore

pytestmark = pytest.mark.law("lineage")

State = dict[str, RawTensor]


def name(version: int, epoch: int = 1) -> VersionName:
    return VersionName(trainer_epoch=epoch, version=version)


def state(version: int) -> State:
    """Big enough for a delta to be worth it; an eighth changes from one version to the next."""
    values = np.arange(4096, dtype=np.float32)
    for one in range(version):
        values[one % 8 :: 8] += 0.5 + one
    return {"a.weight": RawTensor("F32", (64, 64), values.tobytes()), "b": RawTensor("I64", (1,), bytes(8))}


class Trainer:
    """Publishes versions; `tell` says to a follower what it announced."""

    def __init__(self, folder: Path, anchor_every: int = 4) -> None:
        self.store = ObjectStore("file://weights", base=folder)
        self.folder = folder / "weights"
        self.anchor_every = anchor_every
        self.announced: list[WeightsAnnounced] = []
        self.start(0, 1)

    def start(self, version: int, epoch: int) -> None:
        self.publisher = WeightsPublisher(self.store, "m", "float32", anchor_every=self.anchor_every)
        self.epoch = epoch
        self.publish(version, resumed=True)

    def publish(self, *versions: int, resumed: bool = False) -> WeightsAnnounced:
        for version in versions:
            told = self.publisher.publish(state(version), name(version, self.epoch), resumed=resumed)
            self.announced.append(told)
        return self.announced[-1]

    def follower(self, cache: AnchorCache | None = None, skip: int = 0) -> WeightsFollower:
        follower = WeightsFollower(self.store, "m", cache=cache)
        for one in self.announced[skip:]:
            follower.announced(one)
        return follower

    def path(self, announced: WeightsAnnounced) -> Path:
        return self.folder / announced.object


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path)


def newest(follower: WeightsFollower) -> WeightsAnnounced:
    found = follower.newest()
    assert found is not None
    return found


def assert_on(follower: WeightsFollower, version: int) -> None:
    """It can have the newest version, and that is this one."""
    announced = newest(follower)
    assert announced.name.version == version
    assert state_digest(follower.fetch(announced)) == state_digest(state(version)) == announced.weights_digest


def test_anchors_come_every_so_often_and_are_deltas_as_well(trainer: Trainer) -> None:
    trainer.publish(*range(1, 9))
    kinds = [(one.kind, one.parent, one.delta and one.delta.parent) for one in trainer.announced]
    full, delta = WeightsKind.full, WeightsKind.delta
    assert kinds == [
        (full, None, None), (delta, name(0), None), (delta, name(1), None), (delta, name(2), None),
        (full, None, name(3)), (delta, name(4), None), (delta, name(5), None), (delta, name(6), None),
        (full, None, name(7)),
    ]  # fmt: skip
    assert all(one.num_bytes < 3000 for one in trainer.announced if one.kind is delta)
    assert trainer.announced[0].num_bytes > 16384


def test_without_deltas(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, anchor_every=1)
    trainer.publish(1, 2)
    assert {(one.kind, one.delta) for one in trainer.announced} == {(WeightsKind.full, None)}
    assert not list(trainer.folder.rglob("*.delta"))


def test_a_delta_that_would_be_no_smaller_is_a_snapshot(tmp_path: Path) -> None:
    store = ObjectStore("file://weights", base=tmp_path)
    publisher = WeightsPublisher(store, "m", "float32", anchor_every=100)
    chance = np.random.default_rng(0)
    for version in range(3):
        tensors = {"w": RawTensor("F32", (4096,), chance.bytes(4 * 4096))}
        told = publisher.publish(tensors, name(version))
        assert (told.kind, told.parent, told.delta) == (WeightsKind.full, None, None)
        assert told.weights_digest == state_digest(tensors)


def test_a_restarted_trainer_begins_with_an_anchor_and_so_does_one_that_failed(trainer: Trainer) -> None:
    trainer.publish(1, 2)
    trainer.start(1, epoch=2)
    assert trainer.announced[-1].kind is WeightsKind.full
    assert trainer.announced[-1].delta is None
    trainer.publish(2)
    writer: Any = trainer.publisher._writer
    broken, writer.store = writer.store, None
    with pytest.raises(AttributeError):
        trainer.publish(3)
    writer.store = broken
    told = trainer.publish(4)
    assert (told.kind, told.delta) == (WeightsKind.full, None)
    assert_on(trainer.follower(), 4)


def test_a_follower_goes_along_and_a_late_one_comes_from_an_anchor(trainer: Trainer) -> None:
    along = trainer.follower()
    assert_on(along, 0)
    for version in range(1, 12):
        along.announced(trainer.publish(version))
        if version == 1:  # never needed again by one that has it
            for file in trainer.folder.rglob("*.safetensors"):
                file.rename(f"{file}.away")
        assert_on(along, version)
        for file in trainer.folder.rglob("*00[48].safetensors"):
            file.rename(f"{file}.away")
    for file in trainer.folder.rglob("*.away"):
        file.rename(str(file).removesuffix(".away"))
    late = trainer.follower()
    assert_on(late, 11)
    middle = next(one for one in late.in_force() if one.name.version == 6)
    assert state_digest(late.fetch(middle)) == middle.weights_digest, "back to an older one"


@pytest.mark.parametrize(("url", "way"), [("file://weights", ".safetensors"), ("memory://far-behind", ".delta")])
def test_far_behind_a_snapshot_is_read_where_reading_is_cheap(tmp_path: Path, url: str, way: str) -> None:
    store = ObjectStore(url, base=tmp_path)
    publisher = WeightsPublisher(store, "m", "float32", anchor_every=12)
    values = np.zeros(1 << 16, np.float32)
    announced = []
    for version in range(13):
        values[version] = 1
        tensors = {"a": RawTensor("F32", values.shape, values.tobytes())}
        announced.append(publisher.publish(tensors, name(version), resumed=version == 0))
    follower = WeightsFollower(store, "m")
    for one in announced:
        assert follower.announced(one)
    follower.fetch(announced[0])
    opened: list[str] = []
    open_object = store.open

    def noted(name: str) -> IO[bytes]:
        opened.append(name)
        return open_object(name)

    store.open = noted  # type: ignore[method-assign]
    assert state_digest(follower.fetch(announced[12])) == announced[12].weights_digest
    assert {Path(one).suffix for one in opened} == {way}
    assert len(opened) == (1 if way == ".safetensors" else 12)
    follower.fetch(announced[5])
    opened.clear()
    follower.fetch(announced[10])
    assert len(opened) == 5, "no snapshot is nearer"


def test_a_state_that_is_in_hand_is_not_read_again(trainer: Trainer) -> None:
    follower = trainer.follower()
    assert_on(follower, 0)
    follower.announced(trainer.publish(1))
    assert_on(follower, 1)
    trainer.start(1, epoch=2)
    follower.announced(trainer.announced[-1])
    trainer.path(trainer.announced[-1]).unlink()
    assert_on(follower, 1)
    assert follower.held() is not None
    assert follower.held()[0] == name(1, epoch=2)  # type: ignore[index]


def test_what_cannot_be_made_from_the_store_is_not_available(trainer: Trainer) -> None:
    trainer.publish(*range(1, 7))
    trainer.path(trainer.announced[2]).unlink()
    assert [one.name.version for one in trainer.follower().available()] == [0, 1, 4, 5, 6]
    trainer.path(trainer.announced[0]).unlink()
    assert [one.name.version for one in trainer.follower().available()] == [4, 5, 6]


@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped", "longer", "another version's"])
def test_a_damaged_delta_is_refused_and_the_next_anchor_taken(trainer: Trainer, damage: str) -> None:
    follower = trainer.follower()
    follower.announced(trainer.publish(1))
    assert_on(follower, 1)
    told = trainer.publish(2)
    path = trainer.path(told)
    good = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "another version's":
        other = trainer.path(trainer.announced[1])
        path.write_bytes(other.read_bytes())
        old = trainer.announced[1]
        told = dataclasses.replace(told, num_bytes=old.num_bytes, digest=old.digest)
    else:
        flipped = good[:-9] + bytes([good[-9] ^ 4]) + good[-8:]
        path.write_bytes({"truncated": good[:-1], "flipped": flipped, "longer": good + b"\0"}[damage])
    follower.announced(told)
    with pytest.raises(WeightsGone if damage == "missing" else WeightsError, match=r"000002\.delta"):
        follower.fetch(newest(follower))
    held = follower.held()
    assert held is not None, "the version before is still there"
    assert (held[0].version, state_digest(held[1])) in [(v, state_digest(state(v))) for v in (0, 1)]
    follower.announced(trainer.publish(3))
    with pytest.raises(WeightsError):
        follower.fetch(newest(follower))
    follower.announced(trainer.publish(4))
    assert_on(follower, 4)


def test_a_follower_comes_as_far_as_it_can(trainer: Trainer) -> None:
    trainer.publish(1, 2, 3)
    trainer.path(trainer.announced[3]).unlink()
    follower = trainer.follower()
    with pytest.raises(WeightsGone):
        follower.fetch(newest(follower))
    held = follower.held()
    assert held is not None
    assert held[0] == name(2)
    assert state_digest(held[1]) == state_digest(state(2))


@pytest.mark.law("fencing")
def test_gaps_older_epochs_and_what_comes_twice_are_refused(trainer: Trainer, caplog: pytest.LogCaptureFixture) -> None:
    trainer.publish(1, 2, 3, 4, 5)
    follower = WeightsFollower(trainer.store, "m")
    first, _, second, third, anchor, fifth = trainer.announced
    assert follower.announced(first)
    assert not follower.announced(second), "its parent was never told of"
    assert not follower.announced(third)
    assert "a delta of 1/1, which is not known" in caplog.text
    assert_on(follower, 0)
    assert follower.announced(anchor)
    assert follower.announced(fifth)
    assert not follower.announced(second), "out of order"
    assert_on(follower, 5)
    trainer.start(3, epoch=2)
    assert follower.announced(trainer.announced[-1])
    assert not follower.announced(dataclasses.replace(fifth, name=name(9)))
    assert_on(follower, 3)
    assert follower.num_refused == 4


def test_other_models_are_refused(trainer: Trainer) -> None:
    told = trainer.publish(1)
    follower = WeightsFollower(trainer.store, "other")
    assert not follower.announced(told)
    odd = WeightsPublisher(trainer.store, "m", "float32", anchor_every=9)
    odd.publish(state(0), name(0, 7))
    with pytest.raises(WeightsError, match="'c' came or went, expected the parent's tensors"):
        odd.publish({**state(1), "c": RawTensor("F32", (), bytes(4))}, name(1, 7))
    odd.publish(state(0), name(2, 7))
    with pytest.raises(WeightsError, match=r"found F32 \[4096\], expected F32 \[64, 64\]"):
        odd.publish({**state(1), "a.weight": RawTensor("F32", (4096,), bytes(16384))}, name(3, 7))


def test_the_last_anchor_is_kept_on_this_machine(trainer: Trainer, tmp_path: Path) -> None:
    cache = AnchorCache(tmp_path / "anchors")
    follower = trainer.follower(cache)
    assert_on(follower, 0)
    trainer.publish(1, 2)
    trainer.path(trainer.announced[0]).unlink()
    assert_on(trainer.follower(cache), 2)
    kept = list((tmp_path / "anchors").glob("*.safetensors"))
    assert len(kept) == 1

    kept[0].write_bytes(kept[0].read_bytes()[:-1] + b"x")
    trainer.publish(3, 4)
    assert_on(trainer.follower(cache), 4)
    kept = list((tmp_path / "anchors").glob("*.safetensors"))
    assert [one.stem for one in kept] == [trainer.announced[4].digest.removeprefix("sha256:")], "only the newest"
    kept[0].write_bytes(b"not a snapshot")
    assert_on(trainer.follower(cache), 4)

    assert kept[0].stat().st_size == trainer.announced[4].num_bytes, "what was damaged is replaced"

    (tmp_path / "file").write_bytes(b"")
    assert_on(trainer.follower(AnchorCache(tmp_path / "file")), 4)


def test_readers_of_a_machine_fetch_an_object_once(trainer: Trainer, tmp_path: Path) -> None:
    trainer.publish(1, 2, 3)
    opened: list[str] = []
    open_object = trainer.store.open

    def counted(name: str) -> IO[bytes]:
        opened.append(name)
        return open_object(name)

    trainer.store.open = counted  # type: ignore[method-assign]
    cache = AnchorCache(tmp_path / "anchors")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: assert_on(trainer.follower(cache), 3), range(8)))
    assert sorted(opened) == sorted(one.object for one in trainer.announced)
    trainer.publish(4)
    assert_on(trainer.follower(cache), 4)
    kept = Counter(one.suffix for one in (tmp_path / "anchors").glob("*") if one.suffix != ".lock")
    assert kept == {".safetensors": 1, ".delta": len(trainer.announced) - 2}, "every one but the snapshot before"


def test_a_store_that_cannot_be_reached_in_the_middle_costs_no_place(trainer: Trainer) -> None:
    follower = trainer.follower()
    assert_on(follower, 0)
    first, second = trainer.publish(1), trainer.publish(2)
    for one in (first, second):
        follower.announced(one)
    open_object = trainer.store.open

    def reached(name: str) -> IO[bytes]:
        if name == second.object:
            raise StoreUnreachable("no answer")
        return open_object(name)

    trainer.store.open = reached  # type: ignore[method-assign]
    with pytest.raises(StoreUnreachable):
        follower.fetch(second)
    held = follower.held()
    assert held is not None
    assert held[0] == first.name
    trainer.store.open = open_object  # type: ignore[method-assign]
    assert_on(follower, 2)


@pytest.mark.law("never-waits")
def test_a_reader_that_does_not_let_go_is_not_waited_for(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = AnchorCache(tmp_path / "anchors")
    monkeypatch.setattr(anchors, "WAIT_S", 0.01)
    with cache.turn(trainer.announced[0]):
        assert_on(trainer.follower(cache), 0)


@pytest.mark.law("bounded")
def test_few_deltas_are_kept(trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchors, "MOST_DELTAS", 2)
    follower = trainer.follower(AnchorCache(tmp_path / "anchors"))
    assert_on(follower, 0)
    for version in range(1, 4):
        follower.announced(trainer.publish(version))
        assert_on(follower, version)
    kept = {one.stem for one in (tmp_path / "anchors").glob("*.delta")}
    assert len(kept) == 2
    assert trainer.announced[3].digest.removeprefix("sha256:") in kept


def test_publishing_the_same_again_is_fine(trainer: Trainer) -> None:
    trainer.publish(1)
    again = WeightsPublisher(trainer.store, "m", "float32", anchor_every=4)
    assert again.publish(state(0), name(0), resumed=True) == trainer.announced[0]
    assert again.publish(state(1), name(1)) == trainer.announced[1]
    assert publish(trainer.store, state(0), name(0), "m", "float32", resumed=True) == trainer.announced[0]


def test_without_a_compiler_weights_are_published_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    kernels._library.cache_clear()
    try:
        trainer = Trainer(tmp_path)
        assert [trainer.publish(version).kind for version in (1, 2)] == [WeightsKind.full] * 2
    finally:
        monkeypatch.undo()
        kernels._library.cache_clear()
    assert "published in full, without deltas: kernels.c: found no C compiler" in caplog.text
    assert state_digest(trainer.follower().fetch(trainer.announced[-1])) == state_digest(state(2))
    assert not kernels.why_not()
