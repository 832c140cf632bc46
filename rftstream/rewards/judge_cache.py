"""Judges' answers on this host's disk: a question that was answered once is not paid for again.

All verifiers of a host share one SQLite file. Its entries are found by a digest of the whole question, so another
model, prompt, rubric, sampling, problem or answer has another entry. SQLite keeps the file consistent if a process is
killed. If the cache cannot be used, it is ignored and the judge is asked.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

log = logging.getLogger(__name__)

WAIT_S = 2.0
"""Seconds to wait for another writing process."""
USED_S = 3600.0
"""Seconds after which an entry's time of last use is updated."""
KEPT_SHARE = 0.9
"""Share of the size limit that is kept after the cache has grown beyond it."""
ENTRY_BYTES = 100
"""Bytes that an entry takes beside its text."""

_TABLES = (
    "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, said TEXT NOT NULL, bytes INTEGER NOT NULL,"
    " used_at REAL NOT NULL) WITHOUT ROWID",
    "CREATE INDEX IF NOT EXISTS answers_by_use ON answers (used_at)",
    "CREATE TABLE IF NOT EXISTS total (bytes INTEGER NOT NULL)",
    "INSERT INTO total SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM total)",
    "CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON answers BEGIN UPDATE total SET bytes = bytes + new.bytes; END",
    "CREATE TRIGGER IF NOT EXISTS gone AFTER DELETE ON answers BEGIN UPDATE total SET bytes = bytes - old.bytes; END",
)


@dataclass(slots=True)
class _AskedNow:
    """A question that is being asked, and the number of threads that ask it or wait for its answer."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    num_waiting: int = 0


class JudgeCache:
    """Texts by digest, with `max_bytes` bytes at most; the most recently used are kept. A JudgeReward makes it; threads
    share it.

    The first `get` opens the file.
    """

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self._file = folder / "judge.sqlite3"
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._database: sqlite3.Connection | None = None
        self._failed = False
        self._turns: dict[str, _AskedNow] = {}
        """The questions that are being asked, by digest."""

    @contextlib.contextmanager
    def asking(self, key: str) -> Iterator[None]:
        """Let one thread at a time ask a question: siblings often give the same completion, and the second finds the
        answer."""
        with self._lock:
            turn = self._turns.setdefault(key, _AskedNow())
            turn.num_waiting += 1
        try:
            with turn.lock:
                yield
        finally:
            with self._lock:
                turn.num_waiting -= 1
                if not turn.num_waiting:
                    del self._turns[key]

    def get(self, key: str) -> str | None:
        """Return the answer to the question with this digest, or None."""
        with self._lock:
            try:
                database = self._open()
                row = None
                if database is not None:
                    row = database.execute("SELECT said, used_at FROM answers WHERE key = ?", (key,)).fetchone()
                if database is not None and row is not None and time.time() - row[1] > USED_S:
                    database.execute("UPDATE answers SET used_at = ? WHERE key = ?", (time.time(), key))
            except (sqlite3.Error, OSError) as error:
                self._pass_over(error)
                return None
        return None if row is None else str(row[0])

    def put(self, key: str, said: str) -> None:
        """Store an answer in one transaction, and drop the least recently used ones if there are too many bytes."""
        try:
            num_bytes = len(said.encode()) + len(key) + ENTRY_BYTES
        except UnicodeEncodeError:  # an unpaired surrogate, which SQLite cannot store
            return
        if num_bytes > self._max_bytes:
            return
        with self._lock:
            try:
                database = self._open()
                if database is None:
                    return
                database.execute("BEGIN IMMEDIATE")
                try:
                    # not REPLACE: it would delete the old entry without the trigger
                    database.execute("DELETE FROM answers WHERE key = ?", (key,))
                    database.execute("INSERT INTO answers VALUES (?, ?, ?, ?)", (key, said, num_bytes, time.time()))
                    self._shrink(database)
                    database.execute("COMMIT")
                except BaseException:
                    database.execute("ROLLBACK")
                    raise
            except (sqlite3.Error, OSError) as error:
                self._pass_over(error)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._database is not None:
                self._database.close()
            self._database = None

    def __del__(self) -> None:
        self.close()  # a process that scores ends without a word

    def _open(self) -> sqlite3.Connection | None:
        if self._database is None and not self._failed:
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                self._database = _connect(self._file)
            except sqlite3.OperationalError:  # the file is busy, or cannot be opened
                raise
            except sqlite3.DatabaseError as error:
                log.warning("judge: %s is no database (%s); it is made anew", self._file, error)
                self._file.unlink(missing_ok=True)
                self._database = _connect(self._file)
        return self._database

    def _shrink(self, database: sqlite3.Connection) -> None:
        (total,) = database.execute("SELECT bytes FROM total").fetchone()
        if total <= self._max_bytes:
            return
        excess = total - int(KEPT_SHARE * self._max_bytes)
        older = "SELECT key, sum(bytes) OVER (ORDER BY used_at, key) - bytes AS before FROM answers"
        database.execute(f"DELETE FROM answers WHERE key IN (SELECT key FROM ({older}) WHERE before < ?)", (excess,))

    def _pass_over(self, error: Exception) -> None:
        """Continue without the cache: for this question if it was busy, otherwise for good."""
        if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
            return
        log.warning("judge: %s cannot be used (%s); judges are asked without a cache", self._file, error)
        self._failed = True
        if self._database is not None:
            self._database.close()
        self._database = None


def cache_folder(folder: str | None, base: str) -> Path:
    """Return the folder of the cache: the configured one, relative to `base`, else the user's own."""
    if folder is not None:
        return Path(base, folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rftstream" / "judge"


def _connect(file: Path) -> sqlite3.Connection:
    database = sqlite3.connect(file, timeout=WAIT_S, isolation_level=None, check_same_thread=False)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        for statement in _TABLES:
            database.execute(statement)
    except BaseException:
        database.close()
        raise
    return database
