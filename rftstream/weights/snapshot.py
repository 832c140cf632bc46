"""Full snapshots: ordinary safetensors, written as a stream and read without a copy, and the digest of a state.

A safetensors file is 8 bytes (little-endian length of the header), the header (JSON: name -> dtype, shape,
data_offsets), and the tensors' bytes without gaps. Files of other programs are read, too, as strictly as the format
allows."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rftstream.errors import WeightsError

if TYPE_CHECKING:
    from typing_extensions import Buffer

ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""Safetensors' names of dtypes -> bytes of an element."""

DTYPES = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "int8": "I8",
    "uint8": "U8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "bool": "BOOL",
}
"""Names in torch, numpy and the run file -> safetensors' names."""

MAX_HEADER_BYTES = 100_000_000
"""Largest header in bytes, the limit of the safetensors library."""


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as bytes: little-endian, C order."""

    dtype: str
    """Safetensors' name: F32, BF16, F16, ..."""
    shape: tuple[int, ...]
    data: Buffer
    """Contiguous bytes, exactly as many as dtype and shape require."""

    @property
    def num_bytes(self) -> int:
        """Size of the data in bytes."""
        return memoryview(self.data).nbytes


@dataclass(frozen=True, slots=True)
class Master:
    """The float32 tensor from which a served tensor is rounded: to the nearest value, ties to even."""

    values: RawTensor
    """Values as F32. They are the owner's memory, valid until the owner changes them."""
    served: str
    """Dtype to which the values are rounded: BF16 or F16, or F32 for no rounding."""
    nan: int
    """Bits of every NaN after rounding to BF16. (Rounding to F16 keeps sign and payload.)"""


@runtime_checkable
class HasMasters(Protocol):
    """Tensors that are rounded when requested, and whose masters are available, too.

    `delta.take` requests masters and rounds them itself, so that no rounded copy is made:

        master = tensors.master("lm_head.weight")
        tensor = tensors["lm_head.weight"] if master is None else None
    """

    def master(self, name: str) -> Master | None:
        """Return the master of a tensor, without a copy; None if only the served tensor exists."""


Line = tuple[str, str, tuple[int, ...], str]
"""One tensor's part of a state's digest: name, dtype, shape, sha256 (hex) of its bytes."""


class Writable(Protocol):
    """A file, or an object that acts like one: `write_snapshot(io.BytesIO(), tensors)`."""

    def write(self, data: Any, /) -> Any:
        """Append bytes. `write_snapshot` calls it for the header and for each tensor, in order."""


def write_snapshot(
    file: Writable,
    tensors: Mapping[str, RawTensor],
    metadata: Mapping[str, str] | None = None,
    *,
    read: Callable[[str], RawTensor] | None = None,
) -> int:
    """Write a safetensors file, tensor by tensor, and return its length. The same state gives the same bytes.

    With `read`, each tensor comes from one call of that function when its turn has come; `tensors` then only gives the
    sizes."""
    head, order = _head(tensors, metadata or {})
    file.write(head)
    num_bytes = len(head)
    for name in order:
        view = data_view(tensors[name] if read is None else read(name))
        file.write(view)
        num_bytes += view.nbytes
    return num_bytes


def decode_snapshot(data: Buffer, *, where: str = "snapshot") -> dict[str, RawTensor]:
    """Return the tensors of a safetensors file as views into `data`, sorted by name. WeightsError for other data."""
    view = memoryview(data).cast("B")
    header, start = _read_header(view, where)
    body = view[start:]
    tensors: dict[str, RawTensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name in sorted(header):
        if name == "__metadata__":
            continue
        dtype, shape, begin, end = _check_entry(header[name], f"{where}: tensor {name!r}")
        expected = math.prod(shape) * ITEM_BYTES[dtype]
        if end - begin != expected:
            raise _damaged(f"{where}: tensor {name!r}", f"{end - begin} bytes", f"{expected} for {dtype} {list(shape)}")
        spans.append((begin, end, name))
        tensors[name] = RawTensor(dtype, shape, body[begin:end])
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            raise _damaged(f"{where}: tensor {name!r}", f"a start at byte {begin}", f"{position}, no gap or overlap")
        position = end
    if position != body.nbytes:
        raise _damaged(where, f"{body.nbytes} bytes of tensors", f"{position}")
    return tensors


def state_digest(tensors: Mapping[str, RawTensor]) -> str:
    """Return a state's digest in the form of announcements. Each tensor is requested once."""

    def lines() -> Iterator[Line]:
        for name in sorted(tensors):
            tensor = tensors[name]
            yield name, tensor.dtype, tensor.shape, hashlib.sha256(data_view(tensor)).hexdigest()

    return digest_of_lines(lines())


def digest_of_lines(lines: Iterable[Line]) -> str:
    """Return `sha256:<hex>` over the lines of a state's tensors, which must be sorted by name.

    A line is the JSON of [name, dtype, shape, sha256 of bytes]."""
    total = hashlib.sha256()
    for name, dtype, shape, digest in lines:
        total.update(json.dumps([name, dtype, list(shape), digest], separators=(",", ":")).encode() + b"\n")
    return f"sha256:{total.hexdigest()}"


def data_view(tensor: RawTensor) -> memoryview:
    """Return the tensor's bytes as a one-dimensional view."""
    view = memoryview(tensor.data)
    return view.cast("B") if view.nbytes else memoryview(b"")


def _head(tensors: Mapping[str, RawTensor], metadata: Mapping[str, str]) -> tuple[bytes, list[str]]:
    """Return length and header, and the order of the tensors: wide elements first, so that all tensors stay aligned."""
    for name, tensor in tensors.items():
        if tensor.dtype not in ITEM_BYTES:
            raise WeightsError(f"tensor {name!r}: dtype {tensor.dtype!r}, expected one of {', '.join(ITEM_BYTES)}")
        expected = math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
        if tensor.num_bytes != expected:
            raise _damaged(
                f"tensor {name!r}", f"{tensor.num_bytes} bytes", f"{expected} for {tensor.dtype} {list(tensor.shape)}"
            )
    order = sorted(tensors, key=lambda name: (-ITEM_BYTES[tensors[name].dtype], name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    for name, begin, end in _offsets(tensors, order):
        header[name] = {"dtype": tensors[name].dtype, "shape": list(tensors[name].shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


def _offsets(tensors: Mapping[str, RawTensor], order: list[str]) -> Iterator[tuple[str, int, int]]:
    position = 0
    for name in order:
        begin, position = position, position + tensors[name].num_bytes
        yield name, begin, position


def _read_header(view: memoryview, where: str) -> tuple[dict[str, Any], int]:
    if view.nbytes < 8:
        raise _damaged(where, f"{view.nbytes} bytes", "at least 8")
    length = int.from_bytes(view[:8], "little")
    if length > min(MAX_HEADER_BYTES, view.nbytes - 8):
        raise _damaged(where, f"a header of {length} bytes", f"at most {min(MAX_HEADER_BYTES, view.nbytes - 8)}")
    try:
        header = json.loads(bytes(view[8 : 8 + length]), object_pairs_hook=_without_twins)
    except (ValueError, RecursionError) as error:
        raise _damaged(where, f"a header that is not JSON ({error})", "safetensors") from None
    if not isinstance(header, dict):
        raise _damaged(where, f"a header that is a {type(header).__name__}", "an object")
    return header, 8 + length


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name stands twice")
    return result


def _check_entry(entry: Any, where: str) -> tuple[str, tuple[int, ...], int, int]:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _damaged(where, "other fields", "dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise _damaged(where, f"dtype {dtype!r}", f"one of {', '.join(ITEM_BYTES)}")
    if not _are_sizes(shape) or len(shape) > 64:
        raise _damaged(where, "a shape that is not a list of sizes", "such a list")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _damaged(where, f"data_offsets {offsets!r}", "[begin, end]")
    return dtype, tuple(shape), offsets[0], offsets[1]


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _damaged(where: str, found: str, expected: str) -> WeightsError:
    return WeightsError(f"{where}: found {found}, expected {expected}; the file is damaged or not a snapshot")
