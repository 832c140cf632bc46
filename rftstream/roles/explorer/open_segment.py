"""A growing segment: tokens that are shown or sampled, with all that stands beside them."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rftstream.contracts.arrays import Array
from rftstream.contracts.beside import (
    Beside,
    Columns,
    columns_of,
    cut_columns,
    fill_columns,
    join_columns,
    wire_columns,
)
from rftstream.contracts.rollouts import ImageSpan, Segment, VersionSpan
from rftstream.policies.base import Completion


@dataclass(slots=True)
class OpenSegment:
    """A growing segment. Its rollout calls `prompt` and `sampled` in turns, and `close` at the end. A token takes 9
    bytes, and what stands beside it."""

    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    mask: array[int] = field(default_factory=lambda: array("B"))
    versions: list[VersionSpan] = field(default_factory=list)
    images: list[ImageSpan] = field(default_factory=list)
    beside: dict[str, Beside] = field(default_factory=dict)
    role: str = ""
    """Role of all its sampled tokens, in an episode of several agents."""

    @staticmethod
    def of(segment: Segment) -> OpenSegment:
        """Return an open segment that begins with the tokens of a closed one."""
        opened = OpenSegment(role=segment.role)
        opened.extend(segment)
        return opened

    def prompt(self, token_ids: Sequence[int], images: Sequence[ImageSpan] = ()) -> None:
        """Add tokens that were not sampled. `images` are the spans of images in them."""
        self._show(images, len(self.token_ids))
        self._place({}, len(token_ids))
        self.token_ids.extend(token_ids)
        self.logprobs.frombytes(bytes(4 * len(token_ids)))
        self.mask.frombytes(bytes(len(token_ids)))

    def sampled(self, completion: Completion) -> None:
        """Add tokens that the policy sampled. Values beside earlier tokens stay those of the pass that sampled them."""
        start = len(self.token_ids)
        self._place({}, len(completion.token_ids))
        self.token_ids.frombytes(_bytes_of(completion.token_ids, np.int32))
        self.logprobs.frombytes(_bytes_of(completion.behavior_logprobs, np.float32))
        self.mask.frombytes(b"\x01" * len(completion.token_ids))
        self._stamp(completion.versions, start)
        self.fill(completion.beside)

    def fill(self, columns: Columns) -> None:
        """Add values beside the last tokens, for those without any."""
        self.beside = fill_columns(self.beside, len(self.token_ids), columns)

    def append(self, added: OpenSegment) -> None:
        """Add the tokens of a segment that continues this one."""
        start = len(self.token_ids)
        self._show(added.images, start)
        self._place(added.beside, len(added.token_ids))
        self.token_ids.extend(added.token_ids)
        self.logprobs.extend(added.logprobs)
        self.mask.extend(added.mask)
        self._stamp(added.versions, start)

    def extend(self, segment: Segment) -> None:
        """Add a later saved part of the segment."""
        start = len(self.token_ids)
        self._show(segment.images, start)
        self._place(columns_of(segment.beside), len(segment.loss_mask.data))
        self.token_ids.frombytes(_bytes_of(segment.token_ids.numpy(), np.int32))
        self.logprobs.frombytes(_bytes_of(segment.behavior_logprobs.numpy(), np.float32))
        self.mask.frombytes(segment.loss_mask.data)
        self._stamp(segment.versions, start)

    def num_sampled(self, start: int = 0) -> int:
        """Return the number of sampled tokens from position `start` on."""
        return int(np.count_nonzero(np.frombuffer(self.mask, np.uint8)[start:]))

    def num_bare(self) -> int:
        """Return the number of the last tokens without values beside them."""
        ends = [int(np.max(np.flatnonzero(column.counts_T), initial=-1)) + 1 for column in self.beside.values()]
        return len(self.token_ids) - max(ends, default=0)

    def _show(self, spans: Sequence[ImageSpan], start: int) -> None:
        self.images.extend(replace(span, start=start + span.start) for span in spans)

    def _place(self, columns: Columns, count: int) -> None:
        if self.beside or columns:
            self.beside = join_columns([(len(self.token_ids), self.beside), (count, columns)])

    def _stamp(self, spans: Sequence[VersionSpan], start: int) -> None:
        for span in spans:
            first, count = start + span.start, span.count
            last = self.versions[-1] if self.versions else None
            if (
                last is not None
                and last.start + last.count == first
                and (last.trainer_epoch, last.version) == (span.trainer_epoch, span.version)
            ):
                first, count = last.start, last.count + count
                self.versions.pop()
            self.versions.append(
                VersionSpan(start=first, count=count, trainer_epoch=span.trainer_epoch, version=span.version)
            )

    def from_token(self, start: int) -> OpenSegment:
        """Return the tokens from position `start` on, as a segment of its own."""
        return OpenSegment(
            self.token_ids[start:],
            self.logprobs[start:],
            self.mask[start:],
            [
                VersionSpan(
                    start=max(span.start - start, 0),
                    count=min(span.count, span.start + span.count - start),
                    trainer_epoch=span.trainer_epoch,
                    version=span.version,
                )
                for span in self.versions
                if span.start + span.count > start
            ],
            [replace(span, start=span.start - start) for span in self.images if span.start >= start],
            cut_columns(self.beside, start),
            self.role,
        )

    def close(self) -> Segment:
        """Return the segment in the form of a rollout record."""
        return Segment(
            token_ids=_wire(self.token_ids, "int32"),
            behavior_logprobs=_wire(self.logprobs, "float32"),
            loss_mask=_wire(self.mask, "uint8"),
            versions=tuple(self.versions),
            images=tuple(self.images),
            beside=wire_columns(self.beside),
            role=self.role,
        )


def _wire(values: array[Any], dtype: str) -> Array:
    """Return an array of this machine's numbers as it travels."""
    if sys.byteorder == "little":
        return Array(dtype=dtype, shape=(len(values),), data=values.tobytes())
    return Array.of(values, dtype)


def _bytes_of(values: np.ndarray, dtype: type[np.generic]) -> memoryview:
    """Return the bytes of values in this machine's form of a dtype, without a copy where they have it."""
    return np.ascontiguousarray(values, dtype).data.cast("B")
