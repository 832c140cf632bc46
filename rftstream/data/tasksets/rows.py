"""Rows of data files, found by their number: JSON lines, a JSON list, CSV, and several files one after the other.

A file is scanned once. For JSON lines and CSV, only the offsets of rows are kept.
"""

from __future__ import annotations

import csv
import hashlib
import os
from array import array
from bisect import bisect_right
from codecs import BOM_UTF8
from collections.abc import Iterator, KeysView, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Protocol

import msgspec

from rftstream.config.parts import registry
from rftstream.data.tasksets.fields import a_kind
from rftstream.data.tasksets.row_index import LARGE_ROWS, KeptIndex, RowIndex
from rftstream.errors import ConfigError

CHECKED_AT_ONCE = 1_000
"""Number of rows that one call of `check_some` checks."""

_most: ContextVar[int | None] = ContextVar("most rows of a file", default=None)


@contextmanager
def first_rows(count: int) -> Iterator[None]:
    """Open only about the first `count` rows of files in this block, to see quickly whether they can be read. Lengths
    and digests are those of these rows."""
    token = _most.set(count)
    try:
        yield
    finally:
        _most.reset(token)


def are_enough(num_rows: int) -> bool:
    """Return whether no further rows of a file are wanted. Sources of rows ask it while they read."""
    most = _most.get()
    return most is not None and num_rows >= most


class RowReader(Protocol):
    """Converts rows. A source of rows calls it for each row when a file is opened. ConfigErrors name the place."""

    def check_names(self, names: Sequence[str], where: str) -> None:
        """Check the names of the mapped columns. ConfigError if one is missing."""

    def check_kept(self, names: Sequence[str], where: str) -> None:
        """Check the columns to keep, once for each file. ConfigError if one is missing. By default no columns are
        kept."""
        return

    def check(self, row: Mapping[str, Any], where: str, num_bytes: int = 0) -> None:
        """Check a row when its file is opened. ConfigError if it cannot be converted. `num_bytes`: its size in the
        file, if known; only large rows are checked for their size."""

    def wanted(self, names: Sequence[str]) -> list[str]:
        """Return the file's columns that have to be read; by default all."""
        return list(names)

    def chat_path(self, names: Sequence[str]) -> str:
        """Return the path of the first messages in a file with these columns. Empty if several forms are possible; the
        check of a row then says what is missing."""
        return ""


class RowSource(Protocol):
    """Rows of one or more files, found by their number. A taskset or `Demonstrations` opens it and reads rows."""

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the contents, as hex digits."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> dict[str, Any]:
        """Return a row, as a new dict. ConfigError if the file has changed since it was opened."""

    def where(self, index: int) -> str:
        """Return file and line of a row, for errors."""


class _PlacedRows:
    """A base of sources that know the offset of each row, and read a row when it is needed. A subclass fills `_offsets`
    and `_state` while it scans the whole file."""

    kind: ClassVar[str]
    """Expected kind of file, for errors."""
    _state: tuple[int, int]

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets = array("q")

    def __len__(self) -> int:
        return len(self._offsets)

    @contextmanager
    def _at(self, index: int) -> Iterator[BinaryIO]:
        """Open the file at the beginning of a row. ConfigError if the file has changed."""
        with _open(self._path, self.kind) as file:
            _check_state(file, self._state, self._path)
            file.seek(self._offsets[index])
            yield file


class JsonLines(_PlacedRows):
    """A RowSource over a file with one JSON object per line. Blank lines are skipped."""

    kind = "a file of JSON lines"

    def __init__(self, path: Path, columns: RowReader, kept: KeptIndex | None = None) -> None:
        """`kept`: the place of a large file's index. Its owner then calls `check_some` until all rows are checked."""
        super().__init__(path)
        self._columns, self._kept = columns, kept
        self._names: KeysView[str] | None = None
        """Column names of the last checked row."""
        with _open(path, self.kind) as file:
            known = None if kept is None else kept.load(file)
            self._index = self._scan(file) if known is None else known
            self._state = _state(file)
            self._offsets, self._lines, self.digest = self._index.offsets, self._index.lines, self._index.digest
            if kept is not None and known is None and len(self) >= LARGE_ROWS:
                kept.save(file, self._index)
        if kept is None or len(self) < LARGE_ROWS:
            while self.check_some():
                pass

    def row(self, index: int) -> dict[str, Any]:
        """Read a row from the file. ConfigError if the file has changed."""
        with self._at(index) as file:
            return _json_object(file.readline(), self.where(index), "one object a line")

    def where(self, index: int) -> str:
        """Return the file and the line of a row."""
        return f"{self._path}:{self._lines[index]}"

    def _scan(self, file: BinaryIO) -> RowIndex:
        """Return where every line begins, and the file's digest."""
        index = RowIndex(offsets=array("q"), lines=array("q"), digest="")
        sha256 = hashlib.sha256()
        offset = 0
        for number, line in enumerate(file, start=1):
            sha256.update(line)
            if number == 1 and line.startswith(BOM_UTF8):
                offset, line = len(BOM_UTF8), line.removeprefix(BOM_UTF8)
            if line.strip():
                index.offsets.append(offset)
                index.lines.append(number)
            offset += len(line)
            if are_enough(len(index.offsets)):
                break
        if not index.offsets:
            raise ConfigError(f"{self._path}: is empty, expected one JSON object a line")
        index.digest = sha256.hexdigest()
        return index

    def check_some(self) -> bool:
        """Check some unchecked rows. Return whether there are more. ConfigError if a row cannot be converted."""
        begin, end = self._index.num_checked, min(len(self), self._index.num_checked + CHECKED_AT_ONCE)
        if begin == end:
            return False
        with self._at(begin) as file:
            for index in range(begin, end):
                self._check(next(filter(bytes.strip, file), b""), self.where(index))
            self._index.num_checked = end
            if end == len(self) >= LARGE_ROWS and self._kept is not None:
                self._kept.save(file, self._index)
        return end < len(self)

    def _check(self, line: bytes, where: str) -> None:
        row = _json_object(line, where, "one object a line")
        if self._names is None:
            self._columns.check_kept(list(row), where)
        if row.keys() != self._names:
            self._names = row.keys()
            self._columns.check_names(list(row), where)
        self._columns.check(row, where, len(line))


class JsonList:
    """A RowSource over a file with one list of objects. Its bytes stay in memory, since the file cannot be read in
    part."""

    def __init__(self, path: Path, columns: RowReader) -> None:
        self._path = path
        with _open(path, "a JSON file") as file:
            data = file.read()
        try:
            self._rows = msgspec.json.decode(data.removeprefix(BOM_UTF8), type=list[msgspec.Raw])
        except (msgspec.DecodeError, RecursionError) as error:
            raise ConfigError(f"{path}: not JSON: {error}; expected a list of objects") from None
        if not self._rows:
            raise ConfigError(f"{path}: is empty, expected a list of objects")
        self.digest = hashlib.sha256(data).hexdigest()
        columns.check_kept(list(self.row(0)), self.where(0))
        for index in range(len(self._rows)):
            row = self.row(index)
            columns.check_names(list(row), self.where(index))
            columns.check(row, self.where(index), len(bytes(self._rows[index])))
            if are_enough(index + 1):
                break

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        """Decode a row. ConfigError if it is no object."""
        return _json_object(self._rows[index], self.where(index), "an object")

    def where(self, index: int) -> str:
        """Return the file and the number of a row."""
        return f"{self._path}: row {index}"


class Csv(_PlacedRows):
    """A RowSource over a file whose first line names the columns. Cells are texts, exactly as in the file."""

    kind = "a CSV file"

    def __init__(self, path: Path, columns: RowReader) -> None:
        super().__init__(path)
        self._delimiter = "\t" if path.suffix == ".tsv" else ","
        self._lines = array("q")
        sha256 = hashlib.sha256()
        with _open(path, self.kind) as file:
            lines = _Lines(file, path, sha256)
            reader = csv.reader(lines, delimiter=self._delimiter, strict=True)
            self._names = next(self._cells(reader, "the first line"), [])
            if len(set(self._names)) != len(self._names):
                raise ConfigError(f"{path}: two columns have the same name, found {', '.join(self._names)}; rename one")
            if len(self._names) == 1 and (other := set(";\t|,") - {self._delimiter} & set(self._names[0])):
                raise ConfigError(
                    f"{path}: found {''.join(other)!r} between the columns, expected {self._delimiter!r}; save it anew"
                )
            columns.check_names(self._names, str(path))
            columns.check_kept(self._names, str(path))
            line, offset = reader.line_num + 1, lines.offset
            for cells in self._cells(reader, "a row"):
                if cells:
                    self._offsets.append(offset)
                    self._lines.append(line)
                    row = self._named(cells, self.where(len(self) - 1))
                    columns.check(row, self.where(len(self) - 1), sum(map(len, cells)))
                line, offset = reader.line_num + 1, lines.offset
                if are_enough(len(self)):
                    break
            self._state = _state(file)
        if not self._offsets:
            raise ConfigError(f"{path}: has no rows, expected a line with the names of columns and one for each row")
        self.digest = sha256.hexdigest()

    def row(self, index: int) -> dict[str, Any]:
        """Read a row from the file. ConfigError if the file has changed."""
        with self._at(index) as file:
            reader = csv.reader(_Lines(file, self._path), delimiter=self._delimiter, strict=True)
            return self._named(next(self._cells(reader, "a row"), []), self.where(index))

    def where(self, index: int) -> str:
        """Return the file and the line that a row begins in."""
        return f"{self._path}:{self._lines[index]}"

    def _named(self, cells: list[str], where: str) -> dict[str, Any]:
        if len(cells) != len(self._names):
            raise ConfigError(f"{where}: found {len(cells)} cells, expected {len(self._names)} as in the first line")
        return dict(zip(self._names, cells, strict=True))

    def _cells(self, reader: Any, what: str) -> Iterator[list[str]]:
        try:
            yield from reader
        except csv.Error as error:
            raise ConfigError(f"{self._path}:{reader.line_num}: {what} is not CSV: {error}") from None


class _Lines:
    """Yields the decoded lines of a file, and knows the offset of the next one."""

    def __init__(self, file: BinaryIO, path: Path, sha256: Any = None) -> None:
        self._file, self._path, self._sha256 = file, path, sha256
        self.offset = 0

    def __iter__(self) -> Iterator[str]:
        for number, line in enumerate(self._file, start=1):
            start, self.offset = self.offset, self.offset + len(line)
            if self._sha256 is not None:
                self._sha256.update(line)
            try:
                yield line.decode("utf-8" if start else "utf-8-sig")
            except UnicodeDecodeError as error:
                raise ConfigError(f"{self._path}:{number}: not UTF-8: {error}; save it as UTF-8") from None


class Chain:
    """A RowSource over several files, one after the other."""

    def __init__(self, parts: Sequence[RowSource]) -> None:
        self._parts = parts
        self._ends = list(accumulate(len(part) for part in parts))

    @property
    def digest(self) -> str:
        """Return the digest of the digests of all files."""
        return hashlib.sha256("".join(part.digest for part in self._parts).encode()).hexdigest()

    def __len__(self) -> int:
        return self._ends[-1]

    def row(self, index: int) -> dict[str, Any]:
        """Return a row from the file that contains it."""
        part, inner = self._place(index)
        return part.row(inner)

    def where(self, index: int) -> str:
        """Return the place of a row in the file that contains it."""
        part, inner = self._place(index)
        return part.where(inner)

    def _place(self, index: int) -> tuple[RowSource, int]:
        number = bisect_right(self._ends, index)
        return self._parts[number], index - (self._ends[number - 1] if number else 0)


def json_rows(path: Path, columns: RowReader) -> RowSource:
    """Open a `.json` file, which may contain a list or JSON lines."""
    with _open(path, "a JSON file") as file:
        lines = (line.removeprefix(BOM_UTF8).lstrip() for line in file)
        first = next((line[:1] for line in lines if line), b"")
    return JsonList(path, columns) if first == b"[" else JsonLines(path, columns)


def _open(path: Path, expected: str) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        text = "no such file" if isinstance(error, FileNotFoundError) else str(error.strerror)
        raise ConfigError(f"{path}: {text}; expected {expected}{registry.near_file(path)}") from None


def _state(file: BinaryIO) -> tuple[int, int]:
    """Return values that change when the file is written to."""
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def _check_state(file: BinaryIO, state: tuple[int, int], path: Path) -> None:
    if _state(file) != state:
        raise ConfigError(f"{path}: changed since the run began with it; restore it, or start a new run")


def _json_object(data: bytes | msgspec.Raw, where: str, expected: str) -> dict[str, Any]:
    try:
        row = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}; expected {expected}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: found {a_kind(row)}, expected an object")
    return row
