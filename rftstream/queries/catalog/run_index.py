"""The index of an open run: brought up to date for each question, and free for others between two of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rftstream.errors import ConfigError
from rftstream.queries.catalog.database import CatalogReader
from rftstream.queries.catalog.moments import Moment
from rftstream.queries.catalog.updating import CatalogUpdater
from rftstream.queries.curves.history import HistoryReader
from rftstream.runs.folder import OpenRun
from rftstream.service.role import Log

OTHERS_S = 20.0
"""Longest time without progress of another process that writes the index, in seconds. Then its state is taken."""


Page = tuple[CatalogReader, Moment]
"""An open catalog, and the moment now."""


class RunIndex:
    """Answers questions from the index that the studio uses, too. `Run` makes one, and calls `close` at the end."""

    def __init__(self, run: OpenRun) -> None:
        self._run, self._thread = run, threading.get_ident()
        self._updater = CatalogUpdater(run)
        self._history = HistoryReader(Log(run.transport))

    @property
    def run(self) -> OpenRun:
        """Return the open run. ConfigError in another thread than the one that opened it, to which its log belongs."""
        self._check_thread()
        return self._run

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise ConfigError(
                f"{self._run.run_id}: opened in another thread, to which its log belongs; open it in this thread, too"
            )

    @property
    def folder(self) -> Path:
        """Return the folder of the index."""
        return self._updater.path.parent

    def history(self) -> HistoryReader:
        """Return steps, evaluations and announcements up to now."""
        self._check_thread()
        self._history.read()
        return self._history

    @contextmanager
    def catalog(self, *, texts: bool = False, fresh: bool = True) -> Iterator[Page | None]:
        """Open the catalog, with the moment now. None if the run has not begun. `texts`: it has to know what every
        rollout said. With `fresh=False` it is as it was at the last question, for the next page of an answer."""
        if fresh:
            try:
                self._update(texts)
            finally:
                self._updater.rest()
        catalog = self._updater.open_catalog()
        if catalog is None:
            yield None
            return
        with catalog:
            yield catalog, Moment(version=self._history.history().version)

    def _update(self, texts: bool) -> None:
        """Read what is on the log now. If another process holds the index, wait for it as long as it comes on."""
        updater, history = self._updater, self.history()
        wanted, seen, since = None, None, time.monotonic()
        while True:
            while updater.update() and updater.done < updater.total:
                pass
            while texts and updater.read_texts(history.history().evaluations):
                pass
            found = (updater.done, updater.texts.done)
            wanted = wanted or (updater.total, updater.texts.total)
            if not updater.is_behind or (found[0] >= wanted[0] and (not texts or found[1] >= wanted[1])):
                return
            if found != seen:
                seen, since = found, time.monotonic()
            if time.monotonic() - since > OTHERS_S:
                return
            time.sleep(0.05)

    def close(self) -> None:
        """Close the index and the run's log."""
        self._updater.close()
        self._run.transport.close()
