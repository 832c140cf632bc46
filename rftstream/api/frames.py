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


def table(arrays: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return a table of these arrays."""
    return pa.table({name: arrays[name] for name in names})


def rollout_columns(found: Mapping[str, Numbers | CodedWords], *, plain: bool) -> dict[str, Any]:
    """Return columns of rollouts as arrays. `plain`: words as texts instead of dictionaries."""
    arrays: dict[str, Any] = {name: _array(values, plain) for name, values in found.items()}
    arrays["group_id"] = texts = _texts(found["group_id"])
    ids = pc.binary_join_element_wise(texts, pc.cast(arrays["sibling"], pa.string()), "/")
    return {"rollout_id": ids, **arrays}


def bodies(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Return columns of bodies as arrays."""
    kinds = {"token_ids": pa.list_(pa.int32()), "logprobs": pa.list_(pa.float32()), "loss_mask": pa.list_(pa.int8())}
    return {name: pa.array([row[name] for row in rows], type=kinds.get(name)) for name in names}


def _array(values: Numbers | CodedWords, plain: bool) -> Any:
    if isinstance(values, CodedWords):
        return _texts(values) if plain else _dictionary(values)
    if values.dtype.kind == "f":
        return pa.array(values, from_pandas=True)
    return pa.array(values, mask=values < 0) if values.dtype.kind == "i" and (values < 0).any() else pa.array(values)


def _dictionary(values: CodedWords) -> Any:
    codes = pa.array(values.codes.astype(np.int32), mask=values.codes < 0)
    return pa.DictionaryArray.from_arrays(codes, pa.array(values.words, type=pa.string()))


def _texts(values: Numbers | CodedWords) -> Any:
    assert isinstance(values, CodedWords)
    return pc.cast(_dictionary(values), pa.string())
