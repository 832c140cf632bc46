"""Turns records into the rows of a catalog. A record that is no message of its topic gets no row.

Topics are read from the end of the flow to its beginning, so that after one update every record downstream is also
upstream. Of twins the first record counts, as everywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from rftstream.contracts import codec
from rftstream.contracts.ids import split_group_id
from rftstream.contracts.messages import CONTRACTS_ON
from rftstream.contracts.outcomes import GroupOutcome, GroupResult, RolloutSummary
from rftstream.contracts.records import Record
from rftstream.error_kinds import kind_of
from rftstream.errors import ContractError
from rftstream.queries.audits.rows import RESULTS, headers_of, integer
from rftstream.queries.catalog.database import BUCKET_S, Connection

READ = ("dead", "batches", "outcomes", "verified", "rollouts", "tasks")
"""The topics of a catalog, in the order in which an update reads them."""

KEPT, EXPIRED, FILTERED, DEAD = range(4)
"""Fates of rollouts: KEPT in a batch, or the others. The codes are those of `RESULTS`."""


class CatalogWriter:
    """Turns records into rows, in the transaction that it is given. `CatalogUpdater` makes one for each update.

    Feed it the records of each topic in the order of the log, then call `flush`."""

    def __init__(self, db: Connection) -> None:
        self._db = db
        self._rates: Counter[tuple[str, int]] = Counter()
        self._tokens: Counter[tuple[str, int]] = Counter()
        self._last_sequence = -1
        self._begins: dict[int, int] = {}
        """Share -> the offset at which the next batch begins."""
        self._absorbers: dict[str, Callable[[list[Record]], None]] = {
            "tasks": self._tasks,
            "rollouts": self._rollouts,
            "verified": self._verified,
            "outcomes": self._outcomes,
            "batches": self._batches,
            "dead": self._letters,
        }

    def absorb(self, topic: str, records: Iterable[Record]) -> None:
        """Process records of a topic. Records of other contracts are skipped."""
        contracts = {name.encode() for name in CONTRACTS_ON[topic]}
        own = [record for record in records if record.header("contract") in contracts]
        rates = self._rates
        for record in own:
            rates[topic, int(record.timestamp_s) // BUCKET_S] += 1
        self._absorbers[topic](own)

    def flush(self) -> None:
        """Write the counts of the processed records."""
        self._db.executemany(
            "INSERT INTO rates VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET"
            " records = records + excluded.records, tokens = tokens + excluded.tokens",
            [(*key, count, self._tokens[key]) for key, count in self._rates.items()],
        )
        self._rates.clear()
        self._tokens.clear()

    # ------------------------------------------------------------------------------------------ topics

    def _tasks(self, records: list[Record]) -> None:
        rows = []
        for record in records:
            headers = headers_of(record)
            sequence = integer(headers.get("sequence"))
            if sequence == self._last_sequence or sequence < 0:
                continue  # a sibling from the same group as the task before it
            self._last_sequence = sequence
            found = _group(headers)
            if found is not None:
                size, version = integer(headers.get("group_size")), integer(headers.get("min_version"))
                rows.append((sequence, *found, max(0, size), version, record.timestamp_s, record.offset))
        self._db.executemany(
            "INSERT INTO groups(sequence, group_id, taskset, problem, group_size, min_version, admitted_at,"
            " task_offset) VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET"
            " group_size = excluded.group_size, min_version = excluded.min_version,"
            " admitted_at = excluded.admitted_at, task_offset = excluded.task_offset"
            " WHERE groups.task_offset IS NULL AND groups.group_id = excluded.group_id",
            rows,
        )

    def _rollouts(self, records: list[Record]) -> None:
        rows = []
        tokens = self._tokens
        for record in records:
            headers = headers_of(record)
            sequence, sibling = integer(headers.get("sequence")), integer(headers.get("sibling"))
            if sequence < 0 or sibling < 0:
                continue
            length = integer(headers.get("num_tokens"))
            tokens["rollouts", int(record.timestamp_s) // BUCKET_S] += max(0, length)
            rows.append((sequence, sibling, record.timestamp_s, record.offset, _text(headers.get("status")), length))
        self._db.executemany(
            "INSERT INTO rollouts(sequence, sibling, sampled_at, rollout_offset, status, num_tokens)"
            " VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET sampled_at = excluded.sampled_at,"
            " rollout_offset = excluded.rollout_offset, status = excluded.status, num_tokens = excluded.num_tokens"
            " WHERE rollouts.rollout_offset IS NULL",
            rows,
        )

    def _verified(self, records: list[Record]) -> None:
        rows = []
        for record in records:
            headers = headers_of(record)
            sequence, sibling = integer(headers.get("sequence")), integer(headers.get("sibling"))
            if sequence >= 0 and sibling >= 0:
                reason = headers.get("reason")
                rows.append(
                    (sequence, sibling, record.timestamp_s, record.offset, None if reason is None else _text(reason))
                )
        self._db.executemany(
            "INSERT INTO rollouts(sequence, sibling, verified_at, verified_offset, unscored) VALUES (?, ?, ?, ?, ?)"
            " ON CONFLICT DO UPDATE SET verified_at = excluded.verified_at,"
            " verified_offset = excluded.verified_offset, unscored = coalesce(excluded.unscored, unscored)"
            " WHERE rollouts.verified_offset IS NULL",
            rows,
        )

    def _outcomes(self, records: list[Record]) -> None:
        for record in records:
            try:
                outcome = codec.from_record(record)
            except ContractError:
                continue
            if isinstance(outcome, GroupOutcome):
                (self._late if outcome.late else self._outcome)(record, outcome)

    def _outcome(self, record: Record, outcome: GroupOutcome) -> None:
        found = _group(headers_of(record))
        if found is None:
            return
        fates = [(rollout, _fate(outcome.result, rollout)) for rollout in outcome.rollouts]
        counts = Counter(fate for _, fate in fates)
        rewards = [rollout.reward for rollout in outcome.rollouts if rollout.reward is not None]
        num_tokens = [rollout.num_tokens for rollout in outcome.rollouts]
        changed = self._db.execute(
            "INSERT INTO groups(sequence, group_id, taskset, problem, group_size, admitted_at, decided_at,"
            " outcome_offset, result, reason, batch, num_named, num_kept, num_expired, num_filtered, num_dead,"
            " num_scored, reward_mean, reward_least, reward_most, tokens_mean)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET"
            " decided_at = excluded.decided_at, outcome_offset = excluded.outcome_offset, result = excluded.result,"
            " reason = excluded.reason, batch = excluded.batch, num_named = num_named + excluded.num_named,"
            " num_kept = excluded.num_kept, num_expired = num_expired + excluded.num_expired,"
            " num_filtered = num_filtered + excluded.num_filtered, num_dead = num_dead + excluded.num_dead,"
            " num_scored = excluded.num_scored, reward_mean = excluded.reward_mean,"
            " reward_least = excluded.reward_least, reward_most = excluded.reward_most,"
            " tokens_mean = excluded.tokens_mean"
            " WHERE groups.result IS NULL AND groups.group_id = excluded.group_id",
            (
                outcome.sequence,
                *found,
                outcome.group_size or len(outcome.rollouts),
                record.timestamp_s,  # until its task is read, if the task still exists
                record.timestamp_s,
                record.offset,
                RESULTS.index(outcome.result),
                outcome.reason,
                outcome.batch_sequence,
                len(fates),
                *(counts[fate] for fate in (KEPT, EXPIRED, FILTERED, DEAD)),
                len(rewards),
                *((sum(rewards) / len(rewards), min(rewards), max(rewards)) if rewards else (None, None, None)),
                sum(num_tokens) / len(num_tokens) if num_tokens else None,
            ),
        ).rowcount
        if changed:
            self._name(record, outcome, fates, late=False)

    def _late(self, record: Record, outcome: GroupOutcome) -> None:
        """Count siblings that came after their group's outcome."""
        fates = [
            (rollout, EXPIRED if outcome.result is GroupResult.batched else _fate(outcome.result, rollout))
            for rollout in outcome.rollouts
        ]
        named = self._name(record, outcome, fates, late=True)
        if not named:
            return
        counts = Counter(fate for _, fate in fates)
        self._db.execute(
            "UPDATE groups SET num_named = num_named + ?, num_expired = num_expired + ?,"
            " num_filtered = num_filtered + ?, num_dead = num_dead + ? WHERE sequence = ?",
            (len(fates), counts[EXPIRED], counts[FILTERED], counts[DEAD], outcome.sequence),
        )

    def _name(
        self, record: Record, outcome: GroupOutcome, fates: list[tuple[RolloutSummary, int]], *, late: bool
    ) -> bool:
        rows = []
        for one, fate in fates:
            sibling = integer(one.rollout_id.rpartition("/")[2].encode())
            reason = None if one.reason is None else str(one.reason)
            said = str(one.status), one.num_tokens, fate, one.reward, reason, one.rejected
            rows.append((outcome.sequence, sibling, *said, record.timestamp_s, int(late)))
        done = self._db.executemany(
            "INSERT INTO rollouts(sequence, sibling, status, num_tokens, fate, reward, unscored, rejected, decided_at,"
            " late) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET fate = excluded.fate,"
            " reward = excluded.reward, unscored = coalesce(unscored, excluded.unscored),"
            " rejected = excluded.rejected, decided_at = excluded.decided_at, late = excluded.late"
            " WHERE rollouts.fate IS NULL",
            rows,
        )
        return done.rowcount > 0

    def _batches(self, records: list[Record]) -> None:
        rows = []
        for record in records:
            share = record.partition
            if share not in self._begins:
                self._begins[share] = self._next_begin(share, record.offset)
            if record.header("contract") != b"batch_manifest":
                continue
            headers = headers_of(record)
            batch, count = integer(headers.get("batch_sequence")), integer(headers.get("count"))
            if batch >= 0:
                place = batch, share, self._begins[share], record.offset
                rows.append((*place, max(0, count), record.timestamp_s, int("last" in headers)))
            self._begins[share] = record.offset + 1
        self._db.executemany("INSERT OR IGNORE INTO batches VALUES (?, ?, ?, ?, ?, ?, ?)", rows)

    def _next_begin(self, share: int, offset: int) -> int:
        """Return the offset at which the batch of a record begins, which follows from the batch before it."""
        (last,) = self._db.execute("SELECT max(manifest_offset) FROM batches WHERE share = ?", (share,)).fetchone()
        return offset if last is None else last + 1

    def _letters(self, records: list[Record]) -> None:
        rows = []
        for record in records:
            headers = headers_of(record)
            name, error = _text(headers.get("id")), _text(headers.get("error"))
            if name.count("/") == 3:
                role, topic, _, _ = name.split("/")
                reason = _text(headers.get("reason")) or "?"
                rows.append((name, role, topic, reason, error, kind_of(error), record.timestamp_s, record.offset))
        self._db.executemany("INSERT OR IGNORE INTO letters VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)


def _fate(result: GroupResult, one: RolloutSummary) -> int:
    """Return the fate of a rollout that an outcome names, as the audit counts it."""
    if result is not GroupResult.batched:
        return RESULTS.index(result)
    if one.rejected is not None:
        return FILTERED
    return KEPT if one.reason is None and one.reward is not None else DEAD


def _group(headers: dict[str, bytes]) -> tuple[str, str, int] | None:
    """Return group id, taskset and number of the problem; None if the headers name no group."""
    group_id = _text(headers.get("group_id"))
    ids = split_group_id(group_id)
    return None if ids is None else (group_id, ids[0], min(ids[2], 1 << 62))


def _text(value: bytes | None) -> str:
    return "" if value is None else value.decode("ascii", "backslashreplace")
