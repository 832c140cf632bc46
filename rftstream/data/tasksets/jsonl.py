"""JSON lines: one problem a line. The file is gone through once, line by line; only the lines' offsets are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rftstream.data.tasksets.columns import Columns, TableConfig
from rftstream.data.tasksets.rows import JsonLines, RowReader, RowSource
from rftstream.data.tasksets.table import RowTaskset


class JsonlTaskset(RowTaskset):
    """The rows of one file of JSON lines."""

    @dataclass(frozen=True, kw_only=True)
    class Config(TableConfig):
        """The settings in `[tasksets.NAME.options]`."""

    def __init__(self, config: Config, *, location: str, columns: Mapping[str, str], system: str | None) -> None:
        path = Path(location)
        mapping = Columns(columns, system=system, config=config, data_source=path.stem, folder=path.parent)
        super().__init__(self.open_rows(config, location, mapping), mapping, config, str(path))

    @staticmethod
    def open_rows(config: Config, location: str, columns: RowReader) -> RowSource:
        """Open the rows of the file for `columns`."""
        return JsonLines(Path(location), columns)
