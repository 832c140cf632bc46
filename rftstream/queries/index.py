"""What audits have read of a log, kept beside the run, so that the next one reads only what has come since.

RUN/index/ (for a run without a folder here, $XDG_CACHE_HOME/rftstream/index/<run>-<digest>/) has for every topic
  <topic>.rows    its table (rows.py), which only grows
  <topic>.json    how many rows count, their CRC, how far each partition was read, of which run
  lock            held by whoever writes (exclusively) or only looks (shared)

It saves work and is never needed: it can be deleted at any time, and what is damaged, of another run or at odds with
the log is read anew. A table is written before the file that counts its rows, so that a writer may die at any point.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rftstream.contracts import codec
from rftstream.contracts.control import RunManifest
from rftstream.contracts.topics import TOPICS
from rftstream.queries.rows import NUMBERS, ROW, LogChanged, Mark, RowArray, TopicTable, read_table
from rftstream.runs.folder import OpenRun
from rftstream.service.control_view import read_control
from rftstream.service.role import Log

FORMAT = 5
"""Version of the files' format and of the rows' meaning."""
LOCK_WAIT_S = 60.0
_CHUNK_BYTES = 1 << 24


class Index:
    """The tables of one run, while its lock is held. `notes` has a sentence for each thing that was not as expected."""

    def __init__(self, folder: Path, identity: str) -> None:
        self.folder, self._identity = folder, identity
        self.notes: list[str] = []

    def table(self, log: Log, topic: str) -> TopicTable:
        """Return the topic's table up to its end now. New rows are kept in the index."""
        known = self.load(topic)
        try:
            table = read_table(log, topic, known)
        except LogChanged as error:
            self.notes.append(f"{self.folder / topic}: of another log ({error}); rebuilt")
            known, table = TopicTable(), read_table(log, topic)
        table_kept = table.kept(log.transport.admin.begin_offsets(topic))
        shrunk = len(table_kept.rows) < len(table.rows) // 2
        if shrunk or table.marks != known.marks:
            self._save(topic, table_kept if shrunk else table, num_there=0 if shrunk else len(known.rows))
        return table_kept

    def load(self, topic: str) -> TopicTable:
        """Return the table that was kept; an empty one if there is none that can be used."""
        try:
            text = self._json(topic).read_text(encoding="ascii")
        except FileNotFoundError:
            return TopicTable()
        except (OSError, ValueError) as error:
            return self._useless(topic, f"cannot be read ({error})")
        try:
            found = json.loads(text)
            entry = found["index"]
            if found["crc32"] != zlib.crc32(_dumped(entry).encode()):
                return self._useless(topic, "damaged")
            if entry["format"] != FORMAT or entry["columns"] != _columns(topic):
                return self._useless(topic, "of another release")
            if entry["run"] != self._identity:
                return self._useless(topic, "of another run of this name")
            rows = self._rows(topic, entry["rows"], entry["crc32"])
        except (OSError, ValueError, TypeError, LookupError, AttributeError):
            return self._useless(topic, "damaged")
        if rows is None:
            return self._useless(topic, "damaged")
        return TopicTable(
            rows,
            {int(partition): Mark(*mark) for partition, mark in entry["partitions"].items()},
            [(offset, text) for offset, text in entry["broken"]],
        )

    def _rows(self, topic: str, num_rows: int, crc32: int) -> RowArray | None:
        """Return the rows of a file, or None if they are not those that were written."""
        if num_rows == 0:
            return np.empty(0, ROW)
        rows = np.fromfile(self._file(topic), ROW, num_rows)
        return rows if len(rows) == num_rows and zlib.crc32(rows.data) == crc32 else None

    def _useless(self, topic: str, why: str) -> TopicTable:
        self.notes.append(f"{self.folder / topic}: {why}; rebuilt")
        return TopicTable()

    def _save(self, topic: str, table: TopicTable, *, num_there: int) -> None:
        """`num_there`: rows at the beginning that the file has already."""
        entry = {
            "format": FORMAT,
            "columns": _columns(topic),
            "run": self._identity,
            "rows": len(table.rows),
            "crc32": zlib.crc32(np.ascontiguousarray(table.rows).data),
            "partitions": {str(p): [mark.end, mark.last, mark.fingerprint] for p, mark in table.marks.items()},
            "broken": table.broken,
        }
        text = json.dumps({"crc32": zlib.crc32(_dumped(entry).encode()), "index": entry})
        partial = self._json(topic).with_suffix(".partial")
        try:
            with self._file(topic).open("r+b" if num_there else "wb") as file:
                _write(file, table.rows, num_there)
            partial.write_text(text, encoding="ascii")
            partial.replace(self._json(topic))
        except OSError as error:  # the next audit finds rows and count at odds, or reads these records again
            self.notes.append(f"{self._file(topic)}: cannot be written ({error.strerror or error}); not kept")

    def _file(self, topic: str) -> Path:
        return self.folder / f"{topic}.rows"

    def _json(self, topic: str) -> Path:
        return self.folder / f"{topic}.json"


def read_kept_table(log: Log, topic: str, index: Index | None) -> TopicTable:
    """Return a topic's table up to its end now. A compacted topic is read anew, since what was compacted away counts no
    more."""
    if index is not None and not TOPICS[topic].compacted:
        return index.table(log, topic)
    return read_table(log, topic)


@contextlib.contextmanager
def opened_index(run: OpenRun, *, looking: bool = False) -> Iterator[Index | None]:
    """Open the index of a run under its lock; give None if there can be none.

    With `looking` the index is only read; give None if somebody is writing."""
    manifest = read_control(run.transport).manifest
    if manifest is None:  # the feeder has not begun: there is nothing to be counted
        yield None
        return
    index = Index(folder_of(run), identity_of(manifest))
    if looking and not index.folder.is_dir():
        yield None
        return
    with contextlib.ExitStack() as stack:
        try:
            index.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(index.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
            stack.callback(os.close, descriptor)
            is_ours = _lock(descriptor, shared=looking, wait_s=0.0 if looking else LOCK_WAIT_S)
        except OSError as error:
            is_ours = False
            index.notes.append(f"{index.folder}: cannot be used ({error.strerror or error}); the whole log is read")
        else:
            if not is_ours:
                index.notes.append(f"{index.folder}: held by another audit; the whole log is read")
        yield index if is_ours else Unusable(index)


class Unusable(Index):
    """An index that keeps nothing and only says why."""

    def __init__(self, index: Index) -> None:
        super().__init__(index.folder, "")
        self.notes = index.notes

    def table(self, log: Log, topic: str) -> TopicTable:
        """Read the topic's table from the log."""
        return read_table(log, topic)

    def load(self, topic: str) -> TopicTable:
        """Return an empty table."""
        return TopicTable()


def folder_of(run: OpenRun) -> Path:
    """Return the folder of a run's index: in the run folder, or in the user's cache if there is no run folder here."""
    if run.folder.exists():
        return run.folder.index
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    where = hashlib.sha256(repr(run.config.transport.servers).encode()).hexdigest()[:12]
    return cache / "rftstream" / "index" / f"{run.run_id}-{where}"


def identity_of(manifest: RunManifest) -> str:
    """Return a text that two runs of the same name do not share."""
    return hashlib.sha256(codec.encode(manifest)).hexdigest()


def _columns(topic: str) -> list[Any]:
    return [NUMBERS.get(topic, "version"), *(TOPICS[topic].twin or ())]


def _dumped(entry: Any) -> str:
    return json.dumps(json.loads(json.dumps(entry)), sort_keys=True)


def _write(file: BinaryIO, rows: RowArray, num_there: int) -> None:
    """Behind the rows that are there; what a writer that died left behind them goes."""
    file.truncate(num_there * ROW.itemsize)
    file.seek(num_there * ROW.itemsize)
    step = _CHUNK_BYTES // ROW.itemsize
    for start in range(num_there, len(rows), step):
        file.write(rows[start : start + step].tobytes())


def _lock(descriptor: int, *, shared: bool, wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
