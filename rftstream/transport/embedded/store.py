"""The file of an embedded log: its tables, its transactions, and the translation of SQLite's errors.

A record's row number is `partition id << 40 | offset`. So a partition is a range of the table, in order. The value is
the last column: a reader without bodies never reads its overflow pages. Partition ids are never reused. So a row number
means the same record for ever, and a process can tell when its cached ids are outdated."""

from __future__ import annotations

import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rftstream.contracts.records import Headers, Record, TopicPartition
from rftstream.errors import ConfigError, ContractError, LogFull, TransactionAborted, TransportError
from rftstream.transport.base import Jump, TopicSettings
from rftstream.transport.cursors import PartitionBatch
from rftstream.transport.embedded.lock import LockHolder, WriteLock, describe_holder
from rftstream.transport.embedded.wakeup import WakeupPipes

FORMAT_VERSION = 1
OFFSET_BITS = 40

_APPLICATION_ID = 0x72667473
"""'rfts': the application id that marks our SQLite files."""

# Measured with 64 KB and 1 KB records, 8 partitions (benchmarks/log.py): pages of 8 KB are within 10 % of the best
# for both sizes, and a small transaction rewrites a few pages, so larger ones would cost it more. The WAL is copied
# into the file every 32 MB; cache beyond 16 MB gained nothing. No mmap: reading gained little, and with it a
# shrinking file would be a SIGBUS instead of an error.
_PAGE_BYTES = 8192
_CACHE_KIB = 16 * 1024
_CHECKPOINT_BYTES = 32 << 20
_LONG_WAL_BYTES = 3 * _CHECKPOINT_BYTES
_RESTART_WAIT_MS = 100

_FULL = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR_WRITE,
    sqlite3.SQLITE_IOERR_FSYNC,
    sqlite3.SQLITE_IOERR_TRUNCATE,
    sqlite3.SQLITE_IOERR_SHMSIZE,
}

_SCHEMA = """
CREATE TABLE topics(
    name TEXT PRIMARY KEY, partitions INTEGER NOT NULL, compacted INTEGER NOT NULL, max_record_bytes INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE partitions(
    id INTEGER PRIMARY KEY AUTOINCREMENT, topic TEXT NOT NULL, partition INTEGER NOT NULL,
    begin_offset INTEGER NOT NULL DEFAULT 0, next_offset INTEGER NOT NULL DEFAULT 0,
    num_removed INTEGER NOT NULL DEFAULT 0,  -- by compaction, from begin_offset on
    UNIQUE (topic, partition)
);
CREATE TABLE records(id INTEGER PRIMARY KEY, timestamp_s REAL NOT NULL, key BLOB, headers BLOB, value BLOB);
CREATE TABLE producers(transactional_id TEXT PRIMARY KEY, epoch INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE positions(
    group_name TEXT NOT NULL, partition_id INTEGER NOT NULL, offset INTEGER NOT NULL, metadata TEXT NOT NULL,
    PRIMARY KEY (group_name, partition_id)
) WITHOUT ROWID;
CREATE TABLE groups(name TEXT PRIMARY KEY, generation INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE members(
    id INTEGER PRIMARY KEY AUTOINCREMENT, group_name TEXT NOT NULL, name TEXT NOT NULL, topics BLOB NOT NULL,
    heartbeat_s REAL NOT NULL, session_timeout_s REAL NOT NULL, bell TEXT NOT NULL
);
CREATE TABLE assignments(
    group_name TEXT NOT NULL, partition_id INTEGER NOT NULL, owner INTEGER, number INTEGER NOT NULL,
    PRIMARY KEY (group_name, partition_id)
) WITHOUT ROWID;
CREATE TABLE durable(id INTEGER PRIMARY KEY CHECK (id = 1), times INTEGER NOT NULL);
INSERT INTO durable VALUES (1, 0);
"""


Mark = tuple[int, int, int]
"""Identifies a state of the log. Equal marks mean the same state."""


@dataclass(frozen=True, slots=True)
class TopicRow:
    """A topic as cached in a process."""

    settings: TopicSettings
    ids: tuple[int, ...]
    """The partition ids, by partition number."""


class Store:
    """The SQLite file of an embedded log, as one process uses it.

    EmbeddedTransport makes it; its admin, readers, members and producers share it. ConfigError if the file is not a
    log, or if it does not exist and `create` is False. TransportError without the right to write to the folder."""

    def __init__(self, folder: Path, *, clock: Callable[[], float], create: bool, busy_timeout_s: float) -> None:
        self.folder = folder
        self.clock = clock
        self.path = folder / "log.sqlite"
        self._wal_path = f"{self.path}-wal"
        self._busy_timeout_s = busy_timeout_s
        if not create and not self.path.exists():
            raise ConfigError(f"{self.path}: no log there, an existing one was expected; check the run folder")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.wakeup_pipes = WakeupPipes(folder / "bells")
            self._lock = WriteLock(folder / "log.writer")
        except OSError as error:
            raise TransportError(
                f"{error.filename or folder}: {error.strerror or error}, expected a folder with rights to write, which "
                "readers of the log need as well; look at a copy of the run folder, or with more rights"
            ) from error
        self.jumps: list[Jump] = []
        """Unreported jumps of readers and members of this process."""
        self._num_writes = 0
        self._num_commits: Counter[str] = Counter()
        """Topic -> number of this process's transactions that changed only records of some topics, this one among
        them."""
        self._topics: dict[str, TopicRow] = {}
        self._places: dict[int, TopicPartition] = {}
        try:
            self._db = self._opened()
        except BaseException:
            self._lock.close()
            raise

    def close(self) -> None:
        """Close the file. The last process to close it copies the WAL into the file, so the call waits for writers, for
        at most 1 s."""
        self.wakeup_pipes.close()
        locked = self._lock.acquire(min(1.0, self._busy_timeout_s))
        try:
            self._db.close()
        finally:
            if locked:
                self._lock.release()
            self._lock.close()

    def lock_holder(self) -> LockHolder | None:
        """Return the current holder of the write lock, or None."""
        return self._lock.holder()

    # -- transactions

    @contextmanager
    def write(
        self, *, durable: bool = False, timeout_s: float | None = None, topics: Collection[str] | None = None
    ) -> Iterator[sqlite3.Connection]:
        """Commit all changes of the block, or none. With `durable`, they and everything before them are on the disk
        afterwards. `topics` are the topics whose records change, if nothing else changes that affects a `mark`.
        TransactionAborted if the lock is not free within `timeout_s`, LogFull if there is no space."""
        timeout_s = self._busy_timeout_s if timeout_s is None else timeout_s
        if not self._lock.acquire(timeout_s):
            raise TransactionAborted(
                f"{self.path}: no turn to write within {timeout_s:g} s: {describe_holder(self._lock.holder())}"
            )
        db = self._db
        try:
            if durable:
                db.execute("PRAGMA synchronous=FULL")
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
                self._restart_wal_if_long()
            except BaseException:
                # After some errors, such as a full disk, SQLite has already rolled back.
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise self._write_error(error) from error
        finally:
            if durable:
                db.execute("PRAGMA synchronous=NORMAL")
            if topics is None:
                self._num_writes += 1
            else:
                self._num_commits.update(topics)
            self._lock.release()

    def _restart_wal_if_long(self) -> None:
        """Checkpoint the WAL if it is long. SQLite's own checkpoints never wait for readers. With many busy readers
        none of them ever completes, and the WAL grows without bound [measured: 190 MB in 15 s with 6 readers]."""
        try:
            if os.stat(self._wal_path).st_size < _LONG_WAL_BYTES:
                return
        except OSError:
            return
        try:
            self._db.execute(f"PRAGMA busy_timeout={_RESTART_WAIT_MS}")
            self._db.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()
        except sqlite3.Error:
            pass  # The transaction is committed in any case. The next one tries again.
        finally:
            self._db.execute(f"PRAGMA busy_timeout={int(1000 * self._busy_timeout_s)}")

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Let the whole block see one state of the log."""
        try:
            self._db.execute("BEGIN")
            try:
                yield self._db
            finally:
                if self._db.in_transaction:
                    self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._read_error(error) from error

    def mark(self, topics: Collection[str] = ()) -> Mark:
        """Return a value that changes whenever another process commits anything, and whenever this process commits
        anything except records of topics other than these. The call takes microseconds."""
        try:
            (version,) = self._db.execute("PRAGMA data_version").fetchone()
        except sqlite3.Error as error:
            raise self._read_error(error) from error
        return version, self._num_writes, sum(map(self._num_commits.__getitem__, topics))

    # -- topics

    def topic(self, name: str) -> TopicRow:
        """Return a topic by name. ConfigError if there is none."""
        row = self._topics.get(name)
        if row is None:
            self.load_topics()
            row = self._topics.get(name)
        if row is None:
            known = ", ".join(sorted(self._topics)) or "none"
            raise ConfigError(f"{self.path}: unknown topic {name!r}; known: {known}; make it with admin.ensure_topics")
        return row

    def partition_id(self, place: TopicPartition) -> int:
        """Return the id of a partition. ConfigError if there is none."""
        ids = self.topic(place.topic).ids
        if not 0 <= place.partition < len(ids):
            raise ConfigError(
                f"{place}: no such partition, {place.topic} has {len(ids)}; partitions are fixed for a run"
            )
        return ids[place.partition]

    def place(self, partition_id: int) -> TopicPartition | None:
        """Return the partition of an id, or None if its topic was deleted."""
        if partition_id not in self._places:
            self.load_topics()
        return self._places.get(partition_id)

    def load_topics(self) -> dict[str, TopicRow]:
        """Read all topics from the file again, and return them by name."""
        settings = {
            name: TopicSettings(partitions=partitions, compacted=bool(compacted), max_record_bytes=max_record_bytes)
            for name, partitions, compacted, max_record_bytes in self.select(
                "SELECT name, partitions, compacted, max_record_bytes FROM topics"
            )
        }
        ids: dict[str, list[int]] = {name: [] for name in settings}
        self._places = {}
        for partition_id, topic, partition in self.select("SELECT id, topic, partition FROM partitions ORDER BY 2, 3"):
            if topic in ids:
                ids[topic].append(partition_id)
                self._places[partition_id] = TopicPartition(topic, partition)
        self._topics = {name: TopicRow(settings[name], tuple(ids[name])) for name in settings}
        return self._topics

    # -- records (the PartitionLog of cursors.py)

    def spans(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, tuple[int, int]]:
        """Return first remaining offset and next offset of each existing partition."""
        by_id = {self.partition_id(place): place for place in partitions}
        marks = ",".join("?" * len(by_id))
        return {
            by_id[partition_id]: (begin, end)
            for partition_id, begin, end in self.select(
                f"SELECT id, begin_offset, next_offset FROM partitions WHERE id IN ({marks})", tuple(by_id)
            )
        }

    def read_partition(
        self,
        place: TopicPartition,
        offset: int,
        end: int,
        *,
        max_records: int,
        max_bytes: int,
        first_bytes: int | None,
        bodies: bool,
    ) -> PartitionBatch:
        """Return records as described for `PartitionLog.read`. Without `bodies` their values are None."""
        base = self.partition_id(place) << OFFSET_BITS
        value = "value" if bodies else "NULL"
        rows = self._db.execute(
            f"SELECT id, timestamp_s, key, headers, {value} FROM records WHERE id >= ? AND id < ? ORDER BY id LIMIT ?",
            (base + offset, base + end, max_records),
        )
        records: list[Record] = []
        topic, partition = place
        num_bytes = 0
        room: int | None = first_bytes
        decode = _decode_headers
        for row_id, timestamp_s, key, packed, body in rows:
            size = len(key) if key is not None else 0
            if body is not None:
                size += len(body)
            if packed is not None:
                size += len(packed)
            offset = row_id - base
            if room is not None and num_bytes + size > room:
                rows.close()
                return PartitionBatch(records, offset, num_bytes)
            room = max_bytes
            num_bytes += size
            headers: Headers = ()
            if packed:
                try:
                    headers = decode(packed)
                except msgspec.MsgspecError as error:
                    raise _damaged_headers(error, f"{place}@{offset}") from error
            records.append(Record(topic, partition, offset, timestamp_s, key, body, headers))
        if len(records) < max_records:
            return PartitionBatch(records, end, num_bytes)
        return PartitionBatch(records, records[-1].offset + 1, num_bytes)

    def select(self, sql: str, values: tuple[object, ...] | Mapping[str, object] = ()) -> list[tuple]:  # type: ignore[type-arg]
        """Return the rows of a query."""
        try:
            return self._db.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise self._read_error(error) from error

    # -- opening

    def _opened(self) -> sqlite3.Connection:
        try:
            # The threads of a process may pass a transport on, but never share it.
            db = sqlite3.connect(
                self.path,
                timeout=self._busy_timeout_s,
                isolation_level=None,
                check_same_thread=False,
                cached_statements=256,
            )
            try:
                self._prepare(db)
            except BaseException:
                db.close()
                raise
            return db
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", None) in _FULL:
                raise self._write_error(error) from error
            if isinstance(error, sqlite3.OperationalError):
                raise self._read_error(error) from error
            raise ConfigError(
                f"{self.path}: {error}, a log of rftstream was expected; is the run folder right?"
            ) from error

    def _prepare(self, db: sqlite3.Connection) -> None:
        if not self._is_ours(db):
            if not self._lock.acquire(self._busy_timeout_s):
                raise TransactionAborted(f"{self.path}: cannot make the log: {describe_holder(self._lock.holder())}")
            try:
                if not self._is_ours(db):
                    self._create(db)
            finally:
                self._lock.release()
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
        # Commits make checkpoints, under the write lock: never two at once, never beside a commit (lock.py).
        db.execute(f"PRAGMA wal_autocheckpoint={_CHECKPOINT_BYTES // _PAGE_BYTES}")
        db.execute(f"PRAGMA journal_size_limit={2 * _CHECKPOINT_BYTES}")
        # Some builds overwrite deleted data with zeros, which makes retention as expensive as writing.
        db.execute("PRAGMA secure_delete=OFF")

    def _is_ours(self, db: sqlite3.Connection) -> bool:
        """Return True for a log of ours and False for an empty file. ConfigError for a foreign file or another
        format."""
        (application_id,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if application_id == _APPLICATION_ID:
            if version != FORMAT_VERSION:
                raise ConfigError(
                    f"{self.path}: a log of format {version}, this rftstream reads format {FORMAT_VERSION};"
                    f" use the release that wrote it, or another run folder"
                )
            return True
        (num_tables,) = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        if application_id or num_tables:
            raise ConfigError(
                f"{self.path}: an SQLite file of something else, a log of rftstream was expected; use another folder"
            )
        return False

    def _create(self, db: sqlite3.Connection) -> None:
        db.execute(f"PRAGMA page_size={_PAGE_BYTES}")
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        db.executescript(
            f"BEGIN; {_SCHEMA} PRAGMA application_id={_APPLICATION_ID}; PRAGMA user_version={FORMAT_VERSION}; COMMIT;"
        )
        # The names of the new files also survive a loss of power.
        fd = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    # -- errors

    def _write_error(self, error: sqlite3.Error) -> TransportError:
        code = getattr(error, "sqlite_errorcode", None)
        if code in _FULL:
            return LogFull(
                f"{self.path}: {error} ({error.sqlite_errorname}): no room for the transaction, nothing of it is"
                f" visible; make room on the disk (or raise the file size limit), then go on"
            )
        if code is not None and code & 0xFF == sqlite3.SQLITE_BUSY:
            return TransactionAborted(
                f"{self.path}: locked by a process that is not one of rftstream's writers"
                f" ({describe_holder(self._lock.holder())}); close what has the file open for writing"
            )
        return TransactionAborted(
            f"{self.path}: {error} ({getattr(error, 'sqlite_errorname', '?')}); nothing of the"
            f" transaction is visible; check the disk, `PRAGMA integrity_check` tells more"
        )

    def _read_error(self, error: sqlite3.Error) -> TransportError:
        return TransportError(
            f"{self.path}: cannot be read: {error} ({getattr(error, 'sqlite_errorname', '?')}); check the disk,"
            f" `PRAGMA integrity_check` tells more"
        )


pack_headers = msgspec.msgpack.Encoder().encode
"""Packs headers as a msgpack array of [name, value], which keeps order and repeats. Without headers the column is
NULL."""
_decode_headers = msgspec.msgpack.Decoder(tuple[tuple[str, bytes], ...]).decode


def _damaged_headers(error: Exception, where: str) -> ContractError:
    return ContractError(
        f"headers are damaged ({error}), pairs of str and bytes were expected; check the log's disk", where=where
    )
