"""Rows of Parquet and Arrow files. Only this module imports pyarrow.

Parquet cannot be read row by row, and its row groups may be as large as the file. So each file is read once, in slices,
which are stored compressed in one temporary file without a name. To read a row, only its slice is read.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rftstream.data.tasksets.columns import TableRow, read_chat
from rftstream.data.tasksets.rows import RowReader, are_enough
from rftstream.errors import ConfigError, importing

if TYPE_CHECKING:
    import pyarrow as pa

SLICE_ROWS = 256
"""Number of rows that are read together, since neighbours are often needed in order."""
READ_BYTES = 1024 * 1024
"""Bytes of a column that are read at a time, so that a row group is never in memory as a whole."""


def describe_parquet(path: Path) -> tuple[int, tuple[str, ...]]:
    """Return the number of rows of a Parquet file and the names of its columns, from the file's end alone. ConfigError
    if it cannot be read."""
    import_pyarrow(str(path))
    import pyarrow.parquet as pq

    with _reading(path):
        found = pq.read_metadata(path)
        return int(found.num_rows), tuple(found.schema.to_arrow_schema().names)


class ArrowRows:
    """A RowSource over files that pyarrow reads, one file after the other."""

    def __init__(self, paths: Sequence[Path], columns: RowReader, source: str) -> None:
        """Read all files. `source` names them in errors; ConfigError names the file and the row."""
        import_pyarrow(source)
        self._paths = list(paths)
        self._ends: list[int] = []
        """Number of rows before the end of each file."""
        self._slices: list[tuple[_Store, int]] = []
        self._starts: list[int] = []
        """First row of each slice."""
        self._held: tuple[int, pa.RecordBatch | None] = (-1, None)
        """Number of the slice that was read last, and the slice."""
        self._num_rows = 0
        digests = []
        store: _Store | None = None
        for path in self._paths:
            with _reading(path):
                before = _state(path)
                store = self._take_in(path, columns, store)
                digests.append("" if are_enough(self._num_rows) else _digest(path))
                if _state(path) != before:
                    raise ConfigError(f"{path}: changed while it was read; try again when it is complete")
            self._ends.append(self._num_rows)
            if are_enough(self._num_rows):
                break
        if store is not None:
            store.finish()
        self.digest = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
        if not self._num_rows:
            raise ConfigError(f"{source}: has no rows, expected at least one")

    def __len__(self) -> int:
        return self._num_rows

    def row(self, index: int) -> dict[str, Any]:
        """Return a row from its slice. ConfigError if the row cannot be read."""
        number = bisect_right(self._starts, index) - 1
        held, batch = self._held
        if batch is None or held != number:
            store, inner = self._slices[number]
            batch = store.read(inner)
            self._held = (number, batch)
        with _reading(self._paths[bisect_right(self._ends, index)]):
            return _row(batch, index - self._starts[number])

    def where(self, index: int) -> str:
        """Return the file and the number of a row."""
        file = bisect_right(self._ends, index)
        return f"{self._paths[file]}: row {index - (self._ends[file - 1] if file else 0)}"

    def _take_in(self, path: Path, columns: RowReader, store: _Store | None) -> _Store | None:
        """Add the file's slices to the store of the previous files, if these have the same schema."""
        start = self._num_rows
        for batch in _batches(path, columns):
            names = batch.schema.names
            batch.validate(full=True)
            if self._num_rows == start:
                columns.check(_row(batch, 0), f"{path}: row 0")
            chat = columns.chat_path(names)
            if chat in names and batch.column(chat).null_count:
                row = self._num_rows - start + batch.column(chat).is_null().index(True).as_py()
                read_chat(None, f"{path}: row {row}")  # refuses it
            if store is None or not store.schema.equals(batch.schema):
                if store is not None:
                    store.finish()
                store = _Store(batch.schema)
            self._slices.append((store, store.add(batch)))
            self._starts.append(self._num_rows)
            self._num_rows += batch.num_rows
            if are_enough(self._num_rows):
                break
        return store


class _Store:
    """Slices of one schema, compressed, in an unnamed temporary file. ArrowRows makes it."""

    def __init__(self, schema: pa.Schema) -> None:
        import pyarrow as pa

        self.schema = schema
        self._file = tempfile.TemporaryFile(prefix="rftstream-")  # noqa: SIM115  lives as long as the rows
        weakref.finalize(self, self._file.close)
        options = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
        self._writer: Any = pa.ipc.new_file(self._file, schema, options=options)
        self._reader: Any = None
        self._count = 0

    def add(self, batch: pa.RecordBatch) -> int:
        try:
            self._writer.write_batch(batch)
        except OSError as error:
            raise ConfigError(
                f"{tempfile.gettempdir()}: {error.strerror or error}; rows are kept there while they are used; make "
                "room, or set TMPDIR"
            ) from None
        self._count += 1
        return self._count - 1

    def finish(self) -> None:
        import pyarrow as pa

        self._writer.close()
        self._file.seek(0)
        self._reader = pa.ipc.open_file(self._file, options=pa.ipc.IpcReadOptions(use_threads=False))

    def read(self, number: int) -> pa.RecordBatch:
        return self._reader.get_batch(number)


def import_pyarrow(source: str) -> Any:
    """Import pyarrow. ConfigError, which names `source`, if it is not installed."""
    with importing(source, "pyarrow", install="rftstream[data]"):
        import pyarrow.ipc
        import pyarrow.parquet
    return pyarrow


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn pyarrow's errors about a damaged file into a ConfigError."""
    import pyarrow as pa

    try:
        yield
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; name a file, a pattern or a folder") from None
    except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:
        what = "a Parquet file" if path.suffix != ".arrow" else "an Arrow file"
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"{path}: cannot be read as {what}: {text}; fetch or write it again") from None


def _batches(path: Path, columns: RowReader) -> Iterator[pa.RecordBatch]:
    """Yield slices with the wanted columns, as plain types. ConfigError if a column is missing."""
    import pyarrow as pa

    whole = _parquet_batches(path, columns) if path.suffix != ".arrow" else _arrow_batches(path)
    for batch in whole:
        if not batch.num_rows:  # the first slice has all columns
            columns.check_names(batch.schema.names, str(path))
            columns.check_kept(batch.schema.names, str(path))
            continue
        wanted = columns.wanted(batch.schema.names)
        batch = batch.select(wanted)
        arrays = [
            column.dictionary_decode() if pa.types.is_dictionary(column.type) else column for column in batch.columns
        ]
        schema = pa.schema([pa.field(name, column.type) for name, column in zip(wanted, arrays, strict=True)])
        batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
        for start in range(0, batch.num_rows, SLICE_ROWS):
            yield batch.slice(start, SLICE_ROWS)


def _parquet_batches(path: Path, columns: RowReader) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, buffer_size=READ_BYTES, pre_buffer=False) as file:
        schema = file.schema_arrow
        if len(set(schema.names)) != len(schema.names):
            raise ConfigError(f"{path}: two columns have the same name, found {', '.join(schema.names)}; rename one")
        yield pa.RecordBatch.from_pylist([], schema=schema)
        yield from file.iter_batches(SLICE_ROWS, columns=columns.wanted(schema.names), use_threads=False)


def _arrow_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Read the file as a stream (datasets' own form) or as an Arrow file."""
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        try:
            stream: Any = pa.ipc.open_stream(source)
        except pa.ArrowInvalid:
            source.seek(0)
            file = pa.ipc.open_file(source)
            yield pa.RecordBatch.from_pylist([], schema=file.schema)
            yield from (file.get_batch(number) for number in range(file.num_record_batches))
            return
        yield pa.RecordBatch.from_pylist([], schema=stream.schema)
        yield from stream


def _row(batch: pa.RecordBatch, index: int) -> TableRow:
    (row,) = batch.slice(index, 1).to_pylist(maps_as_pydicts="lossy")
    return TableRow(row)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _state(path: Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns
