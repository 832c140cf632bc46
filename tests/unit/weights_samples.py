"""The sample of a delta in schemas/weights: `python -m tests.unit.weights_samples` writes what is not there yet.

What is there is never written again: it stands for what lies in somebody's store.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rftstream.contracts.versions import VersionName
from rftstream.weights.deltas import delta
from rftstream.weights.snapshot import RawTensor, write_snapshot
from rftstream.weights.state import ServedState

FOLDER = Path(__file__).parents[2] / "schemas" / "weights"
OLD, NEW, DELTA = (FOLDER / f"sample.{one}" for one in ("old.safetensors", "new.safetensors", "v1.delta"))
NAME, PARENT = VersionName(trainer_epoch=2, version=57), VersionName(trainer_epoch=2, version=56)

ODD = {
    "BF16": [0x0000, 0x8000, 0x0001, 0x8001, 0x7F80, 0xFF80, 0x7FC0, 0x7FA5, 0xFFFF, 0x7F7F, 0x0080, 0x3F80],
    "F16": [0x0000, 0x8000, 0x0001, 0x83FF, 0x7C00, 0xFC00, 0x7E00, 0x7D55, 0xFFFF, 0x7BFF, 0x0400, 0x3C00],
    "F32": [0, 0x80000000, 1, 0x807FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7FA55AA5, 0xFFFFFFFF, 0x7F7FFFFF],
}
"""Zeros of both signs, denormals, infinities, NaNs with payloads, the largest and the smallest."""


def encode_snapshot(tensors: Mapping[str, RawTensor], metadata: Mapping[str, str] | None = None) -> bytes:
    buffer = io.BytesIO()
    write_snapshot(buffer, tensors, metadata)
    return buffer.getvalue()


def sample_states() -> tuple[dict[str, RawTensor], dict[str, RawTensor]]:
    chance = np.random.Generator(np.random.Philox(7))
    old, new = {}, {}
    shapes = {"a.weight": ("BF16", (40, 50)), "b.weight": ("BF16", (30, 20)), "c.weight": ("F16", (300,)),
              "d.weight": ("F32", (20, 20)), "e.empty": ("BF16", (0, 4))}  # fmt: skip
    for name, (dtype, shape) in shapes.items():
        width = 4 if dtype == "F32" else 2
        count = int(np.prod(shape))
        values = (chance.standard_normal(count) * 0.02).astype("<f4")
        bits = {"BF16": lambda v: (v.view("<u4") >> 16).astype("<u2"), "F16": lambda v: v.astype("<f2").view("<u2"),
                "F32": lambda v: v.view("<u4")}[dtype](values)  # fmt: skip
        odd = np.array(ODD[dtype], f"<u{width}")
        bits[: len(odd)] = odd[:count]
        changed = bits.copy()
        places = chance.random(count) < 0.05
        changed[places] += chance.choice([1, 2, 2**16 - 1], size=count)[places].astype(f"<u{width}")
        changed[: len(odd)] = np.roll(odd, 1)[:count]
        changed[5 : len(odd)] = odd[5:][: max(count - 5, 0)]
        old[name], new[name] = RawTensor(dtype, shape, bits.tobytes()), RawTensor(dtype, shape, changed.tobytes())
    old["f.steps"] = RawTensor("I64", (2,), np.array([56, 9], "<i8").tobytes())
    new["f.steps"] = RawTensor("I64", (2,), np.array([57, 9], "<i8").tobytes())
    old["g.mask"] = new["g.mask"] = RawTensor("BOOL", (3,), b"\1\0\1")
    old["h.scale"] = new["h.scale"] = RawTensor("F32", (), np.array(0.5, "<f4").tobytes())
    return old, new


def sample_delta() -> bytes:
    old, new = sample_states()
    state = ServedState(old, copy=True)
    changes = delta.take(state, new, span_elements=1000)
    assert changes.parts is not None
    head = delta.head_of(changes, [part for part, _ in changes.parts], state, model="sample", name=NAME, parent=PARENT)
    return b"".join([head, *(bytes(part) for _, part in changes.parts)])


if __name__ == "__main__":
    old, new = map(encode_snapshot, sample_states())
    for path, data in ((OLD, old), (NEW, new), (DELTA, sample_delta())):
        if not path.exists():
            path.write_bytes(data)
            print(f"wrote {path.name}")
