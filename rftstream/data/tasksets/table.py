"""A taskset over rows: which rows it takes, and what they mean."""

from __future__ import annotations

import hashlib
import json

from rftstream.contracts.tasks import Problem
from rftstream.data.tasksets.columns import Columns, TableConfig
from rftstream.data.tasksets.rows import RowSource
from rftstream.errors import ConfigError


class RowTaskset:
    """A taskset whose problems are rows of a table. A subclass opens the rows of its kind of source."""

    def __init__(self, rows: RowSource, columns: Columns, config: TableConfig, source: str) -> None:
        self._rows, self._columns, self._source = rows, columns, source
        self._skip = config.skip
        self._size = max(0, len(rows) - config.skip)
        if not self._size:
            raise ConfigError(f"{source}: skip = {config.skip}, but there are only {len(rows):,} rows; lower it")
        if config.size is not None:
            self._size = min(self._size, config.size)

    @property
    def digest(self) -> str:
        """Return the digest of the rows and of all settings that decide the problems."""
        text = json.dumps([self._rows.digest, self._columns.identity, self._skip, self._size], sort_keys=True)
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"

    def __len__(self) -> int:
        return self._size

    def chat_column(self) -> str | None:
        """Return the column in which the first problem's prompt is a list of messages; None if it is a text."""
        return self._columns.chat_column(self._rows.row(self._skip))

    def problem(self, index: int) -> Problem:
        """Return the problem of an index. ConfigError, which names file and line, if there is none."""
        if not 0 <= index < self._size:
            raise ConfigError(f"{self._source}: problem {index}, expected below {self._size}")
        row = self._skip + index
        return self._columns.problem(self._rows.row(row), self._rows.where(row))
