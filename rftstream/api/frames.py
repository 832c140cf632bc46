"""Columns of a run as a table of Arrow, of which pandas, polars and datasets make their frames."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rftstream.queries.catalog.columns import CodedWords, Numbers

Choice = Callable[[Sequence[str] | None, Iterable[str]], list[str]]


def table_of_rows(rows: Sequence[Mapping[str, Any]], choose: Choice, columns: Sequence[str] | None) -> Any:
    """Return a table of rows, which need not all have the same columns."""
    known = dict.fromkeys(name for row in rows for name in row)
    chosen = choose(columns, known) if rows or columns is None else list(columns)
    return pa.table({name: pa.array([row.get(name) for row in rows]) for name in chosen})


def rollout_table(found: Mapping[str, Numbers | CodedWords]) -> Any:
    """Return columns of rollouts as a table, in which words are dictionaries."""
    arrays = {name: _array(values) for name, values in found.items()}
    arrays["group_id"] = pc.cast(arrays["group_id"], pa.string())
    ids = pc.binary_join_element_wise(arrays["group_id"], pc.cast(arrays["sibling"], pa.string()), "/")
    return pa.table({"rollout_id": ids, **arrays})


def joined(first: Any, second: Any) -> Any:
    """Return the rows of both tables."""
    return pa.concat_tables([first.select(second.column_names), second]).unify_dictionaries()


def chosen_columns(known: Any, bodies: Mapping[str, Sequence[Any]], names: Sequence[str], plain: bool) -> Any:
    """Return a table of these columns. `plain`: words as texts instead of dictionaries."""
    arrays = {name: known[name] for name in names if name not in bodies}
    if plain:
        arrays |= {
            name: pc.cast(array, pa.string()) for name, array in arrays.items() if pa.types.is_dictionary(array.type)
        }
    for name, values in bodies.items():
        arrays[name] = _lists(values, _TOKENS[name]) if name in _TOKENS else pa.array(values)
    return pa.table({name: arrays[name] for name in names})


_TOKENS = {"token_ids": "<i4", "logprobs": "<f4", "loss_mask": "i1"}
"""Column with a value for each token -> the form of its bytes on the log."""


def _lists(values: Sequence[bytes | None], dtype: str) -> Any:
    """Return lists of numbers, of which each comes as bytes; None: there is no list."""
    sizes = np.asarray([len(value or b"") for value in values]) // np.dtype(dtype).itemsize
    ends = np.concatenate([[0], np.cumsum(sizes)])
    numbers = pa.array(np.frombuffer(b"".join(value or b"" for value in values), dtype=dtype))
    kind, width = (pa.ListArray, np.int32) if ends[-1] < 1 << 31 else (pa.LargeListArray, np.int64)
    return kind.from_arrays(pa.array(ends.astype(width)), numbers, mask=pa.array([value is None for value in values]))


def _array(values: Numbers | CodedWords) -> Any:
    if isinstance(values, CodedWords):
        codes = pa.array(values.codes.astype(np.int32), mask=values.codes < 0)
        return pa.DictionaryArray.from_arrays(codes, pa.array(values.words, type=pa.string()))
    if values.dtype.kind == "f":
        return pa.array(values, from_pandas=True)
    return pa.array(values, mask=values < 0) if values.dtype.kind == "i" and (values < 0).any() else pa.array(values)
