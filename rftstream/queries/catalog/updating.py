"""Keeps a catalog up to date: reads each topic from the position where the catalog ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.versions import EvalResult
from rftstream.queries.audits.rows import LogChanged, Mark, NewRecords
from rftstream.queries.catalog.database import CatalogDatabase, CatalogReader, Connection, open_catalog
from rftstream.queries.catalog.texts import TextReader
from rftstream.queries.catalog.writer import READ, CatalogWriter
from rftstream.queries.facts.database import folder_of, identity_of
from rftstream.runs.folder import OpenRun
from rftstream.service.control_view import read_manifest

FILE = "studio.sqlite3"
Ends = dict[str, dict[TopicPartition, int]]
"""Topic -> partition -> the offset at which it ends."""
BODIES = "outcomes"
"""The topic that is read with its bodies."""
CHUNK_RECORDS = 50_000
"""Records of one transaction while there is much to read. Later updates are smaller, and fit into one."""


class CatalogUpdater:
    """Reads a run's log into its catalog. One thread makes it, calls `update` at intervals, and `close` at the end.

    One updater of a run holds a lock beside the file until it calls `rest` or `close`. Meanwhile those of other
    processes do not write the file, and only give its path. If the run's place cannot be written to, the catalog is in
    a temporary folder and ends with the updater.
    """

    def __init__(self, run: OpenRun, *, folder: Path | None = None, chunk_records: int = CHUNK_RECORDS) -> None:
        """`folder`: the folder of the file; by default that of the run's index."""
        self._run, self._chunk_records = run, chunk_records
        self._cleanup = contextlib.ExitStack()
        self._folder = self._usable(folder or folder_of(run))
        self._database: CatalogDatabase | None = None
        self._lock: int | None = None
        """The open lock file. None: the run has not begun."""
        self._holds = False
        self._identity = ""
        self._headers, self._bodies = NewRecords(run.transport), NewRecords(run.transport, bodies=True)
        self.path = self._folder / FILE
        """The catalog file. `open_catalog` opens it for reading."""
        self.texts = TextReader(run)
        self.done = self.total = 0
        """Offsets read so far and offsets in all, at the last update; for a progress bar."""

    def update(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Read the new records. Return whether there were any. `should_stop` can end it early."""
        if not self._opened():
            return False
        if not self._holds or self._database is None:
            self._look_at_the_others()
            return False
        try:
            return self._read(self._database, should_stop)
        except LogChanged:
            self._database.clear()
            return self._read(self._database, should_stop)

    def read_texts(self, results: Iterable[EvalResult], has_time: Callable[[], bool] = lambda: False) -> bool:
        """Read some of the texts that the catalog lacks: of rollouts, and of these results of evaluations. It goes on
        while the caller `has_time`. Return whether there may be more."""
        if not self._holds or self._database is None:
            return False
        try:
            return self.texts.read(self._database, results, has_time)
        except LogChanged:
            self._database.clear()
            return True

    def open_catalog(self) -> CatalogReader | None:
        """Open the catalog for reading, in any thread. The caller closes it. None if there is no catalog yet."""
        return None if self._lock is None else open_catalog(self.path)

    @property
    def is_behind(self) -> bool:
        """Whether another process that writes the catalog has not read all of the log yet."""
        return not self._holds and self._lock is not None and (self.done < self.total or self.texts.num_left > 0)

    def rest(self) -> None:
        """Give up the lock until the next update, so that another process can write the file, and close readers."""
        self._rest_reading()
        if self._holds and self._lock is not None:
            self._holds = False
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _rest_reading(self) -> None:
        for reader in (self._headers, self._bodies):
            reader.rest()

    def close(self) -> None:
        """Close the file and give up the lock."""
        self._rest_reading()
        self.texts.rest()
        if self._database is not None:
            self._database.close()
        self._cleanup.close()

    # ------------------------------------------------------------------------------------------ the file

    def _usable(self, folder: Path) -> Path:
        """Return the folder if it can be written to, else a temporary one."""
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
        return Path(self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="rftstream-studio-")))

    def _opened(self) -> bool:
        """Take the lock and open the file once the run has a manifest. Return whether there is a catalog."""
        if self._lock is None:
            manifest = read_manifest(self._run.transport)
            if manifest is None:  # the feeder has not begun
                return False
            self._identity = identity_of(manifest)
            self._lock = os.open(self._folder / f"{FILE}.lock", os.O_RDWR | os.O_CREAT, 0o644)
            self._cleanup.callback(os.close, self._lock)
        if not self._holds:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            if self._database is not None and not self._database.is_in_place():
                self._database = None
            if self._database is None:
                self._database = CatalogDatabase(self.path, self._identity)  # a full disk: the next one tries
            self._holds = True
        return True

    # ------------------------------------------------------------------------------------------ reading

    def _look_at_the_others(self) -> None:
        """Note how far the process that writes the catalog has read."""
        catalog = self.open_catalog()
        if catalog is None:
            self._measure(())
            return
        with catalog:
            self._measure(catalog.rows("SELECT * FROM marks"))
            self.texts.measure(catalog.rows("SELECT * FROM text_marks"))

    def _measure(self, rows: Iterable[Any]) -> tuple[Ends, dict[TopicPartition, Mark]]:
        """Note how far a catalog with these marks has read. Return the log's ends, and the marks."""
        ends = {topic: self._run.transport.admin.end_offsets(topic) for topic in READ}
        known = {
            TopicPartition(topic, partition): Mark(end, last, int(text)) for topic, partition, end, last, text in rows
        }
        self.total = sum(sum(places.values()) for places in ends.values())
        self.done = sum(min(mark.end, ends[place.topic].get(place, 0)) for place, mark in known.items())
        return ends, known

    def _read(self, database: CatalogDatabase, should_stop: Callable[[], bool]) -> bool:
        ends, known = self._measure(database.rows("SELECT * FROM marks"))
        if not any(end > known.get(place, Mark(0)).end for places in ends.values() for place, end in places.items()):
            self._check_ends(known, ends)
            self._rest_reading()
            return False
        with contextlib.closing(self._chunks(known, ends)) as chunks:
            has_more = True
            while has_more and not should_stop():
                with database.transaction() as db:
                    has_more = self._write(db, chunks)
                    rows = [(*place, mark.end, mark.last, str(mark.fingerprint)) for place, mark in known.items()]
                    db.executemany("INSERT OR REPLACE INTO marks VALUES (?, ?, ?, ?, ?)", rows)
                self.done = sum(mark.end for mark in known.values())
        return True

    def _write(self, db: Connection, chunks: Iterator[tuple[str, list[Record]]]) -> bool:
        """Write the rows of one transaction; return whether there may be more."""
        writer, num_records = CatalogWriter(db), 0
        for topic, records in chunks:
            writer.absorb(topic, records)
            num_records += len(records)
            if num_records >= self._chunk_records:
                break
        writer.flush()
        return num_records >= self._chunk_records

    def _chunks(
        self, marks: dict[TopicPartition, Mark], ends: Mapping[str, Mapping[TopicPartition, int]]
    ) -> Generator[tuple[str, list[Record]], None, None]:
        """Yield topics with their new records, and advance the marks."""
        self._check_ends(marks, ends)
        of_headers = {place: end for topic in READ if topic != BODIES for place, end in ends[topic].items()}
        for topic in READ:
            reader, there = (self._bodies, ends[topic]) if topic == BODIES else (self._headers, of_headers)
            for records in reader.read(topic, marks, there):
                yield topic, records

    @staticmethod
    def _check_ends(marks: Mapping[TopicPartition, Mark], ends: Mapping[str, Mapping[TopicPartition, int]]) -> None:
        for place, mark in marks.items():
            if mark.end > ends.get(place.topic, {}).get(place, -1):
                raise LogChanged(f"{place} ends before {mark.end}, up to where it was read")
