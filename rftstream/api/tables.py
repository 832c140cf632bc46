"""Lazy tables of a run: iterated a page at a time, or turned into a frame of the columns that are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rftstream.api.html import html_table
from rftstream.config.parts.registry import suggest
from rftstream.errors import ConfigError, importing

if TYPE_CHECKING:
    import datasets
    import pandas
    import polars

T = TypeVar("T")
S = TypeVar("S")

NUM_SHOWN = 20
"""Rows that a notebook shows of a table."""
EXTRA = "rftstream[data]"
"""The extra that brings pandas, pyarrow and datasets."""


@dataclass(frozen=True, kw_only=True)
class Table(Generic[T]):
    """Some rows of a run, newest first unless an order is given. The methods of `Run` make it.

    Nothing is read before it is iterated, shown or turned into a frame, and then only as much as that needs. Each time
    it is read anew, so in a live run it grows.
    """

    name: str
    """Name of the method that made it."""
    read: Callable[[int | None], Iterator[T]]
    """Yields at most so many rows; None: all."""
    to_row: Callable[[T], Mapping[str, Any]]
    """Returns the columns of a row."""
    columns: Sequence[str]
    """Columns of its frames that need no record of the log. Frames of steps and evaluations have their metrics, too."""
    limit: int | None = None
    """Most rows of the table; None: as many as there are."""
    on_log: Mapping[str, Callable[[T], Any]] = field(default_factory=dict)
    """Further columns, for frames that name them -> their value, for which a record of the log is read."""

    def __iter__(self) -> Iterator[T]:
        """Yield the rows. They are read from the run a page at a time."""
        return islice(self.read(self.limit), self.limit)

    def head(self, n: int = 5) -> Table[T]:
        """Return a table of the first `n` rows."""
        if not isinstance(n, int) or n < 0:
            raise ConfigError(f"{self.name}: head: got {n!r}, expected a number of rows, 0 or more")
        return replace(self, limit=n if self.limit is None else min(n, self.limit))

    def first(self) -> T | None:
        """Return the first row, or None if there is none."""
        return next(iter(self.head(1)), None)

    def count(self) -> int:
        """Count the rows. All of them are read."""
        return sum(1 for _ in self)

    def to_pandas(self, columns: Sequence[str] | None = None) -> pandas.DataFrame:
        """Return a DataFrame. `columns`: only these; None: all that need no record of the log."""
        with self._importing("pandas"):
            import pandas
        del pandas
        return self._arrow(columns).to_pandas()

    def to_polars(self, columns: Sequence[str] | None = None) -> polars.DataFrame:
        """Return a DataFrame of polars. `columns`: as for `to_pandas`."""
        with self._importing("polars", "polars"):
            import polars
        return polars.from_arrow(self._arrow(columns))

    def to_dataset(self, columns: Sequence[str] | None = None) -> datasets.Dataset:
        """Return a Dataset of Hugging Face. `columns`: as for `to_pandas`."""
        with self._importing("datasets"):
            import datasets
        return datasets.Dataset(self._arrow(columns, plain=True))

    def _importing(self, package: str, install: str = EXTRA) -> Any:
        return importing(f"{self.name}: a frame", package, install=install)

    def _arrow(self, columns: Sequence[str] | None, *, plain: bool = False) -> Any:
        """Return a table of Arrow. `plain`: without dictionaries, which a Dataset does not take."""
        with self._importing("pyarrow"):
            from rftstream.api.frames import table_of_rows
        named = [name for name in columns or () if name in self.on_log]
        return table_of_rows([self._row(one, named) for one in self], self._chosen, columns)

    def _row(self, one: T, named: Iterable[str]) -> dict[str, Any]:
        """Return the columns of a row, and those of its record that are named."""
        return {**self.to_row(one), **{name: self.on_log[name](one) for name in named}}

    def _chosen(self, columns: Sequence[str] | None, known: Iterable[str]) -> list[str]:
        """Return the columns that are wanted of those that there are. ConfigError for one that is not there."""
        if isinstance(columns, str):
            raise ConfigError(f"{self.name}: columns: got the text {columns!r}, expected a list: [{columns!r}]")
        names = list(dict.fromkeys((*self.columns, *known)))
        if columns is None:
            return names
        return [check_word(f"{self.name}: column", one, (*names, *self.on_log)) for one in columns]

    def __repr__(self) -> str:
        """Return the name of the table, since its rows may be many."""
        return f"<table of {self.name}; iterate it, or call to_pandas(), to_polars() or to_dataset()>"

    def _repr_html_(self) -> str:
        """Return its first rows as HTML, for notebooks."""
        items = list(self.head(NUM_SHOWN + 1))
        rows = [self._row(one, self.on_log) for one in items[:NUM_SHOWN]]
        return html_table(rows, more=len(items) > NUM_SHOWN)


def check_word(where: str, word: str, known: Iterable[str]) -> str:
    """Return the word if it is known. ConfigError names the nearest one."""
    names = list(known)
    if word not in names:
        raise ConfigError(f"{where}: unknown {word!r}; {suggest(word, names)}")
    return word


def pages(read: Callable[[S | None, int], tuple[Sequence[T], S | None]], page: int) -> Iterator[T]:
    """Yield the rows of all pages. `read` gets the end of the page before and a number of rows, and returns rows with
    their end; None: they were the last."""
    after: S | None = None
    while True:
        rows, after = read(after, page)
        yield from rows
        if after is None:
            return
