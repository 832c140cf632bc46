import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftstream.core.packing import (
    LEAST,
    apart,
    count_by_staleness,
    grow,
    pad_rows,
    split_microbatches,
    split_minibatches,
)


def test_microbatches_by_hand():
    lengths_N = np.array([2, 5, 0, 5, 3, 2])
    packed = split_microbatches(lengths_N, 10, packed=False)
    assert [rows.tolist() for rows in packed] == [[1, 3], [4, 0, 5]]


def test_packed_microbatches_by_hand():
    packed = split_microbatches(np.array([2, 5, 0, 7, 3, 4]), 10, packed=True)
    assert [rows.tolist() for rows in packed] == [[3, 4], [1, 5], [0]]


@pytest.mark.parametrize("packed", [True, False])
def test_a_row_over_the_budget_goes_alone(packed):
    assert [rows.tolist() for rows in split_microbatches(np.array([50, 4]), 10, packed=packed)] == [[0], [1]]


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(1, 100), st.booleans())
def test_every_row_once_and_within_the_budget(lengths, budget, packed):
    lengths_N = np.array(lengths, dtype=int)
    parts = split_microbatches(lengths_N, budget, packed=packed)
    assert sorted(int(row) for rows in parts for row in rows) == np.flatnonzero(lengths_N).tolist()
    for rows in parts:
        cost = lengths_N[rows].sum() if packed else len(rows) * lengths_N[rows].max()
        assert len(rows) == 1 or cost <= budget


@pytest.mark.slow
@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(1, 12))
def test_minibatches_keep_groups_together(groups, count):
    groups_N = np.array(groups)
    parts = split_minibatches(groups_N, count)
    assert sorted(int(row) for part in parts for row in part) == list(range(len(groups)))
    of_part = [set(groups_N[part].tolist()) for part in parts]
    assert sum(len(one) for one in of_part) == len(set(groups))
    assert len(parts) == min(count, len(set(groups)))
    assert max(len(one) for one in of_part) - min(len(one) for one in of_part) <= 1


def test_minibatches_follow_the_order_of_the_groups():
    assert [part.tolist() for part in split_minibatches(np.array([5, 5, 2, 5, 2]), 2)] == [[0, 1, 3], [2, 4]]
    assert split_minibatches(np.zeros(0, int), 3) == []


@pytest.mark.parametrize("packed", [False, True])
def test_groups_come_whole_into_a_microbatch(packed):
    lengths, groups = np.asarray([3, 9, 4, 0, 5, 5, 1]), np.asarray([0, 1, 0, 2, 2, 3, 1])

    def cost(batch):
        return sum(lengths[batch]) if packed else len(batch) * max(lengths[batch])

    batches = split_microbatches(lengths, 18, packed=packed, groups_N=groups)
    assert sorted(row for batch in batches for row in batch) == [0, 1, 2, 4, 5, 6]
    for group in range(4):
        assert len({place for place, batch in enumerate(batches) for row in batch if groups[row] == group}) == 1
    assert all(cost(batch) <= 18 for batch in batches)
    alone = split_microbatches(lengths, 1, packed=packed, groups_N=groups)
    assert [sorted(batch) for batch in alone] == [[1, 6], [4], [5], [0, 2]]


def test_padding_is_on_the_right():
    padded = pad_rows([np.array([1, 2, 3], np.int32), np.array([4], np.int32)], fill=9)
    assert padded.dtype == np.int32
    assert padded.tolist() == [[1, 2, 3], [4, 9, 9]]


def test_a_histogram_of_staleness_by_hand():
    """Two spans at 2, one beyond the last number, one that the future sampled; what is empty at the end is left out."""
    ages, counts = np.array([2, 0, 2, 9, -1]), np.array([5, 1, 7, 3, 2])
    assert count_by_staleness(ages, counts, 4) == (3, 0, 12, 3)
    assert count_by_staleness(ages[:3], counts[:3], 65) == (1, 0, 12)
    assert count_by_staleness(np.zeros(0, int), np.zeros(0, int), 65) == ()
    for ages_K, counts_K, num_counts, error in [
        (np.zeros(2, int), np.zeros(1, int), 4, ValueError), (np.zeros(1), np.zeros(1, int), 4, TypeError),
        (np.zeros(1, int), np.zeros(1, int), 0, ValueError),
    ]:  # fmt: skip
        with pytest.raises(error, match="staleness"):
            count_by_staleness(ages_K, counts_K, num_counts)


def test_rows_too_short_for_a_shared_run_are_kept_apart():
    keys = [np.arange(length, dtype=np.int32)[:, None] for length in (3, LEAST - 1, 40, 3)]
    found, expected = grow(keys), apart([len(key) for key in keys])
    for name in ("lengths_S", "parents_S", "starts_S", "rows_S", "lasts_B"):
        assert (getattr(found, name) == getattr(expected, name)).all(), name
    assert len(grow([*keys, keys[2]]).lengths_S) == len(keys), "two rows of 40 tokens share a run"
