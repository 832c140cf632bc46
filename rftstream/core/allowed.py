"""The sets of tokens that could be sampled, where truncation, a grammar or a ban left some out: in few bytes beside
each token, and as masks in front of the softmax.

A set is written as the ids at which it begins or ends, in ascending order: {5, 6, 9} as 5, 7, 9, 10. Each is the
difference from the one before, 7 bits a byte, the highest bit set in all but the last byte of a number. A set that
takes no fewer bytes than a bit for each id is written as those bits. The set of all ids is written as nothing.

Shapes: N tokens, V vocabulary, E edges and R runs of all sets, U different sets, k tokens of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rftstream.contracts.beside import Beside, Columns
from rftstream.contracts.token_values import ALLOWED


def column_of(written: Sequence[bytes]) -> Columns:
    """Return the sets of tokens in the form in which they travel; nothing if all are those of all ids."""
    counts_T = np.asarray([len(one) for one in written], dtype=np.int32)
    return {ALLOWED: Beside(counts_T, np.frombuffer(b"".join(written), np.uint8))} if counts_T.any() else {}


def written_in(columns: Columns, places_N: np.ndarray) -> list[bytes] | None:
    """Return the sets beside the tokens at these places, as `encode_sets` wrote them; None if there are none."""
    if (column := columns.get(ALLOWED)) is None:
        return None
    data, ends_T = column.values.tobytes(), np.cumsum(column.counts_T)
    ends_N = ends_T[places_N]
    begins_N = ends_N - column.counts_T[places_N]
    return [data[begin:end] for begin, end in zip(begins_N.tolist(), ends_N.tolist(), strict=True)]


def encode_sets(allowed_NV: Tensor) -> list[bytes]:
    """Return each row's set, bool [N, V], as bytes; those of a row of all ids are empty. ValueError for a set without
    any."""
    num, vocabulary = allowed_NV.shape
    changes_NV = allowed_NV.clone()
    torch.ne(allowed_NV[:, 1:], allowed_NV[:, :-1], out=changes_NV[:, 1:])
    flat = changes_NV.view(-1)
    places_E = np.flatnonzero(flat.numpy()) if flat.is_cpu else flat.nonzero()[:, 0].cpu().numpy()
    return _write(*np.divmod(places_E, vocabulary), num, vocabulary)


def encode_listed(rows_L: np.ndarray, ids_L: np.ndarray, num: int, vocabulary: int) -> list[bytes]:
    """Return the sets of `num` rows as bytes, as `encode_sets` does. rows_L, ids_L: row and id of each member, in any
    order, also more than once."""
    members_M = np.unique(rows_L * (vocabulary + 1) + ids_L)  # with a place between two rows
    begins_R = members_M[np.diff(members_M, prepend=-2) > 1]
    ends_R = members_M[np.diff(members_M, append=num * (vocabulary + 1) + 1) > 1] + 1
    rows_E, ids_E = np.divmod(np.sort(np.concatenate([begins_R, ends_R])), vocabulary + 1)
    is_inside_E = ids_E < vocabulary
    return _write(rows_E[is_inside_E], ids_E[is_inside_E], num, vocabulary)


def _write(rows_E: np.ndarray, ids_E: np.ndarray, num: int, vocabulary: int) -> list[bytes]:
    """Return the sets of `num` rows as bytes: row and id of each edge, in ascending order."""
    edges_N = np.bincount(rows_E, minlength=num)
    if not edges_N.all():
        raise ValueError("sets of tokens: got one without any token, expected at least one that can be sampled")
    first_N = np.cumsum(edges_N) - edges_N
    gaps_E = np.diff(ids_E, prepend=0)
    gaps_E[first_N] = ids_E[first_N]
    sizes_E = 1 + (gaps_E >= 1 << 7) + (gaps_E >= 1 << 14) + (gaps_E >= 1 << 21)
    begins_E = np.cumsum(sizes_E) - sizes_E
    data = np.zeros(int(sizes_E.sum()), np.uint8)
    for place in range(int(sizes_E.max(initial=0))):
        has = sizes_E > place
        more = np.where(sizes_E[has] > place + 1, 0x80, 0)
        data[begins_E[has] + place] = gaps_E[has] >> 7 * place & 0x7F | more
    lasts_N = first_N + edges_N
    ends_N = np.append(begins_E, len(data))[lasts_N]
    whole_N = (edges_N == 1) & (ids_E[first_N] == 0)
    found = [
        b"" if is_whole else data[begin:end].tobytes()
        for begin, end, is_whole in zip(begins_E[first_N].tolist(), ends_N.tolist(), whole_N.tolist(), strict=True)
    ]
    for row in [row for row, one in enumerate(found) if len(one) >= -(-vocabulary // 8)]:
        changes_V = np.zeros(vocabulary, np.uint8)
        changes_V[ids_E[first_N[row] : lasts_N[row]]] = 1
        found[row] = np.packbits(np.bitwise_xor.accumulate(changes_V), bitorder="little").tobytes()
    return found


@dataclass(frozen=True, slots=True)
class AllowedSets:
    """The sets of N tokens, each as the ids in it, or as those that are not in it, if these are fewer. `read_sets`
    makes it; a softmax asks it for masks."""

    numbers_N: np.ndarray
    """Number of each token's set; 0 for the set of all ids."""
    allows_U: np.ndarray
    """Whether the runs of a set are the ids in it."""
    begins_U: np.ndarray
    counts_U: np.ndarray
    """Each set's first run, and the number of its runs."""
    runs_R2: np.ndarray
    """The runs of all sets: the first id, and the number of ids."""

    def forbidden(self, rows: slice, shape: torch.Size, device: torch.device) -> Tensor | None:
        """Return which ids these tokens cannot be, bool [k, V]; None if each can be any."""
        numbers_k = self.numbers_N[rows]
        if not numbers_k.any():
            return None
        places_k = np.arange(len(numbers_k)) * shape[1]
        rows_R, runs_R = _ranges(self.begins_U[numbers_k], self.counts_U[numbers_k])
        starts_R, lengths_R = self.runs_R2[runs_R].T
        runs, ids = _ranges(starts_R + places_k[rows_R], lengths_R)
        allows_k1 = torch.from_numpy(self.allows_U[numbers_k])[:, None]
        forbidden_kV = allows_k1.to(device).expand(shape).clone()
        forbidden_kV.view(-1)[torch.from_numpy(ids).to(device)] = ~allows_k1[rows_R[runs], 0].to(device)
        return forbidden_kV


def _ranges(starts_R: np.ndarray, lengths_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of all ranges, one range after another: the index of each one's range, and the number."""
    ranges = np.repeat(np.arange(len(lengths_R)), lengths_R)
    return ranges, np.arange(len(ranges)) + (starts_R - (np.cumsum(lengths_R) - lengths_R))[ranges]


def read_sets(written: Sequence[bytes], token_ids_N: np.ndarray, vocabulary: int) -> AllowedSets | None:
    """Return the sets of tokens as `encode_sets` wrote them; None if all are those of all ids. ValueError for a token
    outside of its set, and for ids out of range."""
    known: dict[bytes, int] = {b"": 0}
    numbers_N = np.asarray([known.setdefault(one, len(known)) for one in written], dtype=np.int64)
    if len(known) == 1:
        return None
    counts_U, edges_E = _edges(list(known), vocabulary)
    begins_U = np.cumsum(counts_U) - counts_U
    keys_E = np.repeat(np.arange(len(counts_U)) * vocabulary, counts_U) + edges_E
    before_N = np.searchsorted(keys_E, numbers_N * vocabulary + token_ids_N, side="right")
    outside_N = (before_N - begins_U[numbers_N]) % 2 == 0
    if outside_N.any():
        token_id = int(token_ids_N[np.flatnonzero(outside_N)[0]])
        raise ValueError(f"sets of tokens: got token {token_id} outside of the set that it was sampled from")
    return _with_runs(numbers_N, counts_U, edges_E, vocabulary)


def _with_runs(numbers_N: np.ndarray, counts_U: np.ndarray, edges_E: np.ndarray, vocabulary: int) -> AllowedSets:
    """Return the sets with these edges. Ranges of ids are outside and inside of a set in turns."""
    ends_U = np.cumsum(counts_U)
    bounds_R = np.insert(edges_E, ends_U, vocabulary)
    begins_U = ends_U - counts_U + np.arange(len(counts_U))
    lengths_R = np.diff(bounds_R, prepend=0)
    lengths_R[begins_U] = bounds_R[begins_U]
    sets_R, ordinals_R = _ranges(np.zeros_like(counts_U), counts_U + 1)
    is_inside_R = ordinals_R % 2 == 1
    allows_U = 2 * np.add.reduceat(lengths_R * is_inside_R, begins_U) <= vocabulary
    kept_R = (is_inside_R == allows_U[sets_R]) & (lengths_R > 0)
    runs_R2 = np.stack([bounds_R - lengths_R, lengths_R], axis=1)[kept_R]
    num_runs_U = np.bincount(sets_R[kept_R], minlength=len(counts_U))
    return AllowedSets(numbers_N, allows_U, np.cumsum(num_runs_U) - num_runs_U, num_runs_U, runs_R2)


def _edges(written: Sequence[bytes], vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of edges of each set, int64 [U], and all edges, int64 [E]."""
    edges = [np.zeros(1, np.int64)] * len(written)
    by_gaps = []
    for number, one in enumerate(written):
        if len(one) == -(-vocabulary // 8):
            bits_V = np.unpackbits(np.frombuffer(one, np.uint8), bitorder="little", count=vocabulary)
            edges[number] = np.flatnonzero(np.diff(bits_V, prepend=np.uint8(0)))
        elif one:
            by_gaps.append(number)
    if by_gaps:
        data_B = np.frombuffer(b"".join(written[number] for number in by_gaps), np.uint8)
        lasts_E = np.flatnonzero(data_B < 0x80)
        sizes_E = np.diff(lasts_E, prepend=-1)
        begins_E = lasts_E + 1 - sizes_E
        places_B = np.arange(len(data_B)) - np.repeat(begins_E, sizes_E)
        sums_E = np.cumsum(np.add.reduceat((data_B & 0x7F).astype(np.int64) << 7 * places_B, begins_E))
        ends_G = np.searchsorted(lasts_E, np.cumsum([len(written[number]) for number in by_gaps]))
        before = 0
        for number, part in zip(by_gaps, np.split(sums_E, ends_G[:-1]), strict=True):
            edges[number] = part - before
            before = part[-1]
    largest = max(int(one[-1]) for one in edges)
    if largest >= vocabulary:
        raise ValueError(f"sets of tokens: got one with the id {largest}, expected ids below {vocabulary}")
    return np.asarray([len(one) for one in edges]), np.concatenate(edges)
