"""Who comes late has the weights, bit for bit, with nobody there but the log and the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from rftstream.contracts.versions import StepRecord, VersionName, WeightsAnnounced, WeightsKind
from rftstream.runs.folder import open_run
from rftstream.service.role import Log
from rftstream.weights.follower import WeightsFollower
from rftstream.weights.snapshot import state_digest
from rftstream.weights.stores.anchors import AnchorCache
from rftstream.weights.stores.store import ObjectStore
from tests.e2e.workplace import Workplace, sets
from tests.s3 import BUCKET, S3Server

pytestmark = [pytest.mark.slow, pytest.mark.law("lineage", "never-waits")]

VERSION, ANCHOR_EVERY = 11, 4


class CountingStore(ObjectStore):
    """Says which objects were read."""

    def __init__(self, url: str, base: Path) -> None:
        super().__init__(url, base=base)
        self.read: list[str] = []

    def open(self, name: str):  # type: ignore[no-untyped-def]
        self.read.append(name)
        return super().open(name)


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a store."""
    if request.param == "file":
        return "file://weights"
    server: S3Server = request.getfixturevalue("s3")  # fsspec has one client in a process, of one server
    for key, value in server.environment.items():
        monkeypatch.setenv(key, value)
    return f"s3://{BUCKET}/late/{{run}}"


@pytest.mark.sampled(1)
def test_a_late_follower_has_the_weights_without_a_trainer(place: Workplace, store: str) -> None:
    done = place.call("run", "tiny.toml", *sets(
        f"run.steps={VERSION}", "model.dtype=bfloat16",
        f"weights.store={store}", f"weights.anchor_every={ANCHOR_EVERY}",
        "backends.fake.elements=8192", "trainer.checkpoint_every=4", "weights.keep=2",
    ))  # fmt: skip
    assert done.code == 0, done.err
    opened = open_run(place.folder / "runs" / "tiny")
    try:
        messages = [one.message for topic in ("weights", "steps") for one in Log(opened.transport).messages(topic)]
        url = opened.store().url
    finally:
        opened.transport.close()
    announced = [one for one in messages if isinstance(one, WeightsAnnounced)]
    assert [one.name.version for one in announced if one.kind is WeightsKind.full] == [0, 4, 8]
    recorded = {one.name.version: one.weights_digest for one in messages if isinstance(one, StepRecord)}

    counting = CountingStore(url, place.folder / "runs" / "tiny")
    cache = AnchorCache(place.folder / "anchors")
    expected = [one.object for one in announced[8:]]
    for read in (expected, []):  # the second time all of it lies on this machine
        counting.read.clear()
        follower = WeightsFollower(counting, announced[0].model, cache=cache)
        assert all(map(follower.announced, announced))
        newest = follower.newest()
        assert newest is not None
        assert newest.name == VersionName(trainer_epoch=1, version=VERSION)
        assert state_digest(follower.fetch(newest)) == recorded[VERSION]
        assert counting.read == read
    assert {one.name.version for one in follower.available()} == {0, *range(4, VERSION + 1)}
    assert sum(counting.size(one.object) for one in announced[9:]) < 0.5 * 3 * announced[8].num_bytes
