"""Finds the records of `weights`, `outcomes` and `batches` that are not in force (service/records/in_force.py), and the
twins that are copies.

Facts hold only headers, but bodies show what is foreign. So bodies are read only where something looks wrong.

A twin is a second record that a role wrote for the same thing. Its times, and so its bytes, differ from those of the
first. A record with the same bytes is a copy: tools that mirror topics or replay records leave copies. A record with
the headers of another one and without a message is noise. Readers skip copies and noise, or a copy has the same effect
once more: another rollout for the copy of a task. Such a rollout is an echo, and no twin either.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from hashlib import blake2b

from rftstream.contracts import codec
from rftstream.contracts.control import Claim, Trimmed
from rftstream.contracts.records import Record
from rftstream.errors import ContractError
from rftstream.queries.audits.laws import Twins
from rftstream.queries.audits.rows import digest, headers_of, twin_key
from rftstream.queries.facts.database import Index
from rftstream.queries.facts.tables import MANIFEST
from rftstream.roles.buffer import BUFFER
from rftstream.roles.feeder import FEEDER
from rftstream.roles.trainer.recorded_batches import foreign_places
from rftstream.service.control_view import read_control
from rftstream.service.role import Log

FLOW = ("tasks", "rollouts", "verified")
"""Topics on which each rollout has one record, from the first to the last."""

_UNREADABLE = "SELECT partition, offset FROM unreadable WHERE topic = '{topic}'"


def note_foreign_announcements(index: Index, log: Log) -> int:
    """Note foreign records of `weights`, which may be copies of announcements. Return their number."""
    own = "SELECT partition, offset FROM keyed WHERE topic = 'weights'"
    unreadable = _UNREADABLE.format(topic="weights")
    twice = "SELECT count(*) FROM (SELECT 1 FROM keyed WHERE topic = 'weights' GROUP BY key HAVING count(*) > 1)"
    if not index.number(twice) and index.number(f"SELECT count(*) FROM ({unreadable})") < 2:
        return 0
    return _note_all_but_those_in_force(index, log, "weights", f"{own} UNION ALL {unreadable}")


def claimed_tasks(log: Log) -> int | None:
    """Return the newest epoch whose tasks are in force; tasks of later epochs name one that no feeder has claimed.
    None: all are in force, since the tasks of an imported run come from another feeder."""
    control = read_control(log.transport)
    claim = control.claims.get(FEEDER.name)
    imported = control.ended is not None and control.ended.reason == "imported"
    return None if claim is None or imported else claim.epoch


def note_foreign_outcomes(index: Index, log: Log) -> int:
    """Note foreign records of `outcomes`: twins, records that cannot be decoded, and those of an epoch that no buffer
    has claimed. Return their number."""
    claim: Claim | None = read_control(log.transport).claims.get(BUFFER.name)
    suspicious = (
        "SELECT count(*) FROM broken",
        "SELECT count(*) FROM (SELECT 1 FROM on_outcomes GROUP BY key HAVING count(*) > 1)",
        "SELECT count(*) FROM on_outcomes WHERE grp IS NOT NULL AND late = 0"
        f" AND epoch NOT BETWEEN 1 AND {0 if claim is None else claim.epoch}",
    )
    if not any(map(index.number, suspicious)):
        return 0
    all_ = "SELECT 0 AS partition, offset FROM on_outcomes UNION ALL SELECT 0, offset FROM broken"
    num_foreign = _note_all_but_those_in_force(index, log, "outcomes", all_)
    index.execute(  # of twins in force, the first one counts
        "INSERT INTO temp.twin_outcomes SELECT offset FROM (SELECT offset, row_number() OVER (PARTITION BY key"
        " ORDER BY offset) AS place FROM on_outcomes WHERE grp IS NOT NULL"
        " AND offset NOT IN (SELECT offset FROM foreign_places WHERE topic = 'outcomes')) WHERE place > 1"
    )
    return num_foreign


def _note_all_but_those_in_force(index: Index, log: Log, topic: str, all_: str) -> int:
    index.execute("DELETE FROM temp.in_force")
    index.insert("in_force", 1, ((record.offset,) for record, _ in log.in_force(topic)))
    index.execute(
        f"INSERT INTO temp.foreign_places SELECT '{topic}', partition, offset FROM ({all_})"
        " WHERE offset NOT IN (SELECT offset FROM in_force)"
    )
    return index.number(f"SELECT count(*) FROM foreign_places WHERE topic = '{topic}'")


def note_foreign_experiences(index: Index, log: Log, said: Trimmed) -> int:
    """Note foreign records of `batches`, from the first batch that is not deleted according to `said`. Return their
    number."""
    kept = f"SELECT * FROM on_batches WHERE number < 0 OR number >= {said.version}"
    unreadable = _UNREADABLE.format(topic="batches")
    index.execute(f"INSERT INTO temp.repeated_keys SELECT key FROM ({kept}) GROUP BY key HAVING count(*) > 1")
    suspicious = (f"SELECT count(*) FROM ({unreadable})", "SELECT count(*) FROM repeated_keys")
    rows = index.rows(f"SELECT partition, kind, number, count FROM ({kept}) ORDER BY partition, offset")
    if not any(map(index.number, suspicious)) and _are_chains(rows):
        return 0
    begins = [begin for _, begin in sorted(log.transport.admin.begin_offsets("batches").items())]
    told = said.offsets.get("batches") or tuple(begins)
    starts = [max(pair) for pair in zip(begins, told, strict=True)]
    foreign = foreign_places(log.transport, starts, said.version)
    index.insert("foreign_places", 3, ((*place, offset) for place, offset in foreign))
    all_ = f"SELECT partition, offset FROM ({kept}) UNION ALL {unreadable}"
    for partition, start in enumerate(starts):
        index.execute(
            f"INSERT OR IGNORE INTO temp.foreign_places SELECT 'batches', partition, offset FROM ({all_})"
            " WHERE partition = ? AND offset < ?",
            (partition, start),
        )
    return index.number(
        f"SELECT count(*) FROM ({all_}) t WHERE EXISTS (SELECT 1 FROM foreign_places f"
        " WHERE f.topic = 'batches' AND f.partition = t.partition AND f.offset = t.offset)"
    )


def _are_chains(rows: Iterable[tuple[int, int, int, int]]) -> bool:
    """Return whether the records of each share form whole batches, one after the other, judged by headers."""
    for _, share in itertools.groupby(rows, key=lambda row: row[0]):
        expected, size, kind = -1, 0, MANIFEST
        for place, (_, kind, number, count) in enumerate(share):
            expected = number if place == 0 else expected
            if number != expected or (kind == MANIFEST and size != count):
                return False
            expected, size = (expected + 1, 0) if kind == MANIFEST else (expected, size + 1)
        if kind != MANIFEST:
            return False
    return True


def without_copies(log: Log, twins: Mapping[str, Twins]) -> tuple[dict[str, Twins], dict[str, int]]:
    """Return the twins without copies and their echoes, and the number of these on each topic."""
    left: dict[str, Twins] = {}
    foreign: dict[str, int] = {}
    copied: set[int] = set()
    for topic in sorted(twins, key=lambda name: FLOW.index(name) if name in FLOW else -1):
        keys = twins[topic]
        echoes = Twins({key: count for key, count in keys.items() if topic in FLOW and key in copied})
        copies = _copies(log, topic, keys - echoes)
        if topic in FLOW:
            copied |= {*echoes, *copies}
        left[topic] = keys - echoes - copies
        if num := keys.total() - left[topic].total():
            foreign[topic] = num
    return left, foreign


def _copies(log: Log, topic: str, wanted: Twins) -> Twins:
    """Return the keys of records that equal an earlier record byte for byte, or that are unreadable and come after
    another record of their key. A key comes once per record."""
    seen: set[tuple[int, bytes]] = set()
    begun: set[int] = set()
    copies = Twins()
    for record in log.read(topic) if wanted else ():
        text = twin_key(topic, headers_of(record))
        if text is None or (key := digest(text)) not in wanted:
            continue
        content = blake2b(repr((record.key, record.value, record.headers)).encode(), digest_size=16).digest()
        if (key, content) in seen or (key in begun and not _is_readable(record)):
            copies[key] += 1
        seen.add((key, content))
        begun.add(key)
    return copies


def _is_readable(record: Record) -> bool:
    try:
        codec.from_record(record)
    except ContractError:
        return False
    return True
