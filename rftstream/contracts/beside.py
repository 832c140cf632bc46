"""Values beside tokens: any number of them for each token of a row, without a loop over tokens.

A sampler records them and the trainer needs them: the experts that a token took, the tokens that could be sampled. All
of them belong to the pass that led to a token. So the values beside token t are known as soon as token t is, and the
first token of a row has none.

Shapes: T tokens, R runs of tokens with equally many values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rftstream.contracts.arrays import Array
from rftstream.contracts.token_values import TokenValues


@dataclass(frozen=True, slots=True, eq=False)
class Beside:
    """Values of one kind beside the tokens of a row. Token t has the next `counts_T[t]` of `values`."""

    counts_T: np.ndarray
    """Number of values of each token, int32 [T]; 0 for a token without any."""
    values: np.ndarray
    """The values of all tokens, in order."""

    def __post_init__(self) -> None:
        if self.counts_T.ndim != 1 or self.values.ndim != 1 or self.counts_T.sum() != len(self.values):
            raise ValueError(
                f"values beside tokens: got counts {list(self.counts_T.shape)} that add up to {self.counts_T.sum()}, "
                f"and values {list(self.values.shape)}, expected one value for each that is counted"
            )

    def __len__(self) -> int:
        return len(self.counts_T)

    def cut(self, start: int, stop: int | None = None) -> Beside:
        """Return the tokens from position `start` up to `stop`, with their values."""
        counts_T = self.counts_T[start:stop]
        first = int(self.counts_T[:start].sum())
        return Beside(counts_T, self.values[first : first + int(counts_T.sum())])

    def filled(self, others: Beside) -> Beside:
        """Return the same tokens, and for those without values the values in `others`."""
        has_T, takes_T = self.counts_T > 0, (self.counts_T == 0) & (others.counts_T > 0)
        if not takes_T.any():
            return self
        counts_T = np.where(has_T, self.counts_T, others.counts_T)
        own_V = np.repeat(has_T, counts_T)
        dtypes = [one.values.dtype for one in (self, others) if len(one.values)]
        values = np.empty(len(own_V), np.result_type(*dtypes))
        values[own_V] = self.values
        values[~own_V] = others.values[np.repeat(takes_T, others.counts_T)]
        return Beside(counts_T, values)


Columns = Mapping[str, Beside]
"""Name -> values of that kind. A kind that is missing has no values beside any token."""


def uniform(values: np.ndarray) -> Beside:
    """Return values [T, ...] of which each token has equally many."""
    return Beside(np.full(len(values), values[0].size if len(values) else 0, np.int32), values.reshape(-1))


def absent(num_tokens: int) -> Beside:
    """Return tokens without values."""
    return Beside(np.zeros(num_tokens, np.int32), np.zeros(0, np.uint8))


def join(parts: Sequence[Beside]) -> Beside:
    """Return the tokens of all parts, one after another."""
    held = [part.values for part in parts if len(part.values)]
    return Beside(
        np.concatenate([part.counts_T for part in parts] or [np.zeros(0, np.int32)]),
        np.concatenate(held or [np.zeros(0, np.uint8)]),
    )


def join_columns(parts: Sequence[tuple[int, Columns]]) -> dict[str, Beside]:
    """Return the columns of all parts, one after another. Each part has a number of tokens and its columns."""
    names = dict.fromkeys(name for _, columns in parts for name in columns)
    return {name: join([columns.get(name) or absent(count) for count, columns in parts]) for name in names}


def cut_columns(columns: Columns, start: int, stop: int | None = None) -> dict[str, Beside]:
    """Return the columns of the tokens from position `start` up to `stop`."""
    return {name: column.cut(start, stop) for name, column in columns.items()}


def fill_columns(known: Columns, num_tokens: int, others: Columns) -> dict[str, Beside]:
    """Return the columns of `num_tokens` tokens, with values of `others` for tokens that have none. The last token of
    `others` is the last one here; either may begin earlier."""
    found = dict(known)
    for name, other in others.items():
        num = min(num_tokens, len(other))
        aligned = join([absent(num_tokens - num), other.cut(len(other) - num)])
        found[name] = found[name].filled(aligned) if name in found else aligned
    return found


def columns_of(given: Mapping[str, TokenValues]) -> dict[str, Beside]:
    """Return the columns of a segment as it travels."""
    found = {}
    for name, one in given.items():
        tokens_R, counts_R = one.runs.numpy().T
        found[name] = Beside(np.repeat(counts_R.astype(np.int32), tokens_R), one.values.numpy())
    return found


def wire_columns(columns: Columns) -> dict[str, TokenValues]:
    """Return the columns in the form in which a segment travels. Columns without a value are left out."""
    return {name: _wire(column) for name, column in columns.items() if len(column.values)}


def _wire(column: Beside) -> TokenValues:
    counts_T = column.counts_T
    begins_R = np.concatenate([[0], np.flatnonzero(np.diff(counts_T)) + 1])
    runs_R2 = np.stack([np.diff(begins_R, append=len(counts_T)), counts_T[begins_R]], axis=1)
    return TokenValues(runs=Array.of(runs_R2, "int32"), values=Array.of(column.values, str(column.values.dtype)))


def sources(
    rows: Sequence[tuple[int, Columns]], pieces: Iterable[tuple[int, int, int]], width: int | None
) -> dict[str, Beside]:
    """Return the columns of a micro-batch, by the token that is read: that of token t + 1 beside token t, since the
    pass over token t leads to token t + 1. Each row has its number of tokens and its columns.

    pieces: what is read, one piece after another: the row, and the places at which the piece begins and ends. width:
    tokens to which each piece is padded; None for no padding."""
    parts: list[tuple[int, Columns]] = []
    for row, start, stop in pieces:
        num_tokens, columns = rows[row]
        num = min(stop, num_tokens - 1) - start
        parts.append((num, cut_columns(columns, start + 1, start + 1 + num)))
        parts.append(((stop - start if width is None else width) - num, {}))
    return join_columns(parts)


def window(columns: Columns, num_rows: int, start: int, stop: int) -> dict[str, Beside]:
    """Return the columns of positions `start` up to `stop` of each of `num_rows` rows of equal length, which lie one
    after another. Positions beyond a row have no values."""
    parts: list[tuple[int, Columns]] = []
    length = max((len(column) // num_rows for column in columns.values()), default=0)
    for row in range(num_rows):
        first, last = (row * length + min(place, length) for place in (start, stop))
        parts += [(last - first, cut_columns(columns, first, last)), (stop - start - (last - first), {})]
    return join_columns(parts)
