"""The laws of a log, as queries of its facts. Each query finds what breaks a law, and has the sentence that reports it.

`make_views` makes the views that the queries read. They leave out records that are not in force or deleted, and give
the fates of groups and rollouts at the version in force.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from rftstream.contracts.control import Trimmed
from rftstream.contracts.records import TopicPartition
from rftstream.errors import ContractError
from rftstream.queries.audits.rows import digest, headers_of, twin_key
from rftstream.queries.facts.database import Index
from rftstream.queries.facts.tables import FLOW
from rftstream.queries.formatting import plural
from rftstream.service.loops.tracker import decode_finished
from rftstream.service.role import Log
from rftstream.transport.base import Position

PENDING, BATCHED, TRAINED, EXPIRED, FILTERED, DEAD = range(6)
"""Fates of rollouts and groups. BATCHED counts as pending: its batch is not trained yet."""

NUM_EXAMPLES = 3
"""Number of names in the sentence about a problem."""

Twins = Counter[int]
"""Digest of a key -> the extra records."""

_PLACE = "topic TEXT, partition INTEGER, offset INTEGER, PRIMARY KEY (topic, partition, offset)"
TEMPORARY = {
    "done": "topic TEXT, partition INTEGER, below INTEGER, PRIMARY KEY (topic, partition)",
    "finished": _PLACE,
    "in_force": "offset INTEGER PRIMARY KEY",
    "foreign_places": _PLACE,
    "twin_outcomes": "offset INTEGER PRIMARY KEY",
    "step_keys": "key BLOB, offset INTEGER, PRIMARY KEY (key, offset)",
    "admitted": "grp INTEGER PRIMARY KEY, siblings INTEGER, size INTEGER",
    "repeated_keys": "key INTEGER PRIMARY KEY",
    "unpromised": "rollout INTEGER, is_batched INTEGER",
}
"""Temporary table -> its columns."""

_FATE = """CASE WHEN result != 0 THEN result + 2 {more} WHEN batch >= 0 AND batch < {version} THEN 2 ELSE 1 END"""
# Of the siblings of a batched group a latecomer is expired, one without a reward dead, one that an operator rejected
# filtered.
_SIBLING = "WHEN late THEN 3 WHEN rejected THEN 4 WHEN NOT scored THEN 5"
_NOT_FOREIGN = """NOT EXISTS (SELECT 1 FROM foreign_places f
    WHERE f.topic = '{topic}' AND f.partition = {partition} AND f.offset = t.offset)"""
VIEWS = {
    **{
        f"all_{topic}": f"SELECT * FROM on_{topic} WHERE (sequence < 0 OR sequence >= {{sequence}})"
        + ("{claimed}" if topic == "tasks" else "")
        for topic in FLOW
    },
    **{topic: f"SELECT * FROM all_{topic} WHERE grp IS NOT NULL" for topic in FLOW},
    "all_batches": "SELECT * FROM on_batches t WHERE (number < 0 OR number >= {first}) AND "
    + _NOT_FOREIGN.format(topic="batches", partition="t.partition"),
    "batches": "SELECT * FROM all_batches WHERE kind = 0",
    "manifests": "SELECT * FROM all_batches WHERE kind = 2",
    "all_outcomes": "SELECT * FROM on_outcomes t WHERE " + _NOT_FOREIGN.format(topic="outcomes", partition="0"),
    "decided": f"SELECT *, {_FATE.format(more='', version='{version}')} AS fate FROM all_outcomes"
    " WHERE grp IS NOT NULL AND late = 0 AND offset NOT IN (SELECT offset FROM twin_outcomes)",
    "outcomes": "SELECT * FROM decided WHERE sequence >= {sequence}",
    "all_named": f"SELECT *, {_FATE.format(more=_SIBLING, version='{version}')} AS fate,"
    " CASE WHEN scored AND NOT late AND NOT rejected THEN batch ELSE -1 END AS own_batch FROM on_named t"
    " WHERE offset NOT IN (SELECT offset FROM twin_outcomes) AND "
    + _NOT_FOREIGN.format(topic="outcomes", partition="0"),
    "named": "SELECT * FROM all_named WHERE sequence >= {sequence}",
    "uses": "SELECT * FROM on_uses t WHERE " + _NOT_FOREIGN.format(topic="outcomes", partition="0"),
    "used": "SELECT * FROM on_used t WHERE " + _NOT_FOREIGN.format(topic="outcomes", partition="0"),
    "announced": "SELECT * FROM keyed t WHERE topic = 'weights' AND "
    + _NOT_FOREIGN.format(topic="weights", partition="t.partition"),
    "demonstrations_used": "SELECT grp, count AS number, number AS batch, min(offset) FROM all_batches"
    " WHERE kind = 1 GROUP BY grp",
}
"""Name of a view -> its query. Views beginning with `all_` include twins and records without an owner."""


@dataclass(frozen=True, slots=True)
class Law:
    """A law, with the query for its violations."""

    sentence: str
    """Sentence with `{}` for the number of violations."""
    noun: str
    breaks: str
    """The query for the numbers of the violations."""
    on: str = ""
    """The topic from which examples are shown; empty: no examples."""


def _strangers(here: str, before: str) -> Law:
    """Make the law that each id on a topic is on the topic before."""
    return Law(
        f"{here}: {{}} that {before} does not have: ",
        "rollout",
        f"SELECT DISTINCT rollout FROM {here} h WHERE NOT EXISTS"
        f" (SELECT 1 FROM {before} b WHERE b.rollout = h.rollout)",
        here,
    )


def _lost(here: str, readers: str, after: str, found: str) -> Law:
    """Make the law that a record which a topic's readers have finished has a successor."""
    return Law(
        f"{here}: {{}} that {readers} passed, with nothing on {after}: ",
        "rollout",
        f"SELECT DISTINCT rollout FROM {here} h WHERE NOT EXISTS"
        f" (SELECT 1 FROM {found} a WHERE a.rollout = h.rollout)"
        f" AND (offset < (SELECT below FROM done d WHERE d.topic = '{here}' AND d.partition = h.partition)"
        f" OR EXISTS (SELECT 1 FROM finished f WHERE f.topic = '{here}' AND f.partition = h.partition"
        " AND f.offset = h.offset))",
        here,
    )


_BATCHED = "EXISTS (SELECT 1 FROM named n WHERE n.rollout = b.rollout AND n.own_batch >= {first})"
_PROMISED = (
    "EXISTS (SELECT 1 FROM named n WHERE n.rollout = b.rollout AND n.own_batch = b.number AND n.own_batch >= {first})"
)
_REUSED = "EXISTS (SELECT 1 FROM used u WHERE u.rollout = b.rollout AND u.batch = b.number)"
_HELD = "EXISTS (SELECT 1 FROM batches b WHERE b.rollout = t.rollout AND b.number = {batch})"
_UNPROMISED = (
    f"SELECT rollout, {_BATCHED} FROM batches b WHERE number <= (SELECT coalesce(max(batch), -1) FROM outcomes)"
    f" AND NOT {_PROMISED} AND NOT {_REUSED}"
)
"""Outcomes of later batches were written after the audit read `outcomes`."""

LAWS = (
    _strangers("rollouts", "tasks"),
    _strangers("partials", "tasks"),
    _strangers("verified", "rollouts"),
    _strangers("batches", "verified"),
    Law(
        "outcomes: {} that was never admitted: ", "group",
        "SELECT DISTINCT grp FROM outcomes WHERE grp NOT IN (SELECT grp FROM admitted)", "outcomes",
    ),
    Law(
        "outcomes: {} named that verified does not have", "rollout",
        "SELECT DISTINCT rollout FROM named n"
        " WHERE NOT EXISTS (SELECT 1 FROM verified v WHERE v.rollout = n.rollout)",
    ),
    Law(
        "outcomes: {} named by more than one record: ", "rollout",
        "SELECT rollout FROM named GROUP BY rollout HAVING count(*) > 1", "verified",
    ),
    _lost("tasks", "the explorers", "rollouts", "rollouts"),
    _lost("rollouts", "the verifiers", "verified", "verified"),
    _lost("verified", "the buffer", "outcomes", "named"),
    Law(
        "tasks: {} with other than group_size siblings: ", "group",
        "SELECT grp FROM admitted WHERE siblings != size", "tasks",
    ),
    # Outcomes and batches are written in one transaction, so a batch holds exactly the rollouts that outcomes name, and
    # the rollouts that it uses again.
    Law(
        "batches: {} not in the batch that the outcome says: ", "rollout",
        "SELECT rollout FROM named t WHERE own_batch >= {first} AND NOT " + _HELD.replace("{batch}", "t.own_batch"),
        "verified",
    ),
    Law(
        "batches: {} not in the batch that is said to have it once more", "rollout",
        "SELECT DISTINCT rollout, batch FROM used t WHERE batch >= {first} AND NOT "
        + _HELD.replace("{batch}", "t.batch"),
    ),
    Law("batches: {} that no outcome batched: ", "rollout",
        "SELECT DISTINCT rollout FROM unpromised WHERE NOT is_batched", "batches"),
    Law("batches: {} in a batch for which neither its outcome nor a reuse is there: ", "rollout",
        "SELECT DISTINCT rollout FROM unpromised WHERE is_batched", "batches"),
    # Uses are of decided groups, come after the groups' own batches, and are numbered without gaps.
    Law("outcomes: {} used once more that have no outcome", "group",
        "SELECT DISTINCT grp FROM uses u WHERE NOT EXISTS (SELECT 1 FROM decided d WHERE d.grp = u.grp)"),
    Law("outcomes: {} of groups in a batch that is not later than the group's own", "use",
        "SELECT u.grp FROM uses u JOIN decided d ON d.grp = u.grp WHERE u.batch <= d.batch"),
    Law("outcomes: {} of groups that no batch had before", "use",
        "SELECT u.grp FROM uses u JOIN decided d ON d.grp = u.grp WHERE d.batch < 0 AND u.kind = 0"),
    Law(
        "outcomes: {} of groups out of order, expected each group's to count 1, 2, ... in later and later batches",
        "use",
        "SELECT grp FROM (SELECT grp, use, batch, lag(use, 1, 0) OVER one AS use_before,"
        " lag(batch, 1, -1) OVER one AS batch_before FROM uses"
        " WINDOW one AS (PARTITION BY grp, operator ORDER BY use, batch))"
        " WHERE use != use_before + 1 OR batch <= batch_before",
    ),
)  # fmt: skip
"""The laws, in the order of their sentences in a report."""


def make_views(index: Index, said: Trimmed, *, version: int, claimed: int | None) -> None:
    """Make the views of the records that count. `said`: the deletions; `version`: the version in force; `claimed`:
    newest feeder epoch whose tasks are in force (None: all are)."""
    values = {
        "sequence": said.sequence,
        "first": said.version,
        "version": version,
        "claimed": "" if claimed is None else f" AND (grp IS NULL OR epoch BETWEEN 1 AND {claimed})",
    }
    for name in reversed(VIEWS):
        index.execute(f"DROP VIEW IF EXISTS temp.{name}")
    for name, question in VIEWS.items():
        index.execute(f"CREATE TEMP VIEW {name} AS {question.format(**values)}")
    # The first sibling of a group gives the number of siblings.
    index.execute(
        "INSERT INTO temp.admitted SELECT grp, siblings, size FROM (SELECT grp, count(*) AS siblings, number AS size,"
        " min(rollout) FROM (SELECT rollout, grp, number, min(offset) FROM tasks GROUP BY rollout) GROUP BY grp)"
    )
    index.execute(f"INSERT INTO temp.unpromised {_UNPROMISED.format(**values)}")


def broken_laws(index: Index, said: Trimmed) -> list[str]:
    """Return a sentence for each law that the log breaks."""
    sentences = []
    for law in LAWS:
        breaks = law.breaks.replace("{first}", str(said.version))
        if count := index.number(f"SELECT count(*) FROM ({breaks})"):
            sentence = law.sentence.format(plural(count, law.noun))
            sentences.append(sentence + (_examples(index, law, breaks) if law.on else ""))
    return sentences


def _examples(index: Index, law: Law, breaks: str) -> str:
    """Return the names of the first violations of a law, with the places of their records."""
    by_group = law.noun == "group"
    column = "grp" if by_group else "rollout"
    numbers = f"SELECT DISTINCT {column} FROM ({breaks})"
    shown = []
    for (number,) in list(index.rows(f"{numbers} ORDER BY 1 LIMIT {NUM_EXAMPLES}")):
        name = index.names.of_group(number) if by_group else index.names.of_rollout(number)
        partition = "0" if law.on == "outcomes" else "partition"
        where = index.rows(f"SELECT {partition}, offset FROM on_{law.on} WHERE {column} = ? LIMIT 4", (number,))
        places = [f"{law.on}[{partition}]@{offset}" for partition, offset in where]
        if places:
            shown.append(f"{_shown(name)} ({', '.join(places)})")
    more = index.number(f"SELECT count(*) FROM ({numbers})") - len(shown)
    return ", ".join(shown) + (f" and {more:,} more" if more > 0 and shown else "")


def _shown(name: bytes) -> str:
    return name.replace(b"\0", b" ").decode("ascii", "backslashreplace")


# --------------------------------------------------------------------------------------------- twins


def twins_on(index: Index, topic: str) -> Twins:
    """Return the keys that have more than one record on a topic."""
    names = index.names
    if topic == "partials":
        rows = index.rows(_repeated("all_partials", "rollout, number"))
        return Twins({digest(names.of_rollout(one) + b"\0%d" % piece): count for one, piece, count in list(rows)})
    if topic in FLOW:
        rows = index.rows(_repeated(f"all_{topic}", "rollout"))
        return Twins({digest(names.of_rollout(one)): count for one, count in list(rows)})
    if topic == "batches":
        return Twins(dict(index.rows(_repeated("all_batches WHERE key IN (SELECT key FROM repeated_keys)", "key"))))
    if topic == "outcomes":
        found = Twins()
        for key, _, count in index.rows(_repeated("all_outcomes", "key, grp IS NULL")):
            found[digest(key)] += count
        return found
    table = {"weights": "announced", "steps": "step_keys"}.get(topic, f"keyed WHERE topic = '{topic}'")
    return Twins({digest(key): count for key, count in index.rows(_repeated(table, "key"))})


def _repeated(table: str, columns: str) -> str:
    return f"SELECT {columns}, count(*) - 1 FROM {table} GROUP BY {columns} HAVING count(*) > 1"


def twin_sentences(log: Log, twins: Mapping[str, Twins]) -> list[str]:
    """Return a sentence for each topic with twins."""
    return [
        f"{topic}: {plural(keys.total(), 'twin')}: {_twin_examples(log, topic, keys)}"
        for topic, keys in twins.items()
        if keys
    ]


def _twin_examples(log: Log, topic: str, keys: Twins) -> str:
    places: dict[bytes, list[str]] = {}
    for record in log.read(topic, bodies=False):
        key = twin_key(topic, headers_of(record))
        if key is not None and digest(key) in keys and (key in places or len(places) < NUM_EXAMPLES):
            places.setdefault(key, []).append(str(record))
    more = len(keys) - len(places)
    shown = [f"{_shown(key)} ({', '.join(where[:4])})" for key, where in places.items()]
    return ", ".join(shown) + (f" and {more:,} more" if more > 0 and shown else "")


# --------------------------------------------------------------------------------------------- finished records


def note_done(index: Index, topic: str, positions: Mapping[TopicPartition, Position]) -> None:
    """Note which records of a topic its readers have committed as finished."""
    for place, position in positions.items():
        if place.topic != topic:
            continue
        index.insert("done", 3, [(*place, position.offset)])
        try:
            finished = decode_finished(position)
        except ContractError:  # metadata of another kind: the position alone is enough
            continue
        index.insert("finished", 3, ((*place, offset) for offset in finished))
