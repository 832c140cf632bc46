"""Trees of rows: each distinct beginning is held once, and micro-batches are filled by what they hold."""

import numpy as np
import pytest

from rftstream.core.packing import ROOT, apart, before, families, grow, split_microbatches


def texts(random, count, *, vocabulary=3, longest=12):
    return [random.integers(0, vocabulary, int(random.integers(1, longest))) for _ in range(count)]


def keys(rows):
    return [np.asarray(row)[:, None] for row in rows]


def held(forest, rows):
    return np.concatenate([rows[row][start:stop] for row, start, stop in forest.pieces()])


@pytest.mark.parametrize("least", [1, 3, 100])
def test_rows_are_paths_and_beginnings_are_held_once(least):
    random = np.random.default_rng(0)
    for _ in range(50):
        rows = texts(random, int(random.integers(1, 12)))
        forest = grow(keys(rows), least=least)
        token_ids_P, positions_P = held(forest, rows), forest.positions()
        for row, nodes_T in zip(rows, forest.nodes(), strict=True):
            assert token_ids_P[nodes_T].tolist() == row.tolist()
            assert positions_P[nodes_T].tolist() == list(range(len(row)))
        children = np.bincount(forest.parents_S[forest.parents_S != ROOT], minlength=len(forest.parents_S))
        ends = np.bincount(forest.lasts_B, minlength=len(children))
        assert (forest.lengths_S[children + ends > 1] >= least).all(), "what is shared is long enough"
        assert before(forest.lengths_S.tolist(), forest.parents_S.tolist()) == forest.starts_S.tolist()
        distinct = {tuple(row[: place + 1].tolist()) for row in rows for place in range(len(row))}
        assert len(token_ids_P) == (len(distinct) if least == 1 else len(token_ids_P))
        assert len(distinct) <= len(token_ids_P) <= sum(map(len, rows))


@pytest.mark.parametrize(
    ("rows", "least"),
    [([[5, 1], [3], [4, 4, 4]], 1), ([[5, 5, 1], [5, 3, 3], [5, 5, 2], [4], [5, 3, 4]], 3)],
    ids=["nothing in common", "too little in common"],
)
def test_rows_that_share_nothing_stay_as_they_are(rows, least):
    found, expected = grow(keys(rows), least=least), apart([len(row) for row in rows])
    for name in ("lengths_S", "parents_S", "starts_S", "rows_S", "lasts_B"):
        assert getattr(found, name).tolist() == getattr(expected, name).tolist()


BEGUN = [7] * 20
GROUPS = [[*BEGUN, *[group] * 10, *[answer] * 5] for group in (1, 2, 3) for answer in (4, 5, 6, 7)]
"""A beginning of 20 tokens for all, one of 10 for each of three groups, and four answers of 5 in each."""


@pytest.mark.parametrize(
    ("budget", "sizes"),
    [
        (110, [12]),  # 20 + 3 * (10 + 4 * 5)
        (80, [8, 4]),  # two groups share the beginning of all, and no group is torn apart
        (79, [4, 4, 4]),
        (50, [4, 4, 4]),
        (45, [3, 3, 3, 1, 1, 1]),  # 20 + 10 + 3 * 5: no group fits, and its answers come together as far as they do
        (1, [1] * 12),
    ],
)
def test_micro_batches_are_filled_by_distinct_tokens_and_groups_stay_whole(budget, sizes):
    forest = grow(keys(GROUPS), least=1)
    lengths = np.asarray([len(row) for row in GROUPS])
    parts = split_microbatches(lengths, budget, packed=True, forest=forest)
    assert sorted(np.concatenate(parts).tolist()) == list(range(12))
    assert sorted(map(len, parts), reverse=True) == sizes
    for part in parts:
        assert len(held(grow(keys([GROUPS[row] for row in part]), least=1), [GROUPS[row] for row in part])) <= max(
            budget, len(GROUPS[0])
        )
    if budget >= 50:
        assert all(len({row // 4 for row in part}) * 4 == len(part) for part in parts)


def test_groups_that_belong_together_count_what_they_have_in_common_once():
    rows = [[*BEGUN, 1], [*BEGUN, 2], [9] * 5, [8] * 5]
    forest = grow(keys(rows), least=1)
    parts = split_microbatches(
        np.asarray([21, 21, 5, 5]), 27, packed=True, forest=forest, groups_N=np.array([0, 0, 1, 1])
    )
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3]]


def test_a_micro_batch_holds_so_many_copies_of_what_rows_begin_with():
    """Keys and values of a path are copied for each run."""
    rows = [[*[7] * 1000, answer] for answer in range(40)]
    parts = split_microbatches(np.asarray([1001] * 40), 1200, packed=True, forest=grow(keys(rows), least=1))
    assert [len(part) for part in parts] == [9, 9, 9, 9, 4]


def test_a_row_that_ends_where_others_of_a_large_branch_go_on_is_by_itself():
    rows = [BEGUN, [*BEGUN, *[1] * 10], [*BEGUN, *[2] * 10]]
    assert len(set(families(grow(keys(rows), least=1), 35).tolist())) == 3
    assert len(set(families(grow(keys(rows), least=1), 40).tolist())) == 1
