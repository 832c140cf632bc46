"""Rows on the device, as a micro-batch: padded, or packed one after another, or as trees.

Shapes: B rows, T tokens of the longest, N unmasked tokens of all; the network reads [B, T - 1] or, packed, [1, P].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rftstream.algorithms.base import MicroBatch, TrainingRow
from rftstream.contracts.beside import Beside, Columns, sources
from rftstream.contracts.tasks import Media
from rftstream.contracts.token_values import ALLOWED
from rftstream.core.allowed import written_in
from rftstream.core.packing import apart, grow, pad_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownImage:
    """One place in a micro-batch at which an image is shown."""

    row: int
    """Number of its row."""
    nodes: np.ndarray
    """Index in the flat `token_ids` of each token from its first placeholder to its last, int64."""
    token_ids: np.ndarray
    """These tokens, int64."""
    number: int
    """Index of the image among the micro-batch's images."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """A micro-batch on the device. `make_inputs` makes it; a network reads it."""

    token_ids: Tensor
    """int64 [B, T - 1] or [1, P]: the last token of a row predicts nothing and is left out."""
    position_ids: Tensor | None
    """Positions, int64 [1, P]; None for padded rows."""
    lengths: tuple[int, ...]
    """Number of tokens in each run that the network reads, without padding. A row is one run, unless rows are trees."""
    parents: tuple[int, ...]
    """The run that each run goes on from; `packing.ROOT` for the first of a tree."""
    sources_N: Tensor
    """For each unmasked token, the index in the flat `token_ids` at which it is predicted."""
    targets_N: Tensor
    """The unmasked tokens."""
    rows_N: Tensor
    places_N: Tensor
    temperatures_N: Tensor | None
    """Temperature of each unmasked token; None if all are 1."""
    rows: MicroBatch
    images: tuple[Media, ...] = ()
    """The images of all rows, each once."""
    shown: tuple[ShownImage, ...] = ()
    """Places of the images, in the order of the flat `token_ids`."""
    read: tuple[np.ndarray, ...] = ()
    """The tokens in each row that the network reads, without padding."""
    nodes: tuple[np.ndarray, ...] = ()
    """Index in the flat `token_ids` of each of these tokens."""
    beside: Columns = field(default_factory=dict)
    """Values that the sampler recorded in the pass over each token of the flat `token_ids`, without the sets."""
    sets_N: Sequence[bytes] | None = None
    """The set that each unmasked token was sampled from, as `encode_sets` wrote it; None if nothing was left out."""

    @property
    def num_asked(self) -> int:
        """Number of tokens in all rows, those that trees hold once counted in each row."""
        return sum(map(len, self.read))


def make_inputs(rows: Sequence[TrainingRow], device: torch.device, *, packed: bool, shared: bool = False) -> Inputs:
    """Put rows on the device, padded or packed one after another; `shared`: packed as trees. ValueError for a loss mask
    with other values than 0 and 1."""

    def on_device(array: np.ndarray, dtype: Any = np.int64) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype)).to(device)

    def padded(arrays: Sequence[np.ndarray]) -> Tensor:
        return on_device(pad_rows([np.asarray(array, np.float32) for array in arrays]), np.float32)

    mask_BT = pad_rows([np.asarray(row.loss_mask, np.float32) for row in rows])
    if not ((mask_BT == 0) | (mask_BT == 1)).all():
        raise ValueError("rows: a loss mask holds values that are neither 0 nor 1, expected 1 where a token counts")
    mask_BT[:, 0] = 0  # nothing comes before it
    rows_N, places_N = mask_BT.nonzero()
    lengths = [max(len(row.token_ids) - 1, 1) for row in rows]
    read = [np.asarray(row.token_ids[:length]) for row, length in zip(rows, lengths, strict=True)]
    forest = grow([key[:length] for key, length in zip(keys(rows), lengths, strict=True)]) if shared else apart(lengths)
    pieces, width = forest.pieces(), max(lengths)
    nodes = forest.nodes() if packed else [row * width + np.arange(one) for row, one in enumerate(lengths)]
    begins_B = np.cumsum(lengths) - lengths
    token_ids_BT = pad_rows([np.asarray(row.token_ids, np.int64) for row in rows])
    temperatures_B = np.asarray([row.temperature for row in rows], np.float32)
    images, shown = _images_in(rows, nodes)
    return Inputs(
        token_ids=on_device(
            np.concatenate([read[row][start:stop] for row, start, stop in pieces])[None] if packed else pad_rows(read)
        ),
        position_ids=on_device(forest.positions()[None]) if packed else None,
        lengths=tuple(forest.lengths_S.tolist()),
        parents=tuple(forest.parents_S.tolist()),
        sources_N=on_device(np.concatenate(nodes)[begins_B[rows_N] + places_N - 1]),
        targets_N=on_device(token_ids_BT[rows_N, places_N]),
        rows_N=on_device(rows_N),
        places_N=on_device(places_N),
        temperatures_N=None if (temperatures_B == 1).all() else on_device(temperatures_B[rows_N], np.float32),
        rows=MicroBatch(
            loss_mask_BT=on_device(mask_BT, np.float32),
            behavior_logprobs_BT=padded([row.behavior_logprobs for row in rows]),
            advantages_BT=padded([row.advantages for row in rows]),
            additions={
                name: padded([row.additions[name] for row in rows])
                for name in rows[0].additions
                if all(name in row.additions for row in rows)
            },
        ),
        images=images,
        shown=shown,
        read=tuple(read),
        nodes=tuple(nodes),
        beside=sources([(len(row.token_ids), _without_sets(row)) for row in rows], pieces, None if packed else width),
        sets_N=_sets_of(rows, mask_BT),
    )


def keys(rows: Sequence[TrainingRow]) -> list[np.ndarray]:
    """Return what makes tokens of rows equal, for `packing.grow`: the token, the image that it is a part of, and what
    the sampler recorded in the pass over it. Then rows that begin alike have the same states there."""
    numbers: dict[tuple[str, int], int] = {}
    has_images = any(row.images for row in rows)
    names = sorted({name for row in rows for name in _without_sets(row)})
    if not has_images and not names:
        return [np.asarray(row.token_ids, np.int32)[:, None] for row in rows]
    found = []
    for row in rows:
        token_ids_T = np.asarray(row.token_ids, np.int32)
        columns = [token_ids_T]
        if has_images:
            columns.append(np.zeros_like(token_ids_T))
            for span in row.images:
                number = numbers.setdefault((span.image.digest, span.count), len(numbers) + 1)
                columns[-1][span.start : span.start + span.count] = number
        for name in names:
            prints_T = np.zeros(len(token_ids_T), np.uint64)
            if name in row.beside:
                prints_T[:-1] = fingerprints(row.beside[name])[1:]
            columns += prints_T.view(np.int32).reshape(-1, 2).T
        found.append(np.stack(columns, axis=1))
    return found


def fingerprints(column: Beside) -> np.ndarray:
    """Return a number for each token, uint64 [T]: 0 for one without values, and the same for the same values. Those of
    two tokens with other values are equal once in 2^64 times."""
    ends_T, counts_T = np.cumsum(column.counts_T), column.counts_T
    places_V = np.arange(len(column.values)) - np.repeat(ends_T - counts_T, counts_T)
    factors = 2 * np.random.default_rng(0).integers(1 << 63, size=int(counts_T.max(initial=0)), dtype=np.uint64) + 1
    terms_V = (column.values.astype(np.uint64) + np.uint64(1)) * factors[places_V]
    sums_V = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms_V, dtype=np.uint64)])
    prints_T: np.ndarray = sums_V[ends_T] - sums_V[ends_T - counts_T]
    return prints_T


def _without_sets(row: TrainingRow) -> Columns:
    return {name: column for name, column in row.beside.items() if name != ALLOWED}


def _sets_of(rows: Sequence[TrainingRow], mask_BT: np.ndarray) -> list[bytes] | None:
    """Return the set of each unmasked token, row by row; None if nothing was left out."""
    if not any(ALLOWED in row.beside for row in rows):
        return None
    found: list[bytes] = []
    for row, mask_T in zip(rows, mask_BT, strict=True):
        places = np.flatnonzero(mask_T)
        found += written_in(row.beside, places) or [b""] * len(places)
    return found


def _images_in(
    rows: Sequence[TrainingRow], nodes: Sequence[np.ndarray]
) -> tuple[tuple[Media, ...], tuple[ShownImage, ...]]:
    """Return the images of all rows, each once, and their places. nodes: index of each row's tokens."""
    images = {span.image.digest: span.image for row in rows for span in row.images}
    numbers = {digest: number for number, digest in enumerate(images)}
    shown = (
        ShownImage(
            row=number,
            nodes=nodes[number][span.start : span.start + span.count],
            token_ids=np.asarray(row.token_ids[span.start : span.start + span.count], np.int64),
            number=numbers[span.image.digest],
        )
        for number, row in enumerate(rows)
        for span in row.images
    )
    return tuple(images.values()), tuple(shown)
