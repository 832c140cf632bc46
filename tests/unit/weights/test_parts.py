"""Versions in parts: several writers, one announcement; and readers, which fetch the parts side by side."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rftstream.contracts.codec import headers_of
from rftstream.contracts.versions import VersionName, WeightsAnnounced, WeightsKind
from rftstream.errors import WeightsError, WeightsGone
from rftstream.weights.follower import WeightsFollower
from rftstream.weights.publisher import WeightsPublisher
from rftstream.weights.retention import to_delete
from rftstream.weights.snapshot import RawTensor, state_digest
from rftstream.weights.stores.anchors import AnchorCache
from rftstream.weights.stores.store import ObjectStore
from rftstream.weights.version_parts import FOLDER, parse_object_name
from tests.part_writers import PartWriters

pytestmark = pytest.mark.law("lineage")


def name(version: int) -> VersionName:
    return VersionName(trainer_epoch=1, version=version)


def state(version: int) -> dict[str, RawTensor]:
    """Sizes that differ from part to part, one that is not a multiple of the alignment, and one without bytes."""
    found = {}
    for number, size in enumerate((4096, 3001, 2500, 1200)):
        values = np.arange(size, dtype=np.float32)
        for one in range(version):
            values[(one + number) % 8 :: 8] += 0.5 + one
        found[f"{number}.weight"] = RawTensor("F32", (size,), values.tobytes())
    return {**found, "empty": RawTensor("F32", (0,), b""), "steps": RawTensor("I64", (1,), bytes([version] + [0] * 7))}


class Run:
    def __init__(self, url: str, folder: Path, num: int = 2, anchor_every: int = 4) -> None:
        self.store, self.folder = ObjectStore(url, base=folder), folder
        self.writers = PartWriters(self.store, num)
        self.publisher = WeightsPublisher(self.store, "m", "float32", anchor_every=anchor_every, writer=self.writers)
        self.told: list[WeightsAnnounced] = []

    def publish(self, *versions: int) -> WeightsAnnounced:
        for version in versions:
            self.told.append(self.publisher.publish(state(version), name(version), resumed=not self.told))
        return self.told[-1]

    def follower(self, *, shared: bool = False, cache: AnchorCache | None = None) -> WeightsFollower:
        follower = WeightsFollower(self.store, "m", shared=shared, cache=cache, threads=2)
        for one in self.told:
            assert follower.announced(one)
        return follower


@pytest.mark.parametrize("shared", [False, True], ids=["own-memory", "shared-memory"])
@pytest.mark.parametrize(("url", "num"), [("file://weights", 2), ("memory://parts-3", 3)])
def test_followers_make_each_version_from_its_parts(tmp_path: Path, url: str, num: int, shared: bool) -> None:
    run = Run(url, tmp_path, num)
    cache = AnchorCache(tmp_path / "anchors") if url.startswith("memory") else None
    run.publish(0)
    near, behind = run.follower(shared=shared, cache=cache), run.follower()
    for follower in (near, behind):
        follower.fetch(run.told[0])
    for version in range(1, 7):
        told = run.publish(version)
        near.announced(told)
        behind.announced(told)
        assert state_digest(near.fetch(told)) == told.weights_digest == state_digest(state(version))
    kinds = [(one.kind.value, len(one.parts), len(one.delta.parts) if one.delta else 0) for one in run.told]
    change, anchor = ("delta", num, 0), ("full", num, num)
    assert kinds == [("full", num, 0), change, change, change, anchor, change, change]
    for late in (behind, run.follower(shared=shared, cache=cache)):
        assert state_digest(late.fetch(run.told[-1])) == run.told[-1].weights_digest
    assert [one.name for one in run.follower().available()] == [one.name for one in run.told]
    if cache is not None:
        assert len(list((tmp_path / "anchors").glob("*.safetensors"))) == num, "all parts of the newest snapshot"


def test_older_readers_refuse_a_version_in_parts_and_read_the_others(tmp_path: Path) -> None:
    run = Run("file://weights", tmp_path)
    run.publish(0, 1, 2, 3, 4)
    whole = WeightsPublisher(run.store, "m", "float32").publish(state(0), name(9), resumed=True)
    for told, since in [*((one, None) for one in run.told), (whole, b"3")]:
        assert dict(headers_of(told, "run")).get("readable_since") == since
    assert whole.parts == () and whole.weights_digest == run.told[0].weights_digest, "parts do not change the digest"


def test_a_part_that_was_not_written_leaves_nothing_in_force_and_is_swept(tmp_path: Path) -> None:
    run = Run("file://weights", tmp_path)
    run.publish(0, 1)
    run.writers.broken = {1}
    with pytest.raises(WeightsError, match="killed"):
        run.publisher.publish(state(2), name(2))
    orphans = [one for one in run.store.list(FOLDER) if parse_object_name(one) == name(2)]
    assert orphans == ["versions/000001-00000002.0000.delta"]
    run.writers.broken = set()
    told = run.publish(3)
    assert (told.kind, told.delta) == (WeightsKind.full, None)
    assert state_digest(run.follower().fetch(told)) == state_digest(state(3))
    in_force = [one.name for one in run.told]
    assert to_delete(run.store.list(FOLDER), in_force=in_force, newest_keep=2, parents={name(1): name(0)}) == [name(2)]


@pytest.mark.parametrize("damage", ["missing", "damaged", "of-another-version"])
def test_a_bad_part_of_a_delta_sends_followers_to_the_snapshot(tmp_path: Path, damage: str) -> None:
    run = Run("file://weights", tmp_path)
    run.publish(0)
    follower = run.follower()
    follower.fetch(run.told[0])
    for version in range(1, 5):
        follower.announced(run.publish(version))
    second = tmp_path / "weights" / "versions" / "000001-00000002.0001.delta"
    if damage == "missing":
        second.unlink()
    else:
        other = (second.parent / "000001-00000003.0001.delta").read_bytes()
        second.write_bytes(other if damage == "of-another-version" else second.read_bytes()[:-1] + b"\7")
    with pytest.raises(WeightsGone if damage == "missing" else WeightsError, match=r"00000002\.0001\.delta"):
        follower.fetch(run.told[2])
    assert state_digest(follower.fetch(run.told[4])) == state_digest(state(4)), "by the newer snapshot"
    assert name(2) not in [one.name for one in follower.available()] or damage != "missing"


def test_parts_are_checked_back(tmp_path: Path) -> None:
    run = Run("file://weights", tmp_path)
    run.publish(0, 1)
    run.publisher.check_back()
    (tmp_path / "weights" / "versions" / "000001-00000000.0001.safetensors").unlink()
    with pytest.raises(WeightsGone, match=r"0001\.safetensors"):
        run.publisher.check_back()
