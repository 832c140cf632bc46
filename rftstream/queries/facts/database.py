"""The SQLite file of facts: how it is opened, extended from the log, and sealed.

RUN/index/ (for a run without a folder here, $XDG_CACHE_HOME/rftstream/index/<run>-<digest>/) has

  facts.sqlite3   the tables (tables.py)
  facts.json      the seal: size and CRC of the file, its run, and its format
  lock            held exclusively by a writer, or shared by readers

The file only saves work, and can be deleted at any time. Facts that are damaged, of another run or at odds with the log
are read anew. An audit writes in one transaction, and then writes the seal, so that it may die at any point.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from rftstream.contracts import codec
from rftstream.contracts.control import RunManifest
from rftstream.contracts.records import TopicPartition
from rftstream.contracts.topics import TOPICS
from rftstream.queries.audits.rows import LogChanged, Mark, NewRecords
from rftstream.queries.facts.tables import COMPACTED, FORMAT, READ, SCHEMA, TABLES_OF, Names
from rftstream.queries.facts.writer import FactsWriter
from rftstream.runs.folder import OpenRun
from rftstream.service.control_view import read_manifest
from rftstream.service.role import Log

FILE, SEAL = "facts.sqlite3", "facts.json"
CACHE_KIB = 32 * 1024
"""Kibibytes of pages that are kept in memory."""
_CHUNK_BYTES = 1 << 20

Doing = Callable[[str], None]
"""Function that is told the next phase of work that takes time."""
StoreError = sqlite3.Error
"""Error for a damaged file, or for a full disk."""


class Index:
    """The facts of one run, while its lock is held. Without a folder, they are in a temporary file that ends with this
    object.

    `notes` has a sentence for each unexpected finding. The user calls `close` at the end.
    """

    def __init__(self, folder: Path | None = None, identity: str = "", *, looking: bool = False) -> None:
        """Open the file, or make it anew if it cannot be used. With `looking` the file is only read, and an unusable
        one is replaced by an empty one in memory. `identity` identifies the run."""
        self.folder = folder
        """Folder of the file. None: the file is temporary."""
        self._file = None if folder is None else _SealedFile(folder, identity)
        self._is_sealed = True
        self.notes: list[str] = []
        self._db = self._opened(looking)
        self.names = Names(self._db)

    def close(self) -> None:
        """Close the file. Facts that were not kept are lost."""
        self._db.close()

    def rows(self, query: str, parameters: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        """Return the rows of a query, one after the other."""
        return self._db.execute(query, parameters)

    def number(self, query: str, parameters: tuple[Any, ...] = ()) -> int:
        """Return the single number that a query gives; 0 for none."""
        return int(self._db.execute(query, parameters).fetchone()[0] or 0)

    def execute(self, statement: str, parameters: tuple[Any, ...] = ()) -> None:
        """Execute a statement. Callers make temporary tables and views with it."""
        self._db.execute(statement, parameters)

    def insert(self, table: str, width: int, rows: Iterable[tuple[Any, ...]]) -> None:
        """Insert rows of `width` columns into a temporary table."""
        self._db.executemany(f"INSERT OR IGNORE INTO temp.{table} VALUES ({', '.join('?' * width)})", rows)

    # ------------------------------------------------------------------------------------------ reading on

    def read(self, log: Log, topic: str, doing: Doing = lambda phase: None) -> None:
        """Read the topic up to its current end. `keep` makes the new rows permanent. `doing` is told how far it is."""
        if not self._db.in_transaction:
            self._db.execute("BEGIN IMMEDIATE")
        try:
            self._read(log, topic, doing)
        except LogChanged as error:
            self.notes.append(
                f"{topic if self.folder is None else self.folder / topic}: of another log ({error}); rebuilt"
            )
            self._forget(topic)
            self._read(log, topic, doing)

    def _read(self, log: Log, topic: str, doing: Doing) -> None:
        if TOPICS[topic].compacted:
            self._forget(topic)
        begins = dict(self._db.execute("SELECT partition, begin FROM marks WHERE topic = ?", (topic,)))
        marks = self.marks(topic)
        known, writer = dict(marks), FactsWriter(self._db)
        reader, ends = NewRecords(log.transport, bodies=topic == "outcomes"), log.ends(topic)
        try:
            for records in reader.read(topic, marks, ends):
                writer.absorb(topic, records)
                doing(
                    f"reading {topic}, {sum(mark.end for mark in marks.values()):,} of {sum(ends.values()):,} offsets"
                )
        finally:
            reader.rest()
        there = log.transport.admin.begin_offsets(topic)
        for place in sorted(marks):
            begin = there[place]
            if begin > begins.get(place.partition, 0):
                for table in (*TABLES_OF[topic], "unreadable"):
                    self._db.execute(*_deletion(table, place, begin))
            elif marks[place] == known.get(place) or TOPICS[topic].compacted:
                continue
            self._is_sealed = False
            row = (*place, marks[place].end, marks[place].last, marks[place].fingerprint, begin)
            self._db.execute("INSERT OR REPLACE INTO marks VALUES (?, ?, ?, ?, ?, ?)", row)

    def marks(self, topic: str) -> dict[TopicPartition, Mark]:
        """Return how far each partition of the topic was read."""
        rows = self._db.execute("SELECT partition, end, last, fingerprint FROM marks WHERE topic = ?", (topic,))
        return {TopicPartition(topic, partition): Mark(*mark) for partition, *mark in rows}

    def _forget(self, topic: str) -> None:
        """Remove all rows of a topic."""
        for table in (*TABLES_OF[topic], "unreadable", "marks"):
            if table in ("keyed", "unreadable", "marks"):
                self._db.execute(f"DELETE FROM {table} WHERE topic = ?", (topic,))
            else:
                self._db.execute(f"DELETE FROM {table}")

    # ------------------------------------------------------------------------------------------ the file

    def keep(self) -> None:
        """Make all new rows permanent, and seal the file."""
        if not self._db.in_transaction:
            return
        self._db.execute("COMMIT")
        if self._file is not None and not self._is_sealed:
            try:
                self._file.seal()
            except OSError as error:  # the next audit finds that file and seal do not match
                self.notes.append(f"{self._file.path}: cannot be sealed ({error.strerror or error}); not kept")
        self._is_sealed = True

    def give_up(self, error: StoreError) -> None:
        """Continue with an empty temporary file, since this one cannot be used."""
        assert self._file is not None
        self.notes.append(f"{self._file.path}: cannot be used ({error}); the whole log is read")
        self._db.close()
        with contextlib.suppress(OSError):
            self._file.remove()
        self.folder = self._file = None
        self._db = self._opened(looking=False)
        self.names = Names(self._db)

    def _opened(self, looking: bool) -> sqlite3.Connection:
        if (file := self._file) is not None:
            if file.is_there():
                if (why := file.why_useless(looking)) is None:
                    return _made(_connected(file.path, looking), is_there=True)
                self.notes.append(f"{file.path}: {why}; rebuilt")
            if not looking:
                try:
                    file.remove()
                    db = _made(_connected(file.path))
                    try:
                        file.seal()
                    except OSError:
                        db.close()
                        raise
                    return db
                except (OSError, sqlite3.Error) as error:
                    self.notes.append(f"{file.path}: cannot be used ({error}); the whole log is read")
        self.folder = self._file = None
        return _made(_connected(None))


class _SealedFile:
    """The file on disk, with its seal."""

    def __init__(self, folder: Path, identity: str) -> None:
        self._folder, self._identity = folder, identity
        self.path, self._seal = folder / FILE, folder / SEAL

    def is_there(self) -> bool:
        return self.path.exists() or self._seal.exists()

    def why_useless(self, looking: bool) -> str | None:
        """Return why the file is not the sealed one, or None. With `looking`, not all of the file is read."""
        try:
            told = json.loads(self._seal.read_text(encoding="ascii"))
            if told["format"] != FORMAT or told["columns"] != _columns():
                return "of another release"
            if told["run"] != self._identity:
                return "of another run of this name"
            with contextlib.closing(_connected(self.path, looking)) as db:
                db.execute("SELECT count(*) FROM sqlite_master").fetchone()  # rolls back an unfinished transaction
            found = {"bytes": self.path.stat().st_size, **({} if looking else {"crc32": self._crc32()})}
            return None if all(told[name] == value for name, value in found.items()) else "damaged"
        except (OSError, ValueError, TypeError, LookupError, sqlite3.Error):
            return "damaged"

    def seal(self) -> None:
        """Record the state of the file in the seal."""
        size, crc32 = self.path.stat().st_size, self._crc32()
        told = {"format": FORMAT, "columns": _columns(), "run": self._identity, "bytes": size, "crc32": crc32}
        self._seal.write_text(json.dumps(told), encoding="ascii")

    def _crc32(self) -> int:
        crc32 = 0
        with self.path.open("rb") as content:
            while chunk := content.read(_CHUNK_BYTES):
                crc32 = zlib.crc32(chunk, crc32)
        return crc32

    def remove(self) -> None:
        """Remove the file and its seal, and those of earlier releases."""
        names = (FILE, f"{FILE}-journal", SEAL, *(f"{topic}.{end}" for topic in READ for end in ("rows", "json")))
        for name in names:
            (self._folder / name).unlink(missing_ok=True)


def _connected(path: Path | None, looking: bool = False) -> sqlite3.Connection:
    name = "" if path is None else f"{path.absolute().as_uri()}?mode={'ro' if looking else 'rwc'}"
    db = sqlite3.connect(name, uri=path is not None, isolation_level=None, timeout=0.0)
    # What is lost with the power shows by the seal.
    return _prepared(db, f"PRAGMA synchronous=OFF; PRAGMA cache_size=-{CACHE_KIB};")


def _made(db: sqlite3.Connection, *, is_there: bool = False) -> sqlite3.Connection:
    return _prepared(db, ("" if is_there else SCHEMA) + COMPACTED)


def _prepared(db: sqlite3.Connection, script: str) -> sqlite3.Connection:
    """Return the connection after the script, or close it if the script fails."""
    try:
        db.executescript(script)
    except BaseException:
        db.close()
        raise
    return db


def _deletion(table: str, place: TopicPartition, begin: int) -> tuple[str, tuple[Any, ...]]:
    """Return the statement that removes the rows of deleted records, with its parameters."""
    query, values = f"DELETE FROM {table} WHERE offset < ?", (begin,)
    if place.topic == "outcomes" and table != "unreadable":
        return query, values  # it has one partition
    if table in ("keyed", "unreadable"):
        return f"{query} AND topic = ? AND partition = ?", (*values, *place)
    return f"{query} AND partition = ?", (*values, place.partition)


def _columns() -> dict[str, list[str]]:
    return {topic: list(TOPICS[topic].twin or ()) for topic in READ}


# ---------------- the index of a run, which keeps the facts that audits have read, under its lock


LOCK_WAIT_S = 60.0


@contextlib.contextmanager
def opened_index(run: OpenRun, *, looking: bool = False) -> Iterator[Index | None]:
    """Open the index of a run under its lock. Yield None if there can be none.

    With `looking` the index is only read. An unusable one is replaced by an empty one that keeps nothing.
    """
    manifest = read_manifest(run.transport)
    folder = folder_of(run)
    if manifest is None or (looking and not folder.is_dir()):  # without a manifest there is nothing to count
        yield None
        return
    with contextlib.ExitStack() as stack:
        note = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
            stack.callback(os.close, descriptor)
            if not _lock(descriptor, shared=looking, wait_s=0.0 if looking else LOCK_WAIT_S):
                note = f"{folder}: held by another audit; the whole log is read"
        except OSError as error:
            note = f"{folder}: cannot be used ({error.strerror or error}); the whole log is read"
        index = Index(None if note else folder, identity_of(manifest), looking=looking)
        stack.callback(index.close)
        index.notes += [note] if note else []
        yield index


def folder_of(run: OpenRun) -> Path:
    """Return the folder of a run's index: in the run folder, or in the user's cache if this host has no run folder."""
    if run.folder.exists():
        return run.folder.index
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    where = hashlib.sha256(repr(run.config.transport.servers).encode()).hexdigest()[:12]
    return cache / "rftstream" / "index" / f"{run.run_id}-{where}"


def identity_of(manifest: RunManifest) -> str:
    """Return a text that differs between two runs of the same name."""
    return hashlib.sha256(codec.encode(manifest)).hexdigest()


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
