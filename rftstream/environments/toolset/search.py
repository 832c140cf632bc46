"""Search over a corpus on this machine, ranked by BM25."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from rftstream.environments.toolset.arguments import cut, shown
from rftstream.environments.toolset.base import ToolError
from rftstream.environments.toolset.bm25 import Bm25
from rftstream.errors import ConfigError

MAX_QUERY_CHARACTERS = 1000


class Search:
    """Find passages of the corpus."""

    tool_name = "search"

    def __init__(
        self,
        *,
        corpus: str,
        text: str = "text",
        title: str = "title",
        results: Annotated[int, Meta(ge=1)] = 3,
        max_chars: Annotated[int, Meta(ge=1)] = 1000,
    ) -> None:
        self._corpus = open_corpus(corpus, text, title)
        self._results, self._max_chars = results, max_chars

    def __call__(self, query: str) -> str:
        """Search the corpus for passages with these words.

        Args:
            query: Some words that the passage has.
        """
        if len(query) > MAX_QUERY_CHARACTERS:
            raise ToolError(f"a query of {len(query):,} characters, expected at most {MAX_QUERY_CHARACTERS:,}")
        found = self._corpus.index.best(query, self._results)
        if not found:
            return f"Nothing found for {shown(query)}."
        return "\n".join(f"[{rank}] {self._passage(place)}" for rank, (place, _) in enumerate(found, start=1))

    def _passage(self, place: int) -> str:
        title, text = self._corpus.passages[place]
        return cut(f"{title}: {text}" if title else text, self._max_chars)


@dataclass(frozen=True, slots=True)
class Corpus:
    """Passages with their index. Each process reads them once, for all rollouts; they never change."""

    passages: tuple[tuple[str, str], ...]
    """Title and text."""
    index: Bm25


_opening = threading.Lock()


def open_corpus(path: str, text: str, title: str) -> Corpus:
    """Return the corpus in a jsonl file with the columns `text` and `title`. The file is read again only if it has
    changed. ConfigError names file and line."""
    try:
        found = Path(path).stat()
    except OSError as error:
        raise ConfigError(f"environments.tools.options.search: {path}: {error.strerror}; name a jsonl file") from None
    with _opening:  # the first rollouts start together, and must not each read the file
        return _read(path, text, title, found.st_mtime_ns, found.st_size)


@functools.lru_cache(maxsize=4)
def _read(path: str, text: str, title: str, changed: int, size: int) -> Corpus:
    passages = tuple(_passages(path, text, title))
    if not passages:
        raise ConfigError(f"{path}: no line in it, expected an object with {text!r} in each")
    return Corpus(passages, Bm25(f"{title} {text}" for title, text in passages))


def _passages(path: str, text: str, title: str) -> Iterator[tuple[str, str]]:
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{where}: not JSON: {error}") from None
            if not isinstance(row, dict) or not isinstance(row.get(text), str):
                raise ConfigError(f"{where}: expected an object with a text as {text!r}; set text to another column")
            yield str(row.get(title) or ""), row[text]
