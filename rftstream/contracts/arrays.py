"""An n-dimensional array as it travels: dtype, shape, and little-endian bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    """An n-dimensional array, little-endian, C order."""

    dtype: str
    """One of int8, uint8, int32, int64, float16, bfloat16, float32, float64, bool."""
    shape: tuple[int, ...]
    """Length of each dimension; at most 4 of them, () for a scalar."""
    data: bytes
    """The elements, little-endian, C order: product(shape) times the size of one element."""

    @staticmethod
    def of(values: Any, dtype: str) -> Array:
        """Make the array that holds `values` as `dtype`, one of the names that `dtype` lists."""
        import numpy as np

        array = np.ascontiguousarray(values, dtype=np.dtype(dtype).newbyteorder("<"))
        return Array(dtype=dtype, shape=tuple(array.shape), data=array.tobytes())

    def numpy(self) -> np.ndarray:
        """A read-only view of the bytes. bfloat16 comes as its uint16 bit patterns."""
        import numpy as np

        name = "uint16" if self.dtype == "bfloat16" else self.dtype
        return np.frombuffer(self.data, dtype=np.dtype(name).newbyteorder("<")).reshape(self.shape)
