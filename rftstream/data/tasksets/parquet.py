"""Parquet: a file, a pattern (`data/train-*.parquet`) or a folder of files. Read in slices, never as a whole."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rftstream.data.tasksets.arrow import ArrowRows
from rftstream.data.tasksets.columns import Columns, TableConfig
from rftstream.data.tasksets.rows import RowReader, RowSource
from rftstream.data.tasksets.table import RowTaskset
from rftstream.errors import ConfigError


class ParquetTaskset(RowTaskset):
    """The rows of Parquet files, in the order of their names."""

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
        found = [Path(one) for one in glob.glob(location, recursive=True) if Path(one).is_file()]
    if not found:
        text = "no such file" if not (path.is_dir() or glob.has_magic(location)) else "no *.parquet there"
        text = "nothing matches" if glob.has_magic(location) and not path.is_dir() else text
        raise ConfigError(f"{location}: {text}; expected a Parquet file, a pattern or a folder of such files")
    return sorted(found)


def _folder(location: str) -> Path:
    """Return the folder that a file, a pattern or a folder of files stands for."""
    path = Path(location)
    while glob.has_magic(str(path)):
        path = path.parent
    return path if path.is_dir() else path.parent


def _hidden(path: Path) -> bool:
    """Return whether other programs left the file behind, as in `_temporary/` or `.part-0.parquet`."""
    return any(part.startswith((".", "_")) for part in path.parts)
