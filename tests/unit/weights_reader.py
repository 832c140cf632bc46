"""A reader of deltas in plain Python, written from docs/weights-format.md and sharing nothing with rftstream's own.

Slow; it is there to hold the document to its word.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from typing import Any

import numpy as np
import zstandard

WIDTH_AND_MANTISSA = {"BF16": (2, 7), "F16": (2, 10), "F32": (4, 23)}

Tensors = dict[str, tuple[str, list[int], bytes]]
"""Name -> dtype, shape, bytes."""


def digest_of(tensors: Tensors) -> str:
    total = hashlib.sha256()
    for name in sorted(tensors):
        dtype, shape, data = tensors[name]
        line = json.dumps([name, dtype, shape, hashlib.sha256(data).hexdigest()], separators=(",", ":"))
        total.update(line.encode() + b"\n")
    return "sha256:" + total.hexdigest()


def apply_delta(tensors: Tensors, delta: bytes) -> Tensors:
    """The next state; the header's digests are compared on the way."""
    assert delta[:8] == b"RFTDELTA"
    assert int.from_bytes(delta[8:12], "little") == 1
    start = 16 + int.from_bytes(delta[12:16], "little")
    header = json.loads(zstandard.decompress(delta[16:start]))
    assert header["old"] == digest_of(tensors)
    made, streams = dict(tensors), []
    for dtype, elements, tensor, num_bytes in header["parts"]:
        part, start = delta[start : start + num_bytes], start + num_bytes
        if tensor is not None:
            made[tensor] = (dtype, tensors[tensor][1], zstandard.decompress(part))
        else:
            streams.append((dtype, elements, part))
    assert start == len(delta)
    runs = {dtype: _run(header, made, dtype) for dtype in WIDTH_AND_MANTISSA}
    done: dict[str, list[int]] = defaultdict(list)
    for dtype, elements, part in streams:
        begin = len(done[dtype])
        done[dtype] += Stream(part, *WIDTH_AND_MANTISSA[dtype]).apply(runs[dtype][begin : begin + elements])
    for dtype, values in done.items():
        assert len(values) == len(runs[dtype])
        position = 0
        for name, its_dtype, shape, *_ in header["tensors"]:
            if its_dtype == dtype:
                count = len(tensors[name][2]) // WIDTH_AND_MANTISSA[dtype][0]
                data = np.array(values[position : position + count], f"<u{WIDTH_AND_MANTISSA[dtype][0]}").tobytes()
                made[name] = (dtype, shape, data)
                position += count
    for name, _, _, old, new in header["tensors"]:
        assert hashlib.sha256(tensors[name][2]).hexdigest()[:16] == old
        assert hashlib.sha256(made[name][2]).hexdigest()[:16] == new
    assert header["new"] == digest_of(made)
    return made


def _run(header: dict[str, Any], tensors: Tensors, dtype: str) -> list[int]:
    """All elements of a dtype, one tensor after another."""
    width = WIDTH_AND_MANTISSA[dtype][0]
    datas = [tensors[name][2] for name, its_dtype, *_ in header["tensors"] if its_dtype == dtype]
    return [one for data in datas for one in np.frombuffer(data, f"<u{width}").tolist()]


class Stream:
    def __init__(self, data: bytes, width: int, mantissa: int) -> None:
        self.data, self.place = data, 5
        self.range, self.code = 2**32 - 1, int.from_bytes(data[:5], "big")
        self.sign, self.mantissa = 1 << (8 * width - 1), mantissa
        self.contexts: dict[Any, tuple[int, int]] = {}
        assert data[0] == 0

    def apply(self, old: list[int]) -> list[int]:
        left: dict[int, float] = {}
        h: dict[int, int] = defaultdict(int)
        new = []
        for x in old:
            c = (x & (self.sign - 1)) >> self.mantissa
            if c not in left:
                left[c] = self.gap(c)
            if left[c] > 0:
                left[c] -= 1
                new.append(x)
                continue
            flip = self.bit((c, "flip"))
            down = self.bit((c, "down", flip, h[c]))
            h[c] = (2 * h[c] + down) % 4
            size = self.number((c, "size", flip)) - flip
            magnitude = (x % self.sign + (-size if down else size)) % self.sign
            new.append(magnitude + ((x // self.sign + flip) % 2) * self.sign)
            left[c] = self.gap(c)
        assert self.place == len(self.data)
        assert self.code == 0
        assert all(one == float("inf") for one in left.values())
        return new

    def gap(self, c: int) -> float:
        context = (c, "gap")
        length = self.length(context)
        return float("inf") if length == 31 else self.rest(context, length) - 1

    def number(self, context: Any) -> int:
        return self.rest(context, self.length(context))

    def length(self, context: Any) -> int:
        bits = ""
        for _ in range(5):
            bits += str(self.bit((context, "length", bits)))
        return int(bits, 2)

    def rest(self, context: Any, length: int) -> int:
        bits = ""
        for place in range(length):
            bits += str(self.bit((context, length, bits)) if place < 2 else self.even())
        return int("1" + bits, 2)

    def bit(self, context: Any) -> int:
        one, seen = self.contexts.get(context, (32768, 0))
        bound = (self.range >> 15) * min(max(one >> 1, 16), 32752)
        if self.code < bound:
            value, self.range = 1, bound
        else:
            value, self.code, self.range = 0, self.code - bound, self.range - bound
        one += (((65535 if value else 0) - one) * (131072 // (2 * seen + 3))) >> 16
        self.contexts[context] = (one, min(seen + 1, 255))
        self.fill()
        return value

    def even(self) -> int:
        self.range >>= 1
        value = int(self.code >= self.range)
        self.code -= value * self.range
        self.fill()
        return value

    def fill(self) -> None:
        while self.range < 1 << 24:
            self.range <<= 8
            self.code = (self.code << 8) | self.data[self.place]
            self.place += 1
