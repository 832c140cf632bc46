"""Tasksets over rows of files: the rows that they use, and the meaning of the rows. See hf.py for datasets."""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rftstream.config.parts import registry
from rftstream.contracts.tasks import Problem
from rftstream.data.tasksets.arrow import ArrowRows
from rftstream.data.tasksets.columns import Columns, TableConfig
from rftstream.data.tasksets.order import shuffle_index
from rftstream.data.tasksets.row_index import kept_index
from rftstream.data.tasksets.rows import Csv, JsonLines, RowReader, RowSource
from rftstream.errors import ConfigError


class RowTaskset:
    """A taskset whose problems are rows of a table. A subclass opens the rows of its kind of source."""

    def __init__(self, rows: RowSource, columns: Columns, config: TableConfig, source: str) -> None:
        self._rows, self._columns, self._source = rows, columns, source
        self._skip, self._seed = config.skip, config.shuffle_seed
        self._size = max(0, len(rows) - config.skip)
        if not self._size:
            raise ConfigError(f"{source}: skip = {config.skip}, but there are only {len(rows):,} rows; lower it")
        if config.size is not None:
            self._size = min(self._size, config.size)

    @property
    def digest(self) -> str:
        """Return the digest of the rows and of all settings that affect the problems."""
        used = [self._skip, self._size] if self._seed is None else [self._skip, self._size, self._seed]
        text = json.dumps([self._rows.digest, self._columns.identity, *used], sort_keys=True)
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"

    def __len__(self) -> int:
        return self._size

    def chat_column(self) -> str | None:
        """Return the column of the prompt if the first problem's prompt is a list of messages; None if it is a text."""
        return self._columns.chat_column(self._rows.row(self._row(0)))

    def problem(self, index: int) -> Problem:
        """Return the problem with this index. ConfigError, which names file and line, if there is none."""
        if not 0 <= index < self._size:
            raise ConfigError(f"{self._source}: problem {index}, expected below {self._size}")
        row = self._row(index)
        return self._columns.problem(self._rows.row(row), self._rows.where(row))

    def where(self, index: int) -> str:
        """Return the name of the file, and the line or row of a problem."""
        return self._rows.where(self._row(index)).rpartition("/")[2]

    def _row(self, index: int) -> int:
        place = self._skip + index
        return place if self._seed is None else shuffle_index(place, len(self._rows), seed=self._seed)


class JsonlTaskset(RowTaskset):
    """JSON lines: one problem per line. The file is scanned once, line by line; only the lines' offsets are kept.

    In a run (row_index.py) a large file is opened without checking all of its rows. The feeder then calls `check_some`
    between transactions until all rows are checked."""

    @dataclass(frozen=True, kw_only=True)
    class Config(TableConfig):
        """The settings in `[tasksets.NAME.options]`."""

    def __init__(self, config: Config, *, location: str, columns: Mapping[str, str], system: str | None) -> None:
        path = Path(location)
        mapping = Columns(columns, system=system, config=config, data_source=path.stem, folder=path.parent)
        settings = [mapping.identity, sorted(columns), config.image_folder]
        self._lines = JsonLines(path, mapping, kept_index(path, settings))
        super().__init__(self._lines, mapping, config, str(path))

    def check_some(self) -> bool:
        """Check some unchecked rows. Return whether there are more. ConfigError for an invalid row."""
        return self._lines.check_some()

    @staticmethod
    def open_rows(config: Config, location: str, columns: RowReader) -> RowSource:
        """Open the rows of the file for `columns`."""
        return JsonLines(Path(location), columns)


class CsvTaskset(RowTaskset):
    """CSV, or TSV by the file's ending. The first line names the columns; cells are texts, exactly as in the file."""

    @dataclass(frozen=True, kw_only=True)
    class Config(TableConfig):
        """The settings in `[tasksets.NAME.options]`."""

    def __init__(self, config: Config, *, location: str, columns: Mapping[str, str], system: str | None) -> None:
        path = Path(location)
        mapping = Columns(columns, system=system, config=config, data_source=path.stem, folder=path.parent)
        super().__init__(self.open_rows(config, location, mapping), mapping, config, location)

    @staticmethod
    def open_rows(config: Config, location: str, columns: RowReader) -> RowSource:
        """Open the rows of the file for `columns`."""
        return Csv(Path(location), columns)


class ParquetTaskset(RowTaskset):
    """Parquet: a file, a pattern (`data/train-*.parquet`) or a folder of files. Read in slices, never as a whole.

    The files come in the order of their names."""

    @dataclass(frozen=True, kw_only=True)
    class Config(TableConfig):
        """The settings in `[tasksets.NAME.options]`."""

    def __init__(self, config: Config, *, location: str, columns: Mapping[str, str], system: str | None) -> None:
        source = Path(location).stem.rstrip("-_*?[]")
        mapping = Columns(columns, system=system, config=config, data_source=source, folder=_folder(location))
        super().__init__(self.open_rows(config, location, mapping), mapping, config, location)

    @staticmethod
    def open_rows(config: Config, location: str, columns: RowReader) -> RowSource:
        """Open the rows of the files for `columns`."""
        return ArrowRows(find_files(location), columns, location)


def find_files(location: str) -> list[Path]:
    """Return the files in the order of their names. ConfigError if there are none."""
    path = Path(location)
    if path.is_dir():
        found = [one for one in path.rglob("*.parquet") if not _hidden(one.relative_to(path))]
    elif path.exists():
        found = [path]
    else:
        found = [Path(path) for path in glob.glob(location, recursive=True) if Path(path).is_file()]
    if not found:
        text = "no such file" if not (path.is_dir() or glob.has_magic(location)) else "no *.parquet there"
        text = "nothing matches" if glob.has_magic(location) and not path.is_dir() else text
        expected = f"expected a Parquet file, a pattern or a folder of such files{registry.near_file(path)}"
        raise ConfigError(f"{location}: {text}; {expected}")
    return sorted(found)


def _folder(location: str) -> Path:
    """Return the folder of a file, a pattern or a folder of files."""
    path = Path(location)
    while glob.has_magic(str(path)):
        path = path.parent
    return path if path.is_dir() else path.parent


def _hidden(path: Path) -> bool:
    """Return whether the file is a leftover of another program, as in `_temporary/` or `.part-0.parquet`."""
    return any(part.startswith((".", "_")) for part in path.parts)
