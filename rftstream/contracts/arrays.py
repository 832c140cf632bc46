"""An n-dimensional array as it travels: dtype, shape, and little-endian bytes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from rftstream.contracts.rules import Violation, rule, show
from rftstream.contracts.structs import message_part

if TYPE_CHECKING:
    import numpy as np

    Octets = bytes | memoryview
else:
    # Elements are bytes or a view of bytes. In decoded messages they are views of the record's value, not copies.
    Octets = memoryview


MAX_RANK = 4
"""The most dimensions of an Array."""

ITEM_BYTES = {
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "uint16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}
"""dtype of an Array -> bytes of one element."""

_Length = Annotated[int, Meta(extra_json_schema={"minimum": 0})]
"""The rule of the array checks its range, so that an error names the whole shape."""

_ELEMENTS = {
    "oneOf": [{"$ref": "#/$defs/Binary"}, {"type": "array", "items": {"type": "number"}}],
    "x-msgpack": "bin",
    "x-json": "In the readable twins a flat list of the elements; bfloat16 as its uint16 bit patterns.",
}


@message_part(frozen=True, slots=True, kw_only=True)
class Array:
    """An n-dimensional array, little-endian, C order."""

    dtype: Annotated[str, Meta(extra_json_schema={"enum": list(ITEM_BYTES)})]
    """One of int8, uint8, uint16, int32, int64, float16, bfloat16, float32, float64, bool."""
    shape: Annotated[tuple[_Length, ...], Meta(extra_json_schema={"maxItems": MAX_RANK})]
    """Length of each dimension; at most 4 of them, () for a scalar."""
    data: Annotated[Octets, Meta(extra_json_schema=_ELEMENTS)]
    """The elements, little-endian, C order: product(shape) times the size of one element."""

    @staticmethod
    def of(values: Any, dtype: str) -> Array:
        """Make the array that holds `values` as `dtype`, one of the names that `dtype` lists."""
        import numpy as np

        array = np.ascontiguousarray(values, dtype=_wire_dtype(dtype))
        return Array(dtype=dtype, shape=tuple(array.shape), data=array.tobytes())

    def numpy(self) -> np.ndarray:
        """A read-only view of the bytes. bfloat16 comes as its uint16 bit patterns."""
        import numpy as np

        name = "uint16" if self.dtype == "bfloat16" else self.dtype
        return np.frombuffer(self.data, dtype=_wire_dtype(name)).reshape(self.shape)

    @property
    def num_ones(self) -> int:
        """Number of elements that are 1, of an array of bytes such as a mask."""
        import numpy as np

        data = self.data
        return bytes(data).count(1) if len(data) < _SHORT else int(np.count_nonzero(np.frombuffer(data, "u1") == 1))

    @property
    def is_mask(self) -> bool:
        """Whether all bytes are 0 or 1."""
        data = self.data
        if len(data) < _SHORT:
            return not bytes(data).translate(None, b"\0\1")
        import numpy as np

        return bool(np.frombuffer(data, "u1").max() <= 1)


_SHORT = 4096
"""Bytes below which numpy's calls take longer than they save."""


@functools.cache
def _wire_dtype(name: str) -> np.dtype[Any]:
    import numpy as np

    return np.dtype(name).newbyteorder("<")


@rule(Array)
def _check_array(array: Array) -> Violation | None:
    item_bytes = ITEM_BYTES.get(array.dtype)
    if item_bytes is None:
        return ".dtype", f"got {show(array.dtype)}, expected one of {', '.join(ITEM_BYTES)}"
    data = array.data
    if type(data) is not bytes and not (
        type(data) is memoryview and type(data.obj) is bytes and data.format == "B" and data.contiguous
    ):
        return ".data", f"got {type(data).__name__}, expected bytes"  # others may change afterwards
    num_bytes = item_bytes
    for length in array.shape:
        if length < 0:
            return ".shape", f"got the length {length}, expected none below 0"
        num_bytes *= length
    if len(array.shape) > MAX_RANK:
        return ".shape", f"got {len(array.shape)} dimensions, expected at most {MAX_RANK}"
    if num_bytes != len(data):
        return ".data", f"got {len(data)} bytes, expected {num_bytes} for {array.dtype} {list(array.shape)}"
    return None
