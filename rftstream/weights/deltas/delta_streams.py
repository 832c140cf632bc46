"""The boundaries of streams of changes.

The elements of all tensors of a dtype, tensor after tensor, are cut into spans. A stream has the changes of one
span."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rftstream.weights.deltas.kernels import FORMS

Forms = Mapping[str, tuple[str, tuple[int, ...]]]
"""Name -> dtype and shape, sorted by name."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a tensor's elements, as a range of its bytes."""

    tensor: str
    begin: int
    """First byte."""
    end: int
    """Byte after the last."""


@dataclass(frozen=True, slots=True)
class StreamSpan:
    """The elements whose changes are in one stream: pieces of tensors of one dtype."""

    dtype: str
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Size of all pieces in bytes."""
        return sum(piece.end - piece.begin for piece in self.pieces)

    @property
    def num_elements(self) -> int:
        """Number of elements of all pieces."""
        return self.num_bytes // FORMS[self.dtype].width


def cut(tensors: Forms, lengths: Iterator[tuple[str, int]]) -> Iterator[StreamSpan]:
    """Cut all elements of dtypes in FORMS into spans, one for each of `lengths` (dtype, number of elements).

    ValueError unless the lengths add up to all elements."""
    rest = iter([(name, dtype, math.prod(shape)) for name, (dtype, shape) in _taken_apart(tensors)])
    name, dtype, left, begin = "", "", 0, 0
    for wanted, length in lengths:
        pieces = []
        missing = length
        while missing:
            while not left:
                name, dtype, left = next(rest, ("", "", 0))
                begin = 0
                if not name:
                    raise ValueError("more elements in streams than in tensors")
            if dtype != wanted:
                raise ValueError(f"a stream of {wanted} goes on into {dtype}")
            count = min(left, missing)
            width = FORMS[dtype].width
            pieces.append(Piece(name, begin, begin + count * width))
            begin, left, missing = begin + count * width, left - count, missing - count
        yield StreamSpan(wanted, tuple(pieces))
    if left or any(count for _, _, count in rest):
        raise ValueError("fewer elements in streams than in tensors")


def lengths_of(tensors: Forms, most: int) -> Iterator[tuple[str, int]]:
    """Yield dtype and number of elements of the spans that this release writes: at most `most` elements, of one dtype
    each."""
    dtype, length = "", 0
    for _, (one, shape) in _taken_apart(tensors):
        if length and one != dtype:
            yield dtype, length
            length = 0
        dtype, length = one, length + math.prod(shape)
        while length >= most:
            yield dtype, most
            length -= most
    if length:
        yield dtype, length


def _taken_apart(tensors: Forms) -> list[tuple[str, tuple[str, tuple[int, ...]]]]:
    """Return the tensors whose elements are in streams, dtype by dtype, in order of names."""
    return [tensor for dtype in sorted(FORMS) for tensor in tensors.items() if tensor[1][0] == dtype]
