"""Track the finished records of a partition, which finish in any order, and encode them in commits.

The committed position is the low-water offset: everything below it is finished. Its metadata tells which records above
it are finished, as run lengths in base 36, alternately open and finished. `3,5,1,2` means: from the low-water offset on
three open, five finished, one open, two finished, and everything above open. Offsets that are never delivered
(transaction markers, compacted records) count as finished. The metadata is never empty (`0`: none open, none finished),
so a position without metadata was set by somebody else (owned_partitions.py)."""

from __future__ import annotations

import string
from collections.abc import Sequence

from rftstream.errors import ContractError
from rftstream.transport.base import MAX_METADATA_BYTES, Position

NOTHING = "0"
"""The metadata of a position above which nothing is finished."""

RESERVED_BYTES = 1024
"""Bytes of the metadata that only the result with the lowest open offset may use. Its other offsets, in a result of
several, lie far apart at worst, and each of them takes up to eight bytes."""

_DIGITS = string.digits + string.ascii_lowercase


class PartitionTracker:
    """Knows which records of a partition are open and which are finished.

    OwnedPartitions makes one for each assignment of a partition. It calls `deliver` for each record. For each commit it
    calls `position_after`, then `committed`."""

    def __init__(self, committed: Position) -> None:
        self.position = committed
        """The position that was committed last."""
        self._open: dict[int, None] = {}
        """Offsets that were delivered and are not yet committed as finished, in order."""
        self._finished = decode_finished(committed)
        """Finished offsets above the low-water offset. At first these are the ones that predecessors finished."""

    @property
    def low_water(self) -> int:
        """The committed offset: everything below it is finished."""
        return self.position.offset

    def deliver(self, offset: int) -> bool:
        """Note a delivered record. Return whether it still has to be processed."""
        if offset < self.low_water or offset in self._finished:
            return False
        self._open[offset] = None
        return True

    @property
    def num_open(self) -> int:
        """Number of records that were delivered and are not yet committed as finished."""
        return len(self._open)

    def position_after(
        self, results: Sequence[tuple[int, ...]], next_offset: int
    ) -> tuple[Position, list[tuple[int, ...]]]:
        """Return the position to commit when these results are finished, and the results for which the metadata has no
        room. The latter are the highest ones, and must be held back. A result has one open offset, or several that are
        finished together. `next_offset` is the member's delivery position."""
        taken = sorted(results)
        position = self._position(taken, next_offset)
        if len(position.metadata) <= MAX_METADATA_BYTES - RESERVED_BYTES:
            return position, []
        fits, too_many = int(bool(taken) and taken[0][0] == next(iter(self._open))), len(taken)
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if len(self._position(taken[:middle], next_offset).metadata) <= MAX_METADATA_BYTES - RESERVED_BYTES:
                fits = middle
            else:
                too_many = middle
        return self._position(taken[:fits], next_offset), taken[fits:]

    def _position(self, taken: Sequence[tuple[int, ...]], next_offset: int) -> Position:
        finished = self._finished.union(*taken)
        still_open = [offset for offset in self._open if offset not in finished]
        return encode_position(still_open, finished, max(next_offset, self.low_water))

    def committed(self, position: Position, offsets: list[int]) -> None:
        """Record that the position was committed, with these offsets finished."""
        for offset in offsets:
            self._open.pop(offset, None)
        self.position = position
        self._finished.update(offsets)
        self._finished = {offset for offset in self._finished if offset >= position.offset}


def encode_position(still_open: list[int], finished: set[int], next_offset: int) -> Position:
    """Return low-water offset and metadata for these open offsets, finished offsets and delivery position.

    Below `next_offset`, everything that is not open is finished or was never a record. From `next_offset` on, only the
    offsets that a predecessor finished are finished."""
    end = max(max(finished, default=-1) + 1, next_offset)
    ordered = sorted(still_open) + [offset for offset in range(next_offset, end) if offset not in finished]
    if not ordered:
        return Position(end, NOTHING)
    lengths: list[int] = []
    run_start = expected = ordered[0]
    for offset in ordered:
        if offset > expected:
            lengths += [expected - run_start, offset - expected]
            run_start = offset
        expected = offset + 1
    if end > expected:
        lengths += [expected - run_start, end - expected]
    return Position(ordered[0], ",".join(map(_base36, lengths)) or NOTHING)


def decode_finished(position: Position) -> set[int]:
    """Return the offsets at or above the low-water offset that are finished according to the metadata. ContractError if
    the metadata is not of this form."""
    finished: set[int] = set()
    if not position.metadata:
        return finished
    offset = position.offset
    try:
        for index, length in enumerate(int(text, 36) for text in position.metadata.split(",")):
            if length < 0 or length > 1 << 32:
                raise ValueError(length)
            if index % 2:
                finished.update(range(offset, offset + length))
            offset += length
    except ValueError:
        raise ContractError(
            f"position metadata: got {position.metadata[:40]!r}, expected run lengths in base 36; "
            "another program may have committed for this group"
        ) from None
    return finished


def _base36(number: int) -> str:
    digits = ""
    while True:
        number, rest = divmod(number, 36)
        digits = _DIGITS[rest] + digits
        if not number:
            return digits
