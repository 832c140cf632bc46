"""Readers that come late, and many readers of one store: bytes, times and what a machine's cache saves.

A made model in bfloat16 is published as an anchor and deltas after it; its masters move as under Adam, each element by
about the learning rate, most of them on in their direction. One reader comes 20 deltas late. Then 64 readers, 8
processes of 8 threads on one machine, come to a store that has an anchor and 4 deltas: a folder, and an S3 server
(moto's, one process, which is most of the time there).
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from rftstream.contracts.versions import VersionName, WeightsAnnounced
from rftstream.weights.follower import WeightsFollower
from rftstream.weights.publisher import WeightsPublisher
from rftstream.weights.snapshot import RawTensor
from rftstream.weights.stores.anchors import AnchorCache
from rftstream.weights.stores.store import ObjectStore
from rftstream.weights.version_parts import HasObject
from tests.s3 import BUCKET, S3Server

MODEL = "bench"
LATE_ELEMENTS, LATE_DELTAS = 32 << 20, 20
MANY_ELEMENTS, MANY_DELTAS = 4 << 20, 4
NUM_PROCESSES, NUM_THREADS = 8, 8
LR = 1e-6
TRIES = 3


def run() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="rftstream-bench-") as folder:
        return [*_late(Path(folder) / "late"), *_many(Path(folder) / "many")]


def _row(name: str, unit: str, ours: float, reference: float, which: str) -> dict[str, Any]:
    return {
        "name": f"readers: {name}",
        "unit": unit,
        "ours": ours,
        "reference": reference,
        "reference_name": which,
        "ratio": reference / ours if ours else None,
    }


# -- a reader that comes late


def _late(folder: Path) -> list[dict[str, Any]]:
    store = ObjectStore("file://weights", base=folder)
    announced = _publish(store, LATE_ELEMENTS, LATE_DELTAS, anchor_every=LATE_DELTAS + 1)
    anchor, newest = announced[0], announced[-1]
    times: dict[str, list[float]] = {"anchor": [], "at once": [], "one by one": []}
    for _ in range(TRIES):
        follower = _follower(store, announced)
        times["anchor"].append(_timed(follower, [anchor]))
        times["at once"].append(_timed(follower, [newest]))
        follower.fetch(anchor)
        times["one by one"].append(_timed(follower, announced[1:]))
    anchor_s, at_once_s, one_by_one_s = (statistics.median(one) for one in times.values())
    deltas = sum(one.num_bytes for one in announced[1:])
    what = f"{2 * LATE_ELEMENTS / 1e6:.0f} MB, {LATE_DELTAS} deltas late"
    return [
        _row(f"{what}: the deltas", "s", at_once_s, one_by_one_s, "one by one, each state digested"),
        _row(f"{what}: anchor and deltas", "s", anchor_s + at_once_s, anchor_s, "another anchor alone"),
        _row(f"{what}: the deltas", "bytes", deltas, anchor.num_bytes, "another anchor"),
    ]


def _follower(store: ObjectStore, announced: Sequence[WeightsAnnounced], **options: Any) -> WeightsFollower:
    follower = WeightsFollower(store, MODEL, threads=1, **options)
    for one in announced:
        assert follower.announced(one)
    return follower


def _timed(follower: WeightsFollower, versions: Sequence[WeightsAnnounced]) -> float:
    began = time.perf_counter()
    for one in versions:
        follower.fetch(one)
    return time.perf_counter() - began


# -- many readers


@dataclass(frozen=True, slots=True)
class Read:
    """What the readers of one process read."""

    store_bytes: int
    hits: int
    """Objects that were found in the machine's cache."""


class _CountedStore(ObjectStore):
    def __init__(self, url: str, *, base: Path) -> None:
        super().__init__(url, base=base)
        self.sizes: list[int] = []

    def open(self, name: str) -> IO[bytes]:
        """Open an object, and count its bytes."""
        file = super().open(name)
        self.sizes.append(file.seek(0, os.SEEK_END))
        file.seek(0)
        return file


class _CountedCache(AnchorCache):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.hits: list[str] = []

    def open(self, announced: HasObject) -> IO[bytes] | None:
        """Open an object if it is here, and note its name."""
        file = super().open(announced)
        if file is not None:
            self.hits.append(announced.object)
        return file


def _many(folder: Path) -> list[dict[str, Any]]:
    server = S3Server()
    context = multiprocessing.get_context("spawn")
    try:
        os.environ.update(server.environment)
        with ProcessPoolExecutor(NUM_PROCESSES, context) as pool:
            list(pool.map(time.sleep, [1.0] * NUM_PROCESSES))  # all of them have started
            rows: list[dict[str, Any]] = []
            for kind, url in (("a folder", "file://weights"), ("S3", f"s3://{BUCKET}/bench")):
                store = ObjectStore(url, base=folder)
                announced = _publish(store, MANY_ELEMENTS, MANY_DELTAS, anchor_every=MANY_DELTAS + 1)
                _come(pool, url, folder, announced, None, NUM_PROCESSES, 1)  # their clients are made
                one_s, _ = _come(pool, url, folder, announced, None, 1, 1)
                rows += _compared(kind, pool, url, folder, announced, one_s)
            return rows
    finally:
        server.close()


def _compared(
    kind: str,
    pool: ProcessPoolExecutor,
    url: str,
    folder: Path,
    announced: Sequence[WeightsAnnounced],
    one_s: float,
) -> Iterator[dict[str, Any]]:
    num_readers = NUM_PROCESSES * NUM_THREADS
    of_one = sum(one.num_bytes for one in announced)
    for what, cache in (("", None), (", with the machine's cache", folder / "cache")):
        took_s, found = _come(pool, url, folder, announced, cache, NUM_PROCESSES, NUM_THREADS)
        name = f"{num_readers} readers of {kind}{what}"
        num_bytes = sum(one.store_bytes for one in found)
        yield _row(f"{name}: time for all", "s", took_s, one_s, "one reader")
        yield _row(f"{name}: read from the store", "bytes", num_bytes, num_readers * of_one, "each all of it")
        if cache is not None:
            hits, asked = sum(one.hits for one in found), num_readers * len(announced)
            yield _row(f"{name}: objects found there", "objects", hits, asked, "objects asked for")
        if url.startswith("file"):
            return  # it is no dearer than the cache: none is made


def _come(
    pool: ProcessPoolExecutor,
    url: str,
    folder: Path,
    announced: Sequence[WeightsAnnounced],
    cache: Path | None,
    num_processes: int,
    num_threads: int,
) -> tuple[float, list[Read]]:
    began = time.perf_counter()
    waiting = [pool.submit(_read, url, folder, announced, cache, num_threads) for _ in range(num_processes)]
    found = [one.result() for one in waiting]
    return time.perf_counter() - began, found


def _read(url: str, folder: Path, announced: Sequence[WeightsAnnounced], cache: Path | None, num_threads: int) -> Read:
    """Read the newest version in several threads, each with a follower of its own."""
    store = _CountedStore(url, base=folder)
    kept = None if cache is None else _CountedCache(cache)
    with ThreadPoolExecutor(num_threads) as threads:
        followers = [_follower(store, announced, cache=kept) for _ in range(num_threads)]
        list(threads.map(lambda follower: follower.fetch(announced[-1]), followers))
    return Read(sum(store.sizes), 0 if kept is None else len(kept.hits))


# -- what they read


def _publish(store: ObjectStore, elements: int, deltas: int, anchor_every: int) -> list[WeightsAnnounced]:
    publisher = WeightsPublisher(store, MODEL, "bfloat16", anchor_every=anchor_every)
    return [
        publisher.publish(tensors, VersionName(trainer_epoch=1, version=version), resumed=version == 0)
        for version, tensors in enumerate(_versions(elements, deltas + 1))
    ]


def _versions(elements: int, count: int) -> Iterator[dict[str, RawTensor]]:
    chance = np.random.default_rng(0)
    masters = chance.standard_normal(elements, np.float32) * np.float32(0.1)
    step = chance.standard_normal(elements, np.float32) * np.float32(LR)
    for version in range(count):
        bits = ((masters.view(np.uint32) + np.uint32(0x8000)) >> 16).astype(np.uint16)
        parts = np.split(bits, 8)
        yield {f"layer{place}": RawTensor("BF16", one.shape, one.tobytes()) for place, one in enumerate(parts)}
        masters += step
        step[version % 7 :: 7] *= -1  # some turn back
