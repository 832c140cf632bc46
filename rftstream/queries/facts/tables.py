"""The tables of facts, and the numbers that stand for groups and rollouts in them.

A group's number is its sequence, taken from the first record that names the group. If another group has that number
already, or if the record has none, it gets a number below zero. So each name has exactly one number, whatever records
claim, and rows of one topic are nearly in the order of their numbers. A rollout's number combines its group's number
and its index.
"""

from __future__ import annotations

from rftstream.contracts.topics import TOPICS
from rftstream.queries.catalog.database import Connection

FORMAT = 8
"""Version of the tables and of the rows' meaning. A file of another version is made anew."""

BITS = 20
"""Bits of a rollout's number that hold the sibling's index."""
WHOLE = (1 << BITS) - 1
"""Value in place of the sibling's index: the group's name is the full name of the rollout."""
MAX_SIBLING_DIGITS = 6
MAX_NAMES = 50_000
"""Most numbers of groups that a writer remembers."""

EXPERIENCE, DEMONSTRATION, MANIFEST, OTHER = range(4)
"""Kinds of rows of `batches`. OTHER: an experience that names no rollout or no group."""

FLOW = ("tasks", "rollouts", "verified", "partials")
"""Topics with records about one rollout each."""
KEYED = ("experts", "problems", "questions", "judgements", "weights")
"""Topics of which only the keys matter, and one number."""
READ = (*FLOW, "batches", "outcomes", *KEYED)

NUMBERS = {
    "tasks": "group_size",
    "rollouts": "num_tokens",
    "verified": "num_tokens",
    "batches": "batch_sequence",
    "partials": "piece",
    "experts": "number",
}
"""Topic -> header of the column `number`; other topics use `version`."""

UNSAMPLED = {b"skipped", b"undecodable"}
"""Statuses of rollouts without a sampled token: they have no length."""

_FLOW_TABLE = """
CREATE {temp} TABLE on_{topic}(
    rollout INTEGER NOT NULL, partition INTEGER NOT NULL, offset INTEGER NOT NULL,
    grp INTEGER,  -- NULL: it names none, and so it belongs to nobody
    number INTEGER NOT NULL, sequence INTEGER NOT NULL, epoch INTEGER NOT NULL,
    PRIMARY KEY (rollout, partition, offset)
) WITHOUT ROWID;
CREATE INDEX {temp_}{topic}_of_others ON on_{topic}(grp) WHERE grp != rollout >> 20;
"""
SCHEMA = """
CREATE TABLE marks(
    topic TEXT NOT NULL, partition INTEGER NOT NULL, end INTEGER NOT NULL, last INTEGER NOT NULL,
    fingerprint INTEGER NOT NULL, begin INTEGER NOT NULL, PRIMARY KEY (topic, partition)
) WITHOUT ROWID;
CREATE TABLE names(ident INTEGER PRIMARY KEY, name BLOB NOT NULL UNIQUE);
CREATE TABLE unreadable(
    topic TEXT NOT NULL, partition INTEGER NOT NULL, offset INTEGER NOT NULL, PRIMARY KEY (topic, partition, offset)
) WITHOUT ROWID;
CREATE TABLE keyed(
    topic TEXT NOT NULL, key BLOB NOT NULL, partition INTEGER NOT NULL, offset INTEGER NOT NULL,
    number INTEGER NOT NULL, epoch INTEGER NOT NULL, PRIMARY KEY (topic, key, partition, offset)
) WITHOUT ROWID;
CREATE TABLE on_batches(
    partition INTEGER NOT NULL, offset INTEGER NOT NULL, kind INTEGER NOT NULL, key INTEGER NOT NULL,
    share INTEGER NOT NULL, number INTEGER NOT NULL, rollout INTEGER, grp INTEGER,
    count INTEGER NOT NULL,  -- experiences, of a manifest; the number of the demonstration
    experts INTEGER NOT NULL,  -- demonstrations up to here, of a manifest
    PRIMARY KEY (partition, offset)
) WITHOUT ROWID;
CREATE INDEX batches_by_rollout ON on_batches(rollout, number) WHERE kind = 0;
CREATE INDEX batches_by_manifest ON on_batches(number, share) WHERE kind = 2;
CREATE INDEX batches_by_demonstration ON on_batches(grp) WHERE kind = 1;
CREATE TABLE on_outcomes(
    offset INTEGER PRIMARY KEY, key BLOB NOT NULL, grp INTEGER,  -- NULL: what a batch has once more
    sequence INTEGER NOT NULL, batch INTEGER NOT NULL, epoch INTEGER NOT NULL,
    result INTEGER NOT NULL, late INTEGER NOT NULL,
    seen INTEGER NOT NULL,  -- whether operators looked at the group
    reason TEXT NOT NULL  -- of a filtered group
);
CREATE INDEX outcomes_by_group ON on_outcomes(grp);
CREATE INDEX outcomes_by_batch ON on_outcomes(batch);
CREATE TABLE on_named(  -- rollouts that outcomes name
    rollout INTEGER NOT NULL, offset INTEGER NOT NULL, place INTEGER NOT NULL, sequence INTEGER NOT NULL,
    batch INTEGER NOT NULL, result INTEGER NOT NULL, late INTEGER NOT NULL, scored INTEGER NOT NULL,
    rejected INTEGER NOT NULL, tokens INTEGER NOT NULL, PRIMARY KEY (rollout, offset, place)
) WITHOUT ROWID;
CREATE TABLE on_uses(  -- groups that batches have once more
    offset INTEGER NOT NULL, place INTEGER NOT NULL, grp INTEGER NOT NULL, batch INTEGER NOT NULL,
    operator INTEGER NOT NULL, use INTEGER NOT NULL, kind INTEGER NOT NULL, PRIMARY KEY (offset, place)
) WITHOUT ROWID;
CREATE TABLE on_used(  -- and their rollouts
    rollout INTEGER NOT NULL, batch INTEGER NOT NULL, offset INTEGER NOT NULL, place INTEGER NOT NULL,
    PRIMARY KEY (rollout, batch, offset, place)
) WITHOUT ROWID;
CREATE TABLE on_decisions(  -- of operators about groups
    offset INTEGER NOT NULL, place INTEGER NOT NULL, decision INTEGER NOT NULL, PRIMARY KEY (offset, place)
) WITHOUT ROWID;
CREATE TABLE decisions(
    ident INTEGER PRIMARY KEY, operator TEXT NOT NULL, action TEXT NOT NULL, reason TEXT NOT NULL,
    UNIQUE (operator, action, reason)
);
CREATE TABLE broken(offset INTEGER PRIMARY KEY, why TEXT NOT NULL);  -- outcomes that cannot be decoded
""" + "".join(_FLOW_TABLE.format(topic=topic, temp="", temp_="") for topic in FLOW if not TOPICS[topic].compacted)
COMPACTED = "".join(
    _FLOW_TABLE.format(topic=topic, temp="TEMP", temp_="temp.") for topic in FLOW if TOPICS[topic].compacted
)
"""Tables of compacted topics. They are read anew each time, since compacted records no longer count."""
TABLES_OF = {
    **{topic: (f"on_{topic}",) for topic in (*FLOW, "batches")},
    "outcomes": ("on_outcomes", "on_named", "on_uses", "on_used", "on_decisions", "broken"),
    **dict.fromkeys(KEYED, ("keyed",)),
}
"""Topic -> the tables for its records, beside `unreadable`."""


class Names:
    """Maps the names of groups and rollouts to numbers, and back."""

    def __init__(self, db: Connection) -> None:
        self._db = db
        self._known: dict[bytes, int] = {}

    def group(self, name: bytes, sequence: int) -> int:
        """Return the number of a group. A new group gets its sequence, if that is free."""
        found = self._known.get(name)
        if found is None:
            if len(self._known) >= MAX_NAMES:
                self._known.clear()
            found = self.find(name)
            if found is None:
                found = sequence if self._is_free(sequence) else self._below_zero()
                self._db.execute("INSERT INTO names VALUES (?, ?)", (found, name))
            self._known[name] = found
        return found

    def rollout(self, name: bytes, sequence: int) -> int:
        """Return the number of a rollout."""
        group, _, sibling = name.rpartition(b"/")
        is_regular = sibling.isdigit() and len(sibling) <= MAX_SIBLING_DIGITS and str(int(sibling)).encode() == sibling
        if group and is_regular:
            return self.group(group, sequence) << BITS | int(sibling)
        return self.group(name, -1) << BITS | WHOLE

    def find(self, name: bytes) -> int | None:
        """Return the number of a group, or None if no record has named it."""
        row = self._db.execute("SELECT ident FROM names WHERE name = ?", (name,)).fetchone()
        return None if row is None else int(row[0])

    def of_group(self, number: int) -> bytes:
        """Return the name of a group."""
        name: bytes = self._db.execute("SELECT name FROM names WHERE ident = ?", (number,)).fetchone()[0]
        return name

    def of_rollout(self, number: int) -> bytes:
        """Return the name of a rollout."""
        group, sibling = self.of_group(number >> BITS), number & WHOLE
        return group if sibling == WHOLE else b"%b/%d" % (group, sibling)

    def _is_free(self, number: int) -> bool:
        return number >= 0 and not self._db.execute("SELECT 1 FROM names WHERE ident = ?", (number,)).fetchone()

    def _below_zero(self) -> int:
        return int(self._db.execute("SELECT min(0, coalesce(min(ident), 0)) - 1 FROM names").fetchone()[0])
