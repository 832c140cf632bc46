"""The one-to-one assignment with the largest sum of weights: the Hungarian method with potentials.

Shapes: R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence


def best_assignment(weights_RC: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """Return pairs (row, column) whose weights have the largest sum; each row and column is in one pair at most.

    There are min(R, C) pairs, in the order of the rows. It takes O(R² C) steps for R <= C. Source: H. W. Kuhn, The
    Hungarian method for the assignment problem, 1955; as shortest augmenting paths by J. Munkres, 1957."""
    num_rows, num_columns = len(weights_RC), len(weights_RC[0]) if weights_RC else 0
    if not num_rows or not num_columns:
        return []
    if num_rows > num_columns:
        turned = [[weights_RC[row][column] for row in range(num_rows)] for column in range(num_columns)]
        return sorted((row, column) for column, row in best_assignment(turned))
    import numpy as np

    # Row 0 and column 0 stand for "nothing"; the costs are the negated weights.
    cost_RC = np.zeros((num_rows + 1, num_columns + 1))
    cost_RC[1:, 1:] = -np.asarray(weights_RC, dtype=np.float64)
    of_rows_R, of_columns_C = np.zeros(num_rows + 1), np.zeros(num_columns + 1)
    row_of_C = np.zeros(num_columns + 1, dtype=np.int64)
    for row in range(1, num_rows + 1):
        row_of_C[0] = row
        column = 0
        least_C = np.full(num_columns + 1, np.inf)
        before_C = np.zeros(num_columns + 1, dtype=np.int64)
        used_C = np.zeros(num_columns + 1, dtype=bool)
        while row_of_C[column]:
            used_C[column] = True
            at = row_of_C[column]
            left_C = cost_RC[at] - of_rows_R[at] - of_columns_C
            better_C = ~used_C & (left_C < least_C)
            least_C[better_C], before_C[better_C] = left_C[better_C], column
            open_C = np.where(used_C, np.inf, least_C)
            after = int(open_C[1:].argmin()) + 1
            step = open_C[after]
            of_rows_R[row_of_C[used_C]] += step
            of_columns_C[used_C] -= step
            least_C[~used_C] -= step
            column = after
        while column:
            row_of_C[column], column = row_of_C[before_C[column]], int(before_C[column])
    return sorted((int(row) - 1, column - 1) for column, row in enumerate(row_of_C) if column and row)
