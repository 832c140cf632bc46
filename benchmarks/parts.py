"""A larger model, published by one process and by two that each write their part, and applied by a reader.

Weights are random, of the shapes of a Llama: masters in float32, served in bfloat16. Every version moves each master by
a normal number that makes as many elements change as training at a learning rate of 1e-6 does (0.3 %). Of two writers
the slower one counts; seconds are of the processor, since the writers run beside each other on cores of their own.
Memory is that of publishing, the held weights included, of a writer's share. The size follows the memory that is free.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from benchmarks.weights import safetensors_times
from rftstream.backends.deepspeed.publishing import share_out
from rftstream.contracts.versions import VersionName, WeightsAnnounced, WeightsKind
from rftstream.weights.follower import WeightsFollower
from rftstream.weights.snapshot import Line, data_view, digest_of_lines
from rftstream.weights.stores.store import ObjectStore, StoredObject
from rftstream.weights.version_parts import joined
from rftstream.weights.writer import PartWriter

WIDTH, VOCABULARY, MOST_LAYERS = 1536, 16_384, 40
MOVE = 3e-7
NUM_VERSIONS = 4
BYTES_A_PARAMETER = 4 + 2 + 2
"""Masters, what the writer holds, and what a reader holds."""


def run() -> list[dict[str, Any]]:
    layers = min(MOST_LAYERS, _layers_that_fit(psutil.virtual_memory().available / 2))
    shapes = _shapes(layers)
    num_bytes = 2 * sum(rows * columns for rows, columns in shapes.values())
    name = f"parts: a made model of {num_bytes / 2e9:.2f}B parameters"
    with tempfile.TemporaryDirectory(prefix="rftstream-bench-") as folder:
        alone = _published(shapes, 1, Path(folder) / "1")
        together = _published(shapes, 2, Path(folder) / "2")
        apply_s = _applied(together["announced"], Path(folder) / "2")
        write_s, read_s = safetensors_times(Path(folder) / "full", num_bytes, clock=time.process_time)
    return [
        _row(f"{name}: to publish", "s", alone["seconds"], write_s, "write of safetensors"),
        _row(f"{name}: to publish by two", "s", together["seconds"], alone["seconds"], "by one"),
        _row(f"{name}: memory to publish by two", "share", together["memory"], alone["memory"], "by one"),
        _row(f"{name}: bytes of a version", "bytes", together["bytes"], alone["bytes"], "by one"),
        _row(f"{name}: to apply", "s", apply_s, read_s, "read of safetensors"),
    ]


def _row(name: str, unit: str, ours: float, reference: float, which: str) -> dict[str, Any]:
    return {
        "name": name, "unit": unit, "ours": ours, "reference": reference, "reference_name": which,
        "ratio": reference / ours,
    }  # fmt: skip


def _layers_that_fit(num_bytes: float) -> int:
    shapes = [_shapes(layers) for layers in (1, 2)]
    one, two = (sum(rows * columns for rows, columns in each.values()) for each in shapes)
    return max(1, int((num_bytes / BYTES_A_PARAMETER - one) / (two - one)) + 1)


def _shapes(layers: int) -> dict[str, tuple[int, int]]:
    inner = 4 * WIDTH
    layer = {"q": (WIDTH, WIDTH), "k": (WIDTH // 3, WIDTH), "v": (WIDTH // 3, WIDTH), "o": (WIDTH, WIDTH),
             "gate": (inner, WIDTH), "up": (inner, WIDTH), "down": (WIDTH, inner)}  # fmt: skip
    weights = {f"layers.{number:02d}.{part}": shape for number in range(layers) for part, shape in layer.items()}
    return {"embed": (VOCABULARY, WIDTH), **weights}


def _name(version: int) -> VersionName:
    return VersionName(trainer_epoch=1, version=version)


def _published(shapes: Mapping[str, tuple[int, int]], num: int, folder: Path) -> dict[str, Any]:
    """Publish versions by a number of processes, and return what the last ones took and what is announced."""
    spawn = multiprocessing.get_context("spawn")
    results, barrier = spawn.Queue(), spawn.Barrier(num)
    arguments = (num, dict(shapes), str(folder), barrier, results)
    writers = [spawn.Process(target=_write_part, args=(rank, *arguments)) for rank in range(num)]
    for writer in writers:
        writer.start()
    found = [one for _, one in sorted(results.get() for _ in writers)]
    for writer in writers:
        writer.join()
    announced = [_announced(version, [one["written"][version] for one in found],
                            sorted(line for one in found for line in one["lines"][version]))
                 for version in range(NUM_VERSIONS)]  # fmt: skip
    return {
        "seconds": max(statistics.median(one["seconds"]) for one in found),
        "memory": max(max(one["memory"]) for one in found),
        "bytes": announced[-1].num_bytes,
        "announced": announced,
    }


def _announced(version: int, written: list[StoredObject], lines: list[Line]) -> WeightsAnnounced:
    one, parts = joined(_name(version), written)
    return WeightsAnnounced(
        model="bench", name=_name(version), kind=WeightsKind.delta if version else WeightsKind.full,
        parent=_name(version - 1) if version else None, object=one.object, num_bytes=one.num_bytes, digest=one.digest,
        parts=parts, weights_digest=digest_of_lines(lines), dtype="bfloat16", resumed=not version,
    )  # fmt: skip


def _write_part(
    rank: int, num: int, shapes: Mapping[str, tuple[int, int]], folder: str, barrier: Any, out: Any
) -> None:
    import torch

    from rftstream.weights.tensors import ServedTensors

    torch.set_num_threads(1)
    groups = share_out({name: [name] for name in shapes}, {name: a * b for name, (a, b) in shapes.items()}, num)
    mine = [name for group in groups if group.owner == rank for name in group.names]
    chance = torch.Generator().manual_seed(rank)
    masters = {name: 0.06 * torch.randn(shapes[name], generator=chance) for name in mine}
    share = sum(2 * one.numel() for one in masters.values())
    writer = PartWriter(ObjectStore("file://.", base=Path(folder)), "bench", threads=1, part=rank if num > 1 else None)
    found: dict[str, list[Any]] = {"seconds": [], "memory": [], "written": [], "lines": []}
    for version in range(NUM_VERSIONS):
        for master in masters.values() if version else ():
            master.add_(torch.randn(master.shape, generator=chance), alpha=MOVE)
        barrier.wait()
        with Watched() as watched:
            parent = _name(version - 1) if version else None
            writer.take(ServedTensors(masters, "bfloat16"), _name(version), parent=parent)
            written = writer.write(WeightsKind.delta if version else WeightsKind.full)
            found["lines"].append(writer.lines())
        assert written is not None
        found["written"] += written
        if version:
            found["seconds"].append(watched.seconds)
            found["memory"].append(1 + watched.grown / share)
    out.put((rank, found))


class Watched:
    """Measures the processor's seconds, the memory of this process without files, and how far it grows."""

    def __enter__(self) -> Watched:
        self._process, self._ended = psutil.Process(), threading.Event()
        self._before = self.most = self._held()
        self._watch = threading.Thread(target=self._look)
        self._watch.start()
        self._began = time.process_time()
        return self

    def _held(self) -> int:
        memory = self._process.memory_info()
        return int(memory.rss - memory.shared)

    def _look(self) -> None:
        while not self._ended.wait(0.02):
            self.most = max(self.most, self._held())

    def __exit__(self, *_: object) -> None:
        self.seconds = time.process_time() - self._began
        self._ended.set()
        self._watch.join()
        self.grown = self.most - self._before


def _applied(announced: list[WeightsAnnounced], folder: Path) -> float:
    """Follow the versions, and return the processor's seconds for one of them."""
    follower, times = WeightsFollower(ObjectStore("file://.", base=folder), "bench"), []
    for one in announced:
        follower.announced(one)
        began = time.process_time()
        tensors = follower.fetch(one)
        times.append(time.process_time() - began)
        assert data_view(tensors["embed"]).nbytes
    return statistics.median(times[1:])
