"""Writes rows as Parquet: from a file of JSON lines, slice by slice."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from rftstream.data.tasksets.arrow import import_pyarrow
from rftstream.errors import ConfigError

ROWS = 1024
"""Number of rows in a slice, which is in memory as a whole."""


def write_parquet(lines: Path, path: Path) -> None:
    """Write the rows of a file of JSON lines as Parquet. The columns are those of all rows together. ConfigError if
    rows have no common form."""
    pa: Any = import_pyarrow(str(path))
    import pyarrow.parquet as pq

    try:
        schemas: list[Any] = []
        for rows in _slices(lines):
            schema = pa.Table.from_pylist(rows, schema=None).schema if len(rows[0]) else pa.schema([])
            names = sorted({name for row in rows for name in row} - set(schema.names))
            if names:  # from_pylist uses only the columns of the first row
                columns = {name: [row.get(name) for row in rows] for name in (*schema.names, *names)}
                schema = pa.table(columns).schema
            schemas = [pa.unify_schemas([*schemas, schema], promote_options="permissive")]
        with pq.ParquetWriter(path, schemas[0], compression="zstd") as writer:
            for rows in _slices(lines):
                writer.write_table(pa.Table.from_pylist(rows, schema=schemas[0]))
    except pa.ArrowException as error:
        raise ConfigError(
            f"{path}: rows have no common form as Parquet: {str(error).splitlines()[0]}; write JSON lines"
        ) from None


def _slices(lines: Path) -> Iterator[list[dict[str, Any]]]:
    with lines.open("rb") as file:
        while rows := [msgspec.json.decode(line) for line in islice(file, ROWS)]:
            yield rows
