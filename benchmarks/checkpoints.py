"""A checkpoint as large as that of SmolLM2-135M with AdamW: for how long training waits, and when it is there.

Training waits while the state is saved to a temporary folder; digests and the way into the store, a folder here, are
beside training. The reference is the whole of it in one piece, and a bare write of as many bytes with fsync.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rftstream.contracts.versions import VersionName
from rftstream.weights.checkpoints import CheckpointStore
from rftstream.weights.snapshot import RawTensor, data_view
from rftstream.weights.stores.store import ObjectStore
from rftstream.weights.tensors import raw, write_tensors

NUM_TENSORS, NUM_ELEMENTS = 272, 134_515_008
TRIES = 3


def run() -> list[dict[str, Any]]:
    import torch

    generator = torch.Generator().manual_seed(0)
    shape = (NUM_ELEMENTS // NUM_TENSORS,)
    parameters = {f"p{number}": raw(torch.randn(shape, generator=generator)) for number in range(NUM_TENSORS)}
    moments = {f"{name}.{kind}": tensor for name, tensor in parameters.items() for kind in ("first", "second")}

    def save(folder: Path) -> None:
        write_tensors(folder / "masters.safetensors", parameters)
        write_tensors(folder / "optimizer.safetensors", moments)

    waits, whole, bare = [], [], []
    with tempfile.TemporaryDirectory(prefix="rftstream-bench-") as folder:
        checkpoints = CheckpointStore(ObjectStore("file://weights", base=Path(folder)))
        for version in range(TRIES):
            name = VersionName(trainer_epoch=1, version=version)
            began = time.perf_counter()
            staged = checkpoints.stage(save)
            waits.append(time.perf_counter() - began)
            checkpoints.write_staged(name, staged, {})
            whole.append(time.perf_counter() - began)
            staged.drop()
            checkpoints.delete(name)
            bare.append(_bare_write(Path(folder) / "bare", [*parameters.values(), *moments.values()]))
    waits_s, whole_s, bare_s = map(statistics.median, (waits, whole, bare))
    what = f"{3 * 4 * NUM_ELEMENTS / 1e9:.1f} GB"
    return [
        _row(f"{what}: training waits", waits_s, whole_s, "the whole of it"),
        _row(f"{what}: until it is there", whole_s, bare_s, "bare write with fsync"),
    ]


def _bare_write(path: Path, tensors: list[RawTensor]) -> float:
    began = time.perf_counter()
    with open(path, "wb") as file:
        for tensor in tensors:
            file.write(data_view(tensor))
        file.flush()
        os.fsync(file.fileno())
    took_s = time.perf_counter() - began
    path.unlink()
    return took_s


def _row(name: str, ours: float, reference: float, which: str) -> dict[str, Any]:
    return {
        "name": f"checkpoints: {name}",
        "unit": "s",
        "ours": ours,
        "reference": reference,
        "reference_name": which,
        "ratio": reference / ours,
    }
