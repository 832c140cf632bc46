"""Rows on the device, as a micro-batch: padded, or packed one after another.

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
from rftstream.contracts.beside import Columns, sources
from rftstream.contracts.tasks import Media
from rftstream.core.packing import pad_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownImage:
    """One place in a micro-batch at which an image is shown."""

    row: int
    """Number of its row."""
    start: int
    """Index of its first placeholder in the flat `token_ids`."""
    token_ids: np.ndarray
    """The tokens from its first placeholder to its last, int64."""
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
    """Number of tokens in each row that the network reads."""
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
    begins: tuple[int, ...] = ()
    """Index of each row's first token in the flat `token_ids`."""
    beside: Columns = field(default_factory=dict)
    """Values that the sampler recorded in the pass over each token of the flat `token_ids`."""


def make_inputs(rows: Sequence[TrainingRow], device: torch.device, *, packed: bool) -> Inputs:
    """Put rows on the device, padded or packed one after another. ValueError for a loss mask with other values than
    0 and 1."""

    def on_device(array: np.ndarray, dtype: Any = np.int64) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype)).to(device)

    def padded(arrays: Sequence[np.ndarray]) -> Tensor:
        return on_device(pad_rows([np.asarray(array, np.float32) for array in arrays]), np.float32)

    mask_BT = pad_rows([np.asarray(row.loss_mask, np.float32) for row in rows])
    if not ((mask_BT == 0) | (mask_BT == 1)).all():
        raise ValueError("rows: a loss mask holds values that are neither 0 nor 1, expected 1 where a token counts")
    mask_BT[:, 0] = 0  # nothing comes before it
    rows_N, places_N = mask_BT.nonzero()
    lengths_B = np.asarray([max(len(row.token_ids) - 1, 1) for row in rows])
    read = [np.asarray(row.token_ids[:length]) for row, length in zip(rows, lengths_B, strict=True)]
    begins_B = np.cumsum(lengths_B) - lengths_B if packed else np.arange(len(rows)) * lengths_B.max()
    token_ids_BT = pad_rows([np.asarray(row.token_ids, np.int64) for row in rows])
    temperatures_B = np.asarray([row.temperature for row in rows], np.float32)
    images, shown = _images_in(rows, begins_B)
    return Inputs(
        token_ids=on_device(np.concatenate(read)[None] if packed else pad_rows(read)),
        position_ids=on_device(np.concatenate([np.arange(one) for one in lengths_B])[None]) if packed else None,
        lengths=tuple(lengths_B.tolist()),
        sources_N=on_device(begins_B[rows_N] + places_N - 1),
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
        begins=tuple(begins_B.tolist()),
        beside=sources(
            [(len(row.token_ids), row.beside) for row in rows],
            lengths_B.tolist(),
            None if packed else int(lengths_B.max()),
        ),
    )


def _images_in(rows: Sequence[TrainingRow], begins_B: np.ndarray) -> tuple[tuple[Media, ...], tuple[ShownImage, ...]]:
    """Return the images of all rows, each once, and their places. begins_B: index of each row's first token."""
    images = {span.image.digest: span.image for row in rows for span in row.images}
    numbers = {digest: number for number, digest in enumerate(images)}
    shown = (
        ShownImage(
            row=number,
            start=int(begins_B[number]) + span.start,
            token_ids=np.asarray(row.token_ids[span.start : span.start + span.count], np.int64),
            number=numbers[span.image.digest],
        )
        for number, row in enumerate(rows)
        for span in row.images
    )
    return tuple(images.values()), tuple(shown)
