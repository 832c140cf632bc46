"""Where streams of changes begin and end: the elements of all tensors of a dtype, one after another, cut into lanes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rftstream.weights.kernels import FORMS

Forms = Mapping[str, tuple[str, tuple[int, ...]]]
"""Name -> dtype and shape, sorted by name."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of one tensor's elements."""

    tensor: str
    begin: int
    """Bytes."""
    end: int


@dataclass(frozen=True, slots=True)
class Lane:
    """What one stream is about."""

    dtype: str
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        return sum(piece.end - piece.begin for piece in self.pieces)

    @property
    def num_elements(self) -> int:
        return self.num_bytes // FORMS[self.dtype].width


def cut(tensors: Forms, lengths: Iterator[tuple[str, int]]) -> Iterator[Lane]:
    """Cuts all elements that are taken apart into lanes: for each of `lengths` (dtype, elements) the pieces of it.
    ValueError if they do not come out even."""
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
        yield Lane(wanted, tuple(pieces))
    if left or any(count for _, _, count in rest):
        raise ValueError("fewer elements in streams than in tensors")


def lengths_of(tensors: Forms, most: int) -> Iterator[tuple[str, int]]:
    """Of the lanes that we write: of `most` elements, each of one dtype."""
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
    """The tensors whose elements are in streams: dtype by dtype, in order of names."""
    return [one for dtype in sorted(FORMS) for one in tensors.items() if one[1][0] == dtype]
