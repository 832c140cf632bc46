"""Splits rows into mini-batches (one optimizer step each) and micro-batches (one forward pass each), and counts tokens
by staleness.

Rows that begin with the same tokens are trees, which hold such tokens once. A tree is cut at its forks into runs of
tokens. Each run goes on after its parent, so that a row is the path from a root to one of the runs. Rows that have
nothing in common are trees of one run each.

Shapes: N rows, K spans of one version each, S counts. Of trees: B rows, T tokens of a row, S runs, P tokens of all
runs.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

LEAST = 16
"""Fewest tokens that a run has which rows share. A shorter one is copied into the runs after it: each run takes a call
of the attention, and all texts of a chat template begin alike."""
COPIES = 8
"""Most tokens of all rows of a micro-batch, in multiples of its limit: each run has a copy of the keys and values of
its path, which the backward pass needs. So siblings up to this number are never torn apart for it."""
ROOT = -1
"""The parent of a run that begins a tree."""


@dataclass(frozen=True, slots=True, eq=False)
class Forest:
    """The trees of some rows. `grow` or `apart` makes it.

    forest = grow([row_T[:, None] for row_T in token_ids], least=1)
    token_ids_P = np.concatenate([token_ids[row][start:stop] for row, start, stop in forest.pieces()])
    token_ids_P[forest.nodes()[3]]   # the tokens of row 3
    """

    lengths_S: np.ndarray
    """int64 [S]: tokens of each run. The runs lie one after another, each somewhere behind its parent."""
    parents_S: np.ndarray
    """int64 [S]: the run that each goes on from, or ROOT."""
    starts_S: np.ndarray
    """int64 [S]: place of a run's first token in its rows, which is also its position."""
    rows_S: np.ndarray
    """int64 [S]: a row that each run is a part of."""
    lasts_B: np.ndarray
    """int64 [B]: the run in which each row ends; ROOT for a row without tokens."""

    def pieces(self) -> list[tuple[int, int, int]]:
        """Return each run as a part of a row: the row, and the places at which the part begins and ends."""
        ends_S = self.starts_S + self.lengths_S
        return list(zip(self.rows_S.tolist(), self.starts_S.tolist(), ends_S.tolist(), strict=True))

    def nodes(self) -> list[np.ndarray]:
        """Return the index in [P] of each token of each row, int64 [T]."""
        ends_S = np.cumsum(self.lengths_S)
        runs = [np.arange(*bounds) for bounds in zip(ends_S - self.lengths_S, ends_S, strict=True)]
        parents = self.parents_S.tolist()
        paths = (path_to(last, parents) for last in self.lasts_B.tolist())
        return [runs[path[0]] if len(path) == 1 else np.concatenate([runs[run] for run in path]) for path in paths]

    def asked(self) -> np.ndarray:
        """Return the number of tokens of each row, int64 [B]."""
        return np.where(self.lasts_B == ROOT, 0, (self.starts_S + self.lengths_S)[self.lasts_B])

    def positions(self) -> np.ndarray:
        """Return the position of each token, int64 [P]."""
        return np.concatenate([np.arange(start, stop) for _, start, stop in self.pieces()])


def path_to(run: int, parents: Sequence[int] | np.ndarray) -> list[int]:
    """Return the runs from a root to this run."""
    path = [run]
    while (run := int(parents[run])) != ROOT:
        path.append(run)
    return path[::-1]


def before(lengths: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Return the number of tokens that each run goes on from. A run's parent comes before it."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent == ROOT else found[parent] + lengths[parent])
    return found


def apart(lengths: Sequence[int] | np.ndarray) -> Forest:
    """Return rows of these lengths as trees of one run each."""
    rows_B, lengths_B = np.arange(len(lengths)), np.asarray(lengths, np.int64)
    return Forest(lengths_B, np.full_like(lengths_B, ROOT), np.zeros_like(lengths_B), rows_B, rows_B)


def grow(keys: Sequence[np.ndarray], *, least: int | None = None) -> Forest:
    """Return the trees of rows, of which one has a token. A run that rows share has at least `least` tokens (LEAST).
    Trees and runs are in the order of their first rows, so rows that share nothing keep their order.

    keys: for each row, what makes its tokens equal to others, [T, W], all of one dtype and W."""
    least = LEAST if least is None else least
    lengths = sorted(map(len, keys))
    if lengths[0] and (len(lengths) == 1 or lengths[-2] < least):
        return apart(list(map(len, keys)))  # no two rows have room for a run that they share
    texts = [np.ascontiguousarray(key).tobytes() for key in keys]
    order = sorted(range(len(keys)), key=texts.__getitem__)  # rows with a common beginning come together
    common_B = np.asarray([0, *(_in_common(keys[one], keys[other]) for one, other in itertools.pairwise(order))])
    runs: list[tuple[int, int, int, int]] = []
    lasts_B = np.zeros(len(keys), np.int64)
    way: tuple[int, ...] = (0,)
    tasks = [(way, 0, len(keys), 0, ROOT)]  # a heap: those of a run come after it, by their first rows
    while tasks:  # rows `first` to `end` of the order are told apart from token `start` on
        way, first, end, start, parent = heapq.heappop(tasks)
        rows = order[first:end]
        stop = len(keys[rows[0]]) if end - first == 1 else int(common_B[first + 1 : end].min())
        shared, begin, above = end - first > 1, start, way[:-1]
        if stop - start >= (least if shared else 1):
            runs.append((stop - start, parent, start, min(rows)))
            parent, begin, above = len(runs) - 1, stop, way
        if not shared:
            lasts_B[rows[0]] = parent
            continue
        cuts = [first, *(first + 1 + np.flatnonzero(common_B[first + 1 : end] == stop)).tolist(), end]
        for one, other in itertools.pairwise(cuts):
            heapq.heappush(tasks, ((*above, min(order[one:other])), one, other, begin, parent))
    lengths_S, parents_S, starts_S, rows_S = np.asarray(runs, np.int64).T
    return Forest(lengths_S, parents_S, starts_S, rows_S, lasts_B)


def _in_common(one: np.ndarray, other: np.ndarray) -> int:
    """Return the number of tokens with which both begin."""
    length = min(len(one), len(other))
    differ = (one[:length] != other[:length]).any(axis=1)
    return int(differ.argmax()) if differ.any() else length


def families(forest: Forest, most: int) -> np.ndarray:
    """Return a number for each row: rows with the same one are computed together. They are those of a tree, or of the
    largest branches of it that fit with what they go on from: at most `most` tokens, and `COPIES` times as many in all
    rows. int64 [B]."""
    sizes_S, asked_S = forest.lengths_S.copy(), np.zeros_like(forest.lengths_S)
    np.add.at(asked_S, forest.lasts_B, forest.asked())
    for run in range(len(sizes_S) - 1, -1, -1):
        if (parent := forest.parents_S[run]) != ROOT:
            sizes_S[parent] += sizes_S[run]
            asked_S[parent] += asked_S[run]
    fits_S = (sizes_S + forest.starts_S <= most) & (asked_S <= COPIES * most)
    heads_S = np.arange(len(sizes_S))
    for run, parent in enumerate(forest.parents_S.tolist()):
        if parent != ROOT and fits_S[parent]:
            heads_S[run] = heads_S[parent]
    # a row that ends where others of a branch that is too large go on is by itself
    alone_B = len(sizes_S) + np.arange(len(forest.lasts_B))
    return np.where(fits_S[forest.lasts_B], heads_S[forest.lasts_B], alone_B)


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
    lengths_N: np.ndarray,
    max_tokens: int,
    *,
    packed: bool,
    groups_N: np.ndarray | None = None,
    forest: Forest | None = None,
) -> list[np.ndarray]:
    """Return the row numbers of each micro-batch, each of at most `max_tokens` tokens, longest rows first.

    Not packed, padding counts, and rows of like lengths come together. Packed, a row goes to the first micro-batch that
    has room for it. A row longer than `max_tokens` is a micro-batch of its own. lengths_N: int [N]; rows of no tokens
    are left out. groups_N: int [N], rows of a group stay together, as if they were one. forest: the trees of the rows
    if they are packed; then tokens that a micro-batch holds once count once, and trees stay whole where they fit.
    """
    if lengths_N.ndim != 1 or lengths_N.dtype.kind not in "iu":
        raise ValueError(f"packing: got lengths {lengths_N.dtype} {lengths_N.shape}, expected integers [N]")
    if max_tokens < 1:
        raise ValueError(f"packing: got a budget of {max_tokens} tokens, expected at least 1")
    numbers_N = np.arange(len(lengths_N)) if groups_N is None else np.unique(groups_N, return_inverse=True)[1]
    if forest is not None and groups_N is None:
        numbers_N = families(forest, max_tokens)
    parts: dict[int, list[int]] = {}
    for row in np.argsort(-lengths_N, kind="stable").tolist():
        if lengths_N[row]:
            parts.setdefault(int(numbers_N[row]), []).append(row)  # in the order of their longest rows
    if packed:
        batches = _first_fit(forest or apart(lengths_N), list(parts.values()), max_tokens, by_size=forest is not None)
    else:
        batches = _in_order(lengths_N, list(parts.values()), max_tokens)
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


def _first_fit(forest: Forest, parts: Sequence[list[int]], max_tokens: int, *, by_size: bool) -> list[list[int]]:
    """Pack the parts, in order or the largest first, each into the first micro-batch with room for what it adds (first
    fit decreasing). For single rows the number of micro-batches is at most 11/9 of the fewest possible, plus one."""
    lengths = forest.lengths_S.tolist()

    def num_tokens(runs: Iterable[int]) -> int:
        return sum(lengths[run] for run in runs)

    asked, parents = forest.asked().tolist(), forest.parents_S.tolist()
    lasts = forest.lasts_B.tolist()
    runs_of = [{run for row in part for run in path_to(lasts[row], parents)} for part in parts]
    sizes = [num_tokens(runs) for runs in runs_of]
    order = sorted(range(len(parts)), key=lambda part: -sizes[part]) if by_size else range(len(parts))
    batches: list[list[int]] = []
    rooms: list[int] = []
    copies: list[int] = []
    held: list[set[int]] = []
    for part in order:
        runs, size, copied = runs_of[part], sizes[part], sum(asked[row] for row in parts[part])
        for place, room in enumerate(rooms):
            fits = room >= size or (by_size and room >= num_tokens(runs - held[place]))
            if fits and copied <= copies[place]:
                batches[place] += parts[part]
                rooms[place] -= num_tokens(runs - held[place])
                copies[place] -= copied
                held[place] |= runs
                break
        else:
            batches.append([*parts[part]])
            rooms.append(max_tokens - size)
            copies.append(COPIES * max_tokens - copied)
            held.append(runs)
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
