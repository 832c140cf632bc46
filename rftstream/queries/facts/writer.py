"""Turns records into rows of facts: from headers, and for outcomes also from bodies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from rftstream.contracts import codec
from rftstream.contracts.messages import CONTRACTS_ON
from rftstream.contracts.outcomes import BatchReuse, GroupOutcome, GroupResult, OperatorDecision, ReuseKind
from rftstream.contracts.records import Record
from rftstream.contracts.topics import TOPICS
from rftstream.errors import ContractError
from rftstream.queries.audits.rows import RESULTS, digest, headers_of, integer, twin_key
from rftstream.queries.catalog.database import Connection
from rftstream.queries.facts.tables import (
    DEMONSTRATION,
    EXPERIENCE,
    KEYED,
    MANIFEST,
    MAX_NAMES,
    NUMBERS,
    OTHER,
    UNSAMPLED,
    Names,
)
from rftstream.service.records.in_force import writer_epoch

KINDS = (ReuseKind.replay, ReuseKind.hindsight)
"""The kinds of use in a fixed order. A kind is stored as its index."""
MOST = 1 << 40
"""Upper bound of all counts. Larger, invented numbers are replaced by it, so that sums stay in range."""


class FactsWriter:
    """Turns records into rows, in the transaction that the caller has begun."""

    def __init__(self, db: Connection) -> None:
        self._db = db
        self._names = Names(db)
        self._decisions: dict[tuple[str, str, str], int] = {}
        """Numbers of the decisions met so far. Decisions that differ in their siblings alone have one number."""

    def absorb(self, topic: str, records: Iterable[Record]) -> None:
        """Write the rows of records of one topic."""
        if topic == "outcomes":
            self._outcomes(records)
            return
        contracts = {name.encode() for name in CONTRACTS_ON[topic]}
        rows, unreadable = [], []
        encode = self._batch_row if topic == "batches" else self._keyed_row if topic in KEYED else self._flow_row
        for record in records:  # millions of them
            headers = dict(reversed(record.headers))
            key = twin_key(topic, headers) if headers.get("contract") in contracts else None
            if key is not None:
                rows.append(encode(topic, record, headers, key))
            elif headers and not TOPICS[topic].compacted:
                unreadable.append((topic, record.partition, record.offset))
        self._insert("keyed" if topic in KEYED else f"on_{topic}", rows)
        self._insert("unreadable", unreadable)

    def _insert(self, table: str, rows: list[Any]) -> None:
        if rows:
            self._db.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)

    def _ids(self, headers: dict[str, bytes], rollout_id: bytes) -> tuple[int, int | None]:
        """Return the numbers of a rollout and its group; None for a group that is not named."""
        group_id, sequence = headers.get("group_id"), integer(headers.get("sequence"))
        if "expert" in headers:
            sequence = -1  # of demonstrations, which are counted separately
        group = None if group_id is None else self._names.group(group_id, sequence)
        return self._names.rollout(rollout_id, sequence), group

    def _flow_row(self, topic: str, record: Record, headers: dict[str, bytes], _: bytes) -> tuple[Any, ...]:
        rollout, group = self._ids(headers, headers["rollout_id"])
        number = -1 if headers.get("status") in UNSAMPLED else integer(headers.get(NUMBERS[topic]))
        epoch = integer(headers.get("writer_epoch"))
        return rollout, record.partition, record.offset, group, number, integer(headers.get("sequence")), epoch

    def _keyed_row(self, topic: str, record: Record, headers: dict[str, bytes], key: bytes) -> tuple[Any, ...]:
        number, epoch = headers.get(NUMBERS.get(topic, "version")), headers.get("writer_epoch")
        return topic, key, record.partition, record.offset, integer(number), integer(epoch)

    def _batch_row(self, _: str, record: Record, headers: dict[str, bytes], key: bytes) -> tuple[Any, ...]:
        kind, count, experts = OTHER, integer(headers.get("count")), 0
        rollout, group = None, None
        rollout_id, group_id = headers.get("rollout_id"), headers.get("group_id")
        if headers["contract"] == b"batch_manifest":
            kind, experts = MANIFEST, max(0, integer(headers.get("total_experts")))
        elif rollout_id is not None and group_id is not None:
            kind = DEMONSTRATION if "expert" in headers else EXPERIENCE
            rollout, group = self._ids(headers, rollout_id)
            if kind == DEMONSTRATION:
                count = integer(group_id.rpartition(b"/")[0].rpartition(b"/")[2])
        share, number = integer(headers.get("share")), integer(headers.get("batch_sequence"))
        return record.partition, record.offset, kind, digest(key), share, number, rollout, group, count, experts

    # ------------------------------------------------------------------------------------------ outcomes

    def _outcomes(self, records: Iterable[Record]) -> None:
        rows = defaultdict[str, list[Any]](list)
        for record in records:
            if codec.is_foreign(record):
                continue
            try:
                outcome = codec.from_record(record)
            except ContractError as error:
                rows["broken"].append((record.offset, str(error)))
                continue
            key = twin_key("outcomes", headers_of(record)) or str(record).encode()
            if isinstance(outcome, GroupOutcome):
                self._outcome(rows, record, key, outcome)
            elif isinstance(outcome, BatchReuse):
                self._reuse(rows, record, key, outcome)
        for table, some in rows.items():
            self._insert(table, some)

    def _outcome(self, rows: dict[str, list[Any]], record: Record, key: bytes, outcome: GroupOutcome) -> None:
        sequence, epoch = min(outcome.sequence, MOST), min(writer_epoch(record), MOST)
        batch = -1 if outcome.batch_sequence is None else min(outcome.batch_sequence, MOST)
        result, late = RESULTS.index(outcome.result), bool(outcome.late)
        group = self._names.group(outcome.group_id.encode(), sequence)
        seen = outcome.seen is not None
        reason = outcome.reason if outcome.result is GroupResult.filtered else ""
        rows["on_outcomes"].append((record.offset, key, group, sequence, batch, epoch, result, late, seen, reason))
        for place, decision in enumerate(outcome.decisions):
            rows["on_decisions"].append((record.offset, place, self._decision(decision)))
        for place, one in enumerate(outcome.rollouts):
            tokens = -1 if one.status.encode() in UNSAMPLED else min(one.num_tokens, MOST)
            scored, rejected = one.reason is None and one.reward is not None, one.rejected is not None
            rollout = self._names.rollout(one.rollout_id.encode(), sequence)
            rows["on_named"].append(
                (rollout, record.offset, place, sequence, batch, result, late, scored, rejected, tokens)
            )

    def _decision(self, decision: OperatorDecision) -> int:
        """Return the number of a decision."""
        what = decision.operator, str(decision.action), decision.reason
        found = self._decisions.get(what)
        if found is None:
            self._db.execute("INSERT OR IGNORE INTO decisions(operator, action, reason) VALUES (?, ?, ?)", what)
            query = "SELECT ident FROM decisions WHERE operator = ? AND action = ? AND reason = ?"
            (found,) = self._db.execute(query, what).fetchone()
            if len(self._decisions) >= MAX_NAMES:
                self._decisions.clear()
            self._decisions[what] = found
        return found

    def _reuse(self, rows: dict[str, list[Any]], record: Record, key: bytes, reuse: BatchReuse) -> None:
        batch = min(reuse.batch_sequence, MOST)
        rows["on_outcomes"].append((record.offset, key, None, -1, batch, -1, 0, False, False, ""))
        for place, use in enumerate(reuse.uses):
            sequence, operator, number = (min(one, MOST) for one in (use.sequence, use.operator, use.use))
            group = self._names.group(use.group_id.encode(), sequence)
            rows["on_uses"].append((record.offset, place, group, batch, operator, number, KINDS.index(use.kind)))
            for rollout_id in use.rollouts:
                rollout = self._names.rollout(rollout_id.encode(), sequence)
                rows["on_used"].append((rollout, batch, record.offset, len(rows["on_used"])))
