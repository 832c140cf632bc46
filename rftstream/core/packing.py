"""Splits rows into mini-batches (one optimizer step each) and micro-batches (one forward pass each), and counts tokens
by staleness.

Shapes: N rows, K spans of one version each, S counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def split_minibatches(
    groups_N: np.ndarray,
    num_minibatches: int,
    *,
    strata_N: np.ndarray | None = None,
    rollouts_N: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Return the row numbers of each mini-batch: as equal a number of groups of each stratum as possible, in order.

    Groups stay together. With fewer groups than mini-batches, there are only as many mini-batches as groups. If there
    are enough groups in total, but a stratum has fewer groups than there are mini-batches, its groups are split into
    rollouts, so that each mini-batch has some of it. This needs `rollouts_N`.

    groups_N: int [N]. strata_N: int [N], what a row is learned from (kind, taskset), the same for all rows of a group;
    None: all are alike. rollouts_N: int [N], the rollout of a row inside of its group. A mini-batch's rows are in the
    order of the batch.
    """
    given = {"groups": groups_N, "strata": strata_N, "rollouts": rollouts_N}
    for name, array_N in given.items():
        if array_N is not None and (
            array_N.shape != groups_N.shape or array_N.ndim != 1 or array_N.dtype.kind not in "iu"
        ):
            raise ValueError(f"packing: got {name} {array_N.dtype} {array_N.shape}, expected integers [N]")
    if num_minibatches < 1:
        raise ValueError(f"packing: got {num_minibatches} mini-batches, expected at least 1")
    groups_N = _number(groups_N)
    num_groups = int(groups_N.max(initial=-1)) + 1
    count = min(num_minibatches, num_groups)
    first_G = np.unique(groups_N, return_index=True)[1]
    strata_G = np.zeros(num_groups, dtype=np.int64) if strata_N is None else _number(strata_N[first_G])
    parts_N = np.zeros(len(groups_N), dtype=np.int64)
    begin = 0
    for stratum in range(int(strata_G.max(initial=-1)) + 1):
        rows = np.flatnonzero(strata_G[groups_N] == stratum)
        units = _number(groups_N[rows])
        if rollouts_N is not None and units.max() + 1 < count:
            rollouts = np.unique(rollouts_N[rows], return_inverse=True)[1]
            units = _number(units * (rollouts.max() + 1) + rollouts)
        num_units = int(units.max()) + 1
        # the first `num_units % count` mini-batches have one more; the next stratum's begin after them
        sizes = np.full(count, num_units // count)
        sizes[: num_units % count] += 1
        parts_N[rows] = ((np.repeat(np.arange(count), sizes) + begin) % count)[units]
        begin = (begin + num_units) % count
    return [np.flatnonzero(parts_N == part) for part in range(count)]


def _number(names_N: np.ndarray) -> np.ndarray:
    """Return the same labels, numbered from 0 in order of appearance."""
    _, first, inverse_N = np.unique(names_N, return_index=True, return_inverse=True)
    ranks = np.empty(len(first), dtype=np.int64)
    ranks[np.argsort(first)] = np.arange(len(first))
    return ranks[inverse_N]


def split_microbatches(
    lengths_N: np.ndarray, max_tokens: int, *, packed: bool, groups_N: np.ndarray | None = None
) -> list[np.ndarray]:
    """Return the row numbers of each micro-batch, each of at most `max_tokens` tokens, longest rows first.

    Not packed, padding counts, and rows of like lengths come together. Packed, a row goes to the first micro-batch that
    has room for it. A row longer than `max_tokens` is a micro-batch of its own. lengths_N: int [N]; rows of no tokens
    are left out. groups_N: int [N], rows of a group stay together, as if they were one.
    """
    if lengths_N.ndim != 1 or lengths_N.dtype.kind not in "iu":
        raise ValueError(f"packing: got lengths {lengths_N.dtype} {lengths_N.shape}, expected integers [N]")
    if max_tokens < 1:
        raise ValueError(f"packing: got a budget of {max_tokens} tokens, expected at least 1")
    numbers_N = np.arange(len(lengths_N)) if groups_N is None else np.unique(groups_N, return_inverse=True)[1]
    parts: dict[int, list[int]] = {}
    for row in np.argsort(-lengths_N, kind="stable").tolist():
        if lengths_N[row]:
            parts.setdefault(int(numbers_N[row]), []).append(row)  # in the order of their longest rows
    batches = (_first_fit if packed else _in_order)(lengths_N, list(parts.values()), max_tokens)
    return [np.asarray(batch, dtype=np.int64) for batch in batches]


def _in_order(lengths_N: np.ndarray, parts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    batches: list[list[int]] = []
    for part in parts:
        # longest first, so the first row of a micro-batch sets its padded length
        if batches and (len(batches[-1]) + len(part)) * int(lengths_N[batches[-1][0]]) <= max_tokens:
            batches[-1] += part
        else:
            batches.append([*part])
    return batches


def _first_fit(lengths_N: np.ndarray, parts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    """Pack the parts, in order, each into the first micro-batch with room (first fit decreasing). For single rows the
    number of micro-batches is at most 11/9 of the fewest possible, plus one."""
    batches: list[list[int]] = []
    rooms: list[int] = []
    for part in parts:
        length = int(lengths_N[part].sum())
        place = next((number for number, room in enumerate(rooms) if room >= length), None)
        if place is None:
            batches.append([*part])
            rooms.append(max_tokens - length)
        else:
            batches[place] += part
            rooms[place] -= length
    return batches


def pad_rows(rows: Sequence[np.ndarray], fill: float = 0) -> np.ndarray:
    """Return rows of different lengths as [B, T], padded on the right with `fill`. The dtype is that of the first
    row."""
    lengths_B = np.asarray([len(row) for row in rows])
    padded_BT = np.full((len(rows), int(lengths_B.max())), fill, dtype=rows[0].dtype)
    padded_BT[np.arange(padded_BT.shape[1])[None, :] < lengths_B[:, None]] = np.concatenate(list(rows))
    return padded_BT


def count_by_staleness(staleness_K: np.ndarray, counts_K: np.ndarray, num_counts: int) -> tuple[int, ...]:
    """Return the sum of `counts_K` at each staleness from 0 on, without zeros at the end.

    The last of `num_counts` numbers is the sum of all that are older; below 0 counts as 0.

    staleness_K, counts_K: int [K]; result: int [S], S <= num_counts."""
    if staleness_K.ndim != 1 or counts_K.shape != staleness_K.shape:
        raise ValueError(f"staleness: got {staleness_K.shape} and {counts_K.shape}, expected [K] twice")
    if staleness_K.dtype.kind not in "iu" or counts_K.dtype.kind not in "iu":
        raise TypeError(f"staleness: got {staleness_K.dtype} and {counts_K.dtype}, expected integers")
    if num_counts < 1:
        raise ValueError(f"staleness: got {num_counts} numbers, expected at least 1")
    counts_S = np.zeros(num_counts, np.int64)
    np.add.at(counts_S, np.clip(staleness_K, 0, num_counts - 1), counts_K)
    return tuple(np.trim_zeros(counts_S, "b").tolist())
