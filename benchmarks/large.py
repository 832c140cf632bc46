"""A version of a model of 7B parameters, published as a delta and applied: seconds, bytes and memory.

Weights are random, of the shapes of Qwen2.5-7B: masters in float32, served in bfloat16. All masters are pieces of one
file that is mapped into memory, and overlap there, since 30 GB would not fit. Each master of the second version is
moved by a normal number, so that as many elements change as in training at a learning rate of 1e-6 (0.3 %). Writer and
reader are processes of their own, one after the other. Seconds are of the processor. Memory is what the process holds
beside files, since a trainer has its masters anyway. Where 7B does not fit, the model has fewer layers, and the rows
say its size.
"""

from __future__ import annotations

import math
import multiprocessing
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from safetensors import safe_open

from benchmarks.parts import MOVE, Watched
from rftstream.contracts.versions import VersionName, WeightsAnnounced
from rftstream.weights.follower import WeightsFollower
from rftstream.weights.publisher import WeightsPublisher
from rftstream.weights.stores.store import ObjectStore
from rftstream.weights.tensors import ServedTensors

WIDTH, INNER, KEYS, VOCABULARY, LAYERS = 3584, 18_944, 512, 152_064, 28
BYTES_A_PARAMETER = 2.4
"""Of memory that must be free: the weights in bfloat16, notes of what changed, and pages of the masters."""
SPREAD = 16 << 20
"""Number of elements among which each tensor begins at one of its own."""


def run() -> list[dict[str, Any]]:
    shapes = _shapes_that_fit(psutil.virtual_memory().available / BYTES_A_PARAMETER)
    name = f"large: {_num_bytes(shapes) / 2e9:.1f}B parameters"
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=Path.cwd()) as folder:  # /tmp may lie in memory
        with spawn.Pool(1) as pool:
            written = pool.apply(_publish, (shapes, folder))
        with spawn.Pool(1) as pool:
            read = pool.apply(_apply, (shapes, folder, written["announced"]))
        with spawn.Pool(1) as pool:
            read_s = pool.apply(_read_safetensors, (folder,))
    full, delta = written["announced"]
    rows = [
        ("to publish", "s", written["seconds"][1], written["seconds"][0], "in full"),
        ("to apply", "s", read["seconds"][1], read_s, "read of safetensors"),
        ("to begin with it in full", "s", read["seconds"][0], read_s, "read of safetensors"),
        ("bytes of a version", "bytes", delta.num_bytes, full.num_bytes, "in full"),
    ]
    times_less = [
        _row(name, what, unit, ours, reference, which, reference / ours) for what, unit, ours, reference, which in rows
    ]
    weights = _num_bytes(shapes) / 1e9
    held = [("to publish", written["memory"] / 1e9), ("to apply", read["memory"] / 1e9)]
    return times_less + [
        _row(name, f"memory {what}", "GB", ours, weights, "the weights", ours / weights) for what, ours in held
    ]


def _row(name: str, what: str, unit: str, ours: float, reference: float, which: str, ratio: float) -> dict[str, Any]:
    return {
        "name": f"{name}: {what}", "unit": unit, "ours": ours, "reference": reference, "reference_name": which,
        "ratio": ratio,
    }  # fmt: skip


def _shapes_that_fit(parameters: float) -> dict[str, tuple[int, int]]:
    layer = {"q": (WIDTH, WIDTH), "k": (KEYS, WIDTH), "v": (KEYS, WIDTH), "o": (WIDTH, WIDTH),
             "gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER)}  # fmt: skip
    ends = {"embed": (VOCABULARY, WIDTH), "head": (VOCABULARY, WIDTH)}
    left = parameters - sum(map(math.prod, ends.values()))
    layers = min(LAYERS, max(1, int(left / sum(map(math.prod, layer.values())))))
    return ends | {f"layers.{number:02d}.{part}": shape for number in range(layers) for part, shape in layer.items()}


class _Masters(Mapping[str, torch.Tensor]):
    """Weights of a version in float32: each tensor is a piece of one file of random numbers."""

    def __init__(self, shapes: Mapping[str, tuple[int, int]], path: Path) -> None:
        self._shapes = shapes
        self._numbers = np.memmap(path, np.float32, "c")

    def __getitem__(self, name: str) -> torch.Tensor:
        place, count = zlib.crc32(name.encode()) % SPREAD, math.prod(self._shapes[name])
        return torch.from_numpy(self._numbers[place : place + count]).view(self._shapes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def _write_masters(path: Path, most: int, move: float) -> None:
    """Write random numbers, enough for a tensor of `most` elements at any place. With `move` each is moved a little."""
    chance, moves = (np.random.default_rng(seed) for seed in range(2))
    with path.open("wb") as file:
        for _ in range(math.ceil((most + SPREAD) / SPREAD)):
            values = np.float32(0.06) * chance.standard_normal(SPREAD, dtype=np.float32)
            values += np.float32(move) * moves.standard_normal(SPREAD, dtype=np.float32)
            file.write(values.data)


def _publish(shapes: Mapping[str, tuple[int, int]], folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)  # rounding is counted where it is done
    publisher = WeightsPublisher(ObjectStore("file://.", base=Path(folder)), "bench", "bfloat16", anchor_every=1000)
    announced, seconds, memory = [], [], []
    for version in range(2):
        path = Path(folder) / f"masters-{version}"
        _write_masters(path, max(map(math.prod, shapes.values())), version * MOVE)
        tensors = ServedTensors(_Masters(shapes, path), "bfloat16")
        with Watched() as watched:
            announced.append(
                publisher.publish(tensors, VersionName(trainer_epoch=1, version=version), resumed=not version)
            )
        seconds.append(watched.seconds)
        memory.append(watched.most)
        path.unlink()
    return {"announced": announced, "seconds": seconds, "memory": memory[-1]}


def _apply(shapes: Mapping[str, tuple[int, int]], folder: str, announced: Sequence[WeightsAnnounced]) -> dict[str, Any]:
    follower = WeightsFollower(ObjectStore("file://.", base=Path(folder)), "bench")
    seconds, memory = [], []
    for one in announced:
        follower.announced(one)
        with Watched() as watched:
            tensors = follower.fetch(one)
        assert tensors.keys() == shapes.keys()
        seconds.append(watched.seconds)
        memory.append(watched.most)
    return {"seconds": seconds, "memory": memory[-1]}


def _read_safetensors(folder: str) -> float:
    """Return the processor's seconds to read all bytes of the full version by the safetensors library."""
    began, total = time.process_time(), 0
    (path,) = Path(folder).glob("versions/*.safetensors")
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            total += int(file.get_tensor(name).view(torch.int32).sum(dtype=torch.int32))
    return time.process_time() - began


def _num_bytes(shapes: Mapping[str, tuple[int, int]]) -> int:
    return 2 * sum(map(math.prod, shapes.values()))
