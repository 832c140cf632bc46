"""The SQLite file of a catalog: its schema, and how it is opened by its writer and by readers."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FORMAT = 6
"""Version of the schema and of the rows' meaning. A file of another version is made anew."""
WAIT_S = 5.0
"""Seconds that a reader waits for the writer."""
BUCKET_S = 10
"""Seconds of one bucket of the tables `rates`, `admissions` and `decisions`."""
CACHE_KIB = 16 * 1024
"""Pages that the writer keeps in memory."""

Connection = sqlite3.Connection
Row = sqlite3.Row

_SCHEMA = """
CREATE TABLE facts(name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE marks(
    topic TEXT NOT NULL, partition INTEGER NOT NULL, end INTEGER NOT NULL, last INTEGER NOT NULL,
    fingerprint TEXT NOT NULL, PRIMARY KEY (topic, partition)
) WITHOUT ROWID;
CREATE TABLE groups(
    sequence INTEGER PRIMARY KEY, group_id TEXT NOT NULL, taskset TEXT NOT NULL, problem INTEGER NOT NULL,
    group_size INTEGER NOT NULL, min_version INTEGER, admitted_at REAL NOT NULL, task_offset INTEGER,
    decided_at REAL, outcome_offset INTEGER, result INTEGER, reason TEXT, batch INTEGER,
    num_named INTEGER NOT NULL DEFAULT 0,  -- siblings that outcomes name, late ones included
    num_kept INTEGER NOT NULL DEFAULT 0, num_expired INTEGER NOT NULL DEFAULT 0,
    num_filtered INTEGER NOT NULL DEFAULT 0, num_dead INTEGER NOT NULL DEFAULT 0,
    num_scored INTEGER NOT NULL DEFAULT 0, reward_mean REAL, reward_least REAL, reward_most REAL, tokens_mean REAL
);
CREATE INDEX groups_by_id ON groups(group_id);
CREATE INDEX groups_by_admission ON groups(admitted_at);
CREATE INDEX groups_by_decision ON groups(decided_at);
CREATE INDEX groups_incomplete ON groups(sequence) WHERE decided_at IS NOT NULL AND num_named < group_size;
CREATE INDEX groups_by_problem ON groups(taskset, problem, sequence);
CREATE INDEX groups_by_result ON groups(result, sequence);
CREATE INDEX groups_by_batch ON groups(batch, sequence) WHERE batch IS NOT NULL;
CREATE TABLE rollouts(
    sequence INTEGER NOT NULL, sibling INTEGER NOT NULL,
    sampled_at REAL, rollout_offset INTEGER, status TEXT, num_tokens INTEGER,
    verified_at REAL, verified_offset INTEGER, unscored TEXT,
    fate INTEGER, reward REAL, rejected TEXT, decided_at REAL, late INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (sequence, sibling)
) WITHOUT ROWID;
CREATE INDEX late_rollouts ON rollouts(late) WHERE late = 1;
CREATE INDEX rollouts_by_reward ON rollouts(reward) WHERE reward IS NOT NULL;
CREATE INDEX rollouts_by_length ON rollouts(num_tokens) WHERE num_tokens >= 0;
CREATE TABLE batches(
    batch INTEGER NOT NULL, share INTEGER NOT NULL, begin_offset INTEGER NOT NULL, manifest_offset INTEGER NOT NULL,
    count INTEGER NOT NULL, written_at REAL NOT NULL, last INTEGER NOT NULL, PRIMARY KEY (batch, share)
) WITHOUT ROWID;
CREATE TABLE rates(
    topic TEXT NOT NULL, bucket INTEGER NOT NULL, records INTEGER NOT NULL, tokens INTEGER NOT NULL,
    PRIMARY KEY (topic, bucket)
) WITHOUT ROWID;
CREATE TABLE admissions(bucket INTEGER PRIMARY KEY, groups INTEGER NOT NULL, rollouts INTEGER NOT NULL);
CREATE TABLE decisions(
    bucket INTEGER NOT NULL, result INTEGER NOT NULL, reason TEXT NOT NULL, groups INTEGER NOT NULL,
    kept INTEGER NOT NULL, expired INTEGER NOT NULL, filtered INTEGER NOT NULL, dead INTEGER NOT NULL,
    PRIMARY KEY (bucket, result, reason)
) WITHOUT ROWID;
CREATE TABLE problems(
    taskset TEXT NOT NULL, problem INTEGER NOT NULL, num_groups INTEGER NOT NULL,
    num_scored INTEGER NOT NULL DEFAULT 0,  -- groups with a scored rollout
    reward_sum REAL NOT NULL DEFAULT 0, reward_mean REAL,  -- over these
    first_sequence INTEGER, first REAL, newest_sequence INTEGER, newest REAL,  -- of these
    PRIMARY KEY (taskset, problem)
) WITHOUT ROWID;
CREATE INDEX problems_hardest ON problems(reward_mean IS NULL, reward_mean, taskset, problem);
CREATE INDEX problems_easiest ON problems(reward_mean IS NULL, reward_mean DESC, taskset, problem);
CREATE INDEX problems_learned ON problems(newest - first IS NULL, newest - first DESC, taskset, problem);
CREATE INDEX problems_forgotten ON problems(newest - first IS NULL, newest - first, taskset, problem);
CREATE INDEX problems_seen ON problems(num_groups DESC, taskset, problem);
CREATE TABLE tasksets(taskset TEXT PRIMARY KEY, problems INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE letters(
    id TEXT PRIMARY KEY, role TEXT NOT NULL, topic TEXT NOT NULL, reason TEXT NOT NULL, error TEXT NOT NULL,
    kind TEXT NOT NULL, at REAL NOT NULL, offset INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX letters_by_offset ON letters(offset);
CREATE INDEX letters_by_reason ON letters(reason, kind, offset);
CREATE TABLE text_marks(
    partition INTEGER PRIMARY KEY, end INTEGER NOT NULL, last INTEGER NOT NULL, fingerprint TEXT NOT NULL
);
CREATE TABLE texts(  -- of rollouts
    id INTEGER PRIMARY KEY,  -- sequence << 20 | sibling
    version INTEGER,  -- that sampled the first token
    answer TEXT,  -- as it is compared with those of others; NULL: none was found
    tools TEXT NOT NULL,  -- names between spaces
    said TEXT NOT NULL  -- last: who asks for another column would read its pages, too
);
CREATE INDEX texts_by_version ON texts(version);
CREATE TABLE tools(name TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE prompts(taskset TEXT NOT NULL, problem INTEGER NOT NULL, text TEXT NOT NULL, answer TEXT);
CREATE UNIQUE INDEX prompts_by_problem ON prompts(taskset, problem);
CREATE TABLE results(object TEXT PRIMARY KEY, evaluation TEXT NOT NULL, version INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE samples(  -- of evaluations, of the newest result of each version
    evaluation TEXT NOT NULL, version INTEGER NOT NULL, task INTEGER NOT NULL, number INTEGER NOT NULL,
    reward REAL, num_tokens INTEGER NOT NULL, reason TEXT NOT NULL, said TEXT NOT NULL
);
CREATE UNIQUE INDEX samples_by_task ON samples(evaluation, version, task, number);
CREATE INDEX samples_by_reward ON samples(evaluation, version, reward) WHERE reward IS NOT NULL;
CREATE TABLE questions(
    evaluation TEXT NOT NULL, task INTEGER NOT NULL, text TEXT NOT NULL, answer TEXT, PRIMARY KEY (evaluation, task)
);
"""

_ADMIT = """
    INSERT INTO admissions VALUES (CAST({row}.admitted_at / {bucket} AS INTEGER), {sign} 1, {sign} {row}.group_size)
    ON CONFLICT DO UPDATE SET groups = groups + excluded.groups, rollouts = rollouts + excluded.rollouts;
"""
_DECIDE = """
    INSERT INTO decisions SELECT CAST({row}.decided_at / {bucket} AS INTEGER), {row}.result, {row}.reason, {sign} 1,
    {sign} {row}.num_kept, {sign} {row}.num_expired, {sign} {row}.num_filtered, {sign} {row}.num_dead
    WHERE {row}.decided_at IS NOT NULL
    ON CONFLICT DO UPDATE SET groups = groups + excluded.groups, kept = kept + excluded.kept,
    expired = expired + excluded.expired, filtered = filtered + excluded.filtered, dead = dead + excluded.dead;
"""
_SCORE = """
    UPDATE problems SET num_scored = num_scored + 1, reward_sum = reward_sum + new.reward_mean,
    reward_mean = (reward_sum + new.reward_mean) / (num_scored + 1),
    first = CASE WHEN new.sequence < coalesce(first_sequence, new.sequence + 1) THEN new.reward_mean ELSE first END,
    newest = CASE WHEN new.sequence > coalesce(newest_sequence, -1) THEN new.reward_mean ELSE newest END,
    first_sequence = min(new.sequence, coalesce(first_sequence, new.sequence)),
    newest_sequence = max(new.sequence, coalesce(newest_sequence, new.sequence))
    WHERE taskset = new.taskset AND problem = new.problem AND new.reward_mean IS NOT NULL;
"""
_OLD, _NEW = {"row": "old", "sign": "-", "bucket": BUCKET_S}, {"row": "new", "sign": "+", "bucket": BUCKET_S}
_TRIGGERS = f"""
CREATE TRIGGER inserted AFTER INSERT ON groups BEGIN {(_ADMIT + _DECIDE).format(**_NEW)} END;
CREATE TRIGGER admitted AFTER UPDATE OF admitted_at, group_size ON groups BEGIN
    {_ADMIT.format(**_OLD)} {_ADMIT.format(**_NEW)}
END;
CREATE TRIGGER decided AFTER UPDATE OF decided_at, num_kept, num_expired, num_filtered, num_dead ON groups BEGIN
    {_DECIDE.format(**_OLD)} {_DECIDE.format(**_NEW)}
END;
CREATE TRIGGER grouped AFTER INSERT ON groups BEGIN
    INSERT INTO problems(taskset, problem, num_groups) VALUES (new.taskset, new.problem, 1)
    ON CONFLICT DO UPDATE SET num_groups = num_groups + 1;
    {_SCORE}
END;
CREATE TRIGGER scored AFTER UPDATE OF reward_mean ON groups WHEN old.reward_mean IS NULL BEGIN {_SCORE} END;
CREATE TRIGGER met AFTER INSERT ON problems BEGIN
    INSERT INTO tasksets VALUES (new.taskset, 1) ON CONFLICT DO UPDATE SET problems = problems + 1;
END;
"""
"""Triggers that keep the sums in the tables `admissions`, `decisions`, `problems` and `tasksets` equal to the groups. A
group's mean reward is set once."""


class CatalogDatabase:
    """The connection of the only process that writes a catalog. `CatalogUpdater` makes it and closes it."""

    def __init__(self, path: Path, identity: str) -> None:
        """Open the file, or make it anew if it cannot be used or belongs to another run. `identity` identifies the
        run."""
        self.path = path
        try:
            self._db = self._opened(identity)
        except (sqlite3.DatabaseError, _Useless):
            self._remove()
            self._db = self._opened(identity)
        self._inode = path.stat().st_ino

    def is_in_place(self) -> bool:
        """Return whether the file is still there, and was not made anew by another process. If not, close it."""
        with contextlib.suppress(OSError):
            if self.path.stat().st_ino == self._inode:
                return True
        self.close()
        return False

    def _opened(self, identity: str) -> Connection:
        db = sqlite3.connect(self.path, isolation_level=None, timeout=WAIT_S, check_same_thread=False)
        try:
            # Rows lost in a power cut are read from the log again; a half-written file is detected when it is opened.
            db.executescript(
                f"PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF; PRAGMA cache_size=-{CACHE_KIB}; "
                "PRAGMA journal_size_limit=16777216;"
            )
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version == 0:
                db.executescript(f"BEGIN; {_SCHEMA} {_TRIGGERS} PRAGMA user_version={FORMAT}; COMMIT;")
                db.execute("INSERT INTO facts VALUES ('run', ?)", (identity,))
            known = db.execute("SELECT value FROM facts WHERE name = 'run'").fetchone()
            if version not in (0, FORMAT) or known != (identity,):
                raise _Useless
            (sound,) = db.execute("PRAGMA quick_check(1)").fetchone()
            if sound != "ok":
                raise _Useless
        except BaseException:
            db.close()
            raise
        return db

    def _remove(self) -> None:
        for end in ("", "-wal", "-shm"):
            self.path.with_name(self.path.name + end).unlink(missing_ok=True)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Make the block's writes visible at once. If it raises, none of them are."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def rows(self, query: str, parameters: Mapping[str, Any] | tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""
        return self._db.execute(query, parameters).fetchall()

    def clear(self) -> None:
        """Remove every row, because the rows were made from another log."""
        with self.transaction() as db:
            for (table,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall():
                if table != "facts":
                    db.execute(f"DELETE FROM {table}")

    def close(self) -> None:
        """Close the file."""
        self._db.close()


class CatalogReader:
    """Reads a catalog, from any thread, while another process or thread may write it.

    All queries of a reader see the catalog at one moment. A page opens a reader, makes its queries, and closes it.
    """

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=ro",
            uri=True,
            isolation_level=None,
            timeout=WAIT_S,
            check_same_thread=False,
        )
        self._db.row_factory = Row
        try:
            self._db.execute("PRAGMA query_only=ON")
            self._db.execute("PRAGMA cache_size=-1024")
            self._db.execute("BEGIN")  # so that all questions of a page see the same moment
        except BaseException:
            self._db.close()
            raise

    def rows(self, query: str, parameters: Mapping[str, Any] | tuple[Any, ...] = ()) -> list[Row]:
        """Return the rows of a query. Each row has its columns by name."""
        return self._db.execute(query, parameters).fetchall()

    def each(self, query: str, parameters: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a query as tuples. It costs half of what `rows` does."""
        cursor = self._db.cursor()
        cursor.row_factory = None
        return cursor.execute(query, parameters)

    def row(self, query: str, parameters: Mapping[str, Any] | tuple[Any, ...] = ()) -> Row | None:
        """Return the first row of a query, or None."""
        found: Row | None = self._db.execute(query, parameters).fetchone()
        return found

    def close(self) -> None:
        """Close the connection."""
        self._db.close()

    def __enter__(self) -> CatalogReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_catalog(path: Path) -> CatalogReader | None:
    """Open a catalog for reading; None if there is no file, or another process is still making it."""
    try:
        catalog = CatalogReader(path)
    except sqlite3.OperationalError:  # no such file
        return None
    with contextlib.ExitStack() as opened:
        opened.callback(catalog.close)
        if catalog.rows("PRAGMA user_version")[0][0] != FORMAT:
            return None
        opened.pop_all()
    return catalog


def like(text: str) -> str:
    """Return the pattern of texts that have this one in them. Its escape character is an exclamation mark."""
    for sign in "!%_":
        text = text.replace(sign, f"!{sign}")
    return f"%{text}%"


class _Useless(Exception):
    """The file is not the catalog of this run in this format."""
