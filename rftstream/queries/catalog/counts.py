"""Counts of a run at a moment: what became of groups and rollouts, what waits, how fast topics grow.

They are those of `audit` and `status`, from the catalog instead of the log. The catalog's groups carry the counts of
their rollouts, so that no question looks at every rollout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rftstream.queries.balance import STAGES, Balance
from rftstream.queries.catalog.database import CatalogReader, Row
from rftstream.queries.catalog.moments import Moment
from rftstream.queries.catalog.writer import BUCKET_S
from rftstream.queries.rows import RESULTS

_FATES = ("kept", "expired", "filtered", "dead")
"""Names of the fates of rollouts, by their codes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogCounts:
    """What became of a run's groups and rollouts. `count_fates` makes it."""

    groups: Balance
    rollouts: Balance
    newest_batch: int
    """-1: there is no batch yet."""
    reasons: Mapping[tuple[str, str], int]
    """Result and reason -> groups that were decided so."""


def count_fates(catalog: CatalogReader, moment: Moment) -> CatalogCounts:
    """Count what became of every group and rollout."""
    at = {"at": moment.at_s, "version": moment.version}
    decided = catalog.rows(
        "SELECT result, reason, batch >= :version AS waits, count(*) AS groups, sum(num_kept) AS kept,"
        " sum(num_expired) AS expired, sum(num_filtered) AS filtered, sum(num_dead) AS dead, max(batch) AS batch"
        " FROM groups WHERE decided_at <= :at GROUP BY 1, 2, 3",
        at,
    )
    row = catalog.row(
        "SELECT count(*) AS groups, total(group_size) AS rollouts FROM groups WHERE admitted_at <= :at", at
    )
    assert row is not None, "an aggregate has one row"
    late = _late_later(catalog, moment)
    of_groups, of_rollouts = dict.fromkeys(_FATES, 0), dict.fromkeys(_FATES, 0)
    waiting_groups = waiting_rollouts = 0
    for one in decided:
        of_groups[_FATES[one["result"]]] += one["groups"]
        waiting_groups += one["groups"] if one["waits"] else 0
        waiting_rollouts += one["kept"] if one["waits"] else 0
        for fate in _FATES:
            of_rollouts[fate] += one[fate]
    for fate, count in late.items():
        of_rollouts[fate] -= count
    stages, group_stages = _stages(catalog, moment)
    return CatalogCounts(
        groups=_balance(row["groups"], of_groups, waiting_groups, group_stages),
        rollouts=_balance(int(row["rollouts"]), of_rollouts, waiting_rollouts, stages),
        newest_batch=max((one["batch"] for one in decided if one["batch"] is not None), default=-1),
        reasons={(str(RESULTS[one["result"]]), one["reason"]): _groups_of(decided, one) for one in decided},
    )


def _groups_of(rows: list[Row], wanted: Row) -> int:
    """Return how many groups have the result and the reason of a row, waiting ones and others."""
    return sum(row["groups"] for row in rows if (row["result"], row["reason"]) == (wanted["result"], wanted["reason"]))


def _balance(admitted: int, fates: Mapping[str, int], num_waiting: int, stages: Mapping[str, int]) -> Balance:
    return Balance(
        admitted=admitted,
        pending_by_stage={**stages, STAGES[3]: num_waiting},
        trained=fates["kept"] - num_waiting,
        expired=fates["expired"],
        filtered=fates["filtered"],
        dead=fates["dead"],
    )


def _late_later(catalog: CatalogReader, moment: Moment) -> dict[str, int]:
    """Return, by fate, the late rollouts of groups that were decided at the moment, which came after it."""
    if moment.is_now:
        return {}
    rows = catalog.rows(
        "SELECT r.fate AS fate, count(*) AS rollouts FROM rollouts r JOIN groups g USING (sequence)"
        " WHERE r.late = 1 AND r.decided_at > :at AND g.decided_at <= :at GROUP BY 1",
        {"at": moment.at_s},
    )
    return {_FATES[row["fate"]]: row["rollouts"] for row in rows}


def _stages(catalog: CatalogReader, moment: Moment) -> tuple[dict[str, int], dict[str, int]]:
    """Return where rollouts and groups stand that have no outcome yet. A group stands where its last sibling does."""
    undecided = "g.decided_at IS NULL" if moment.is_now else "(g.decided_at IS NULL OR g.decided_at > :at)"
    unnamed = "(r.fate IS NULL OR r.decided_at > :at)"
    rows = catalog.rows(
        "SELECT g.group_size AS size, coalesce(g.decided_at <= :at, 0) AS decided,"
        f" count(CASE WHEN r.sampled_at <= :at AND {unnamed} THEN 1 END) AS sampled,"
        f" count(CASE WHEN r.verified_at <= :at AND {unnamed} THEN 1 END) AS verified,"
        " count(CASE WHEN r.fate IS NOT NULL AND r.decided_at <= :at THEN 1 END) AS named"
        " FROM groups g LEFT JOIN rollouts r USING (sequence)"
        f" WHERE g.admitted_at <= :at AND ({undecided} OR g.num_named < g.group_size"
        " OR g.sequence IN (SELECT sequence FROM rollouts WHERE late = 1)) GROUP BY g.sequence",
        {"at": moment.at_s},
    )
    stages, group_stages = dict.fromkeys(STAGES[:3], 0), dict.fromkeys(STAGES[:3], 0)
    for row in rows:
        unsampled, unverified = row["size"] - row["named"] - row["sampled"], row["sampled"] - row["verified"]
        stages[STAGES[0]] += unsampled
        stages[STAGES[1]] += unverified
        stages[STAGES[2]] += row["verified"]
        if not row["decided"]:
            group_stages[STAGES[0] if unsampled else STAGES[1] if unverified else STAGES[2]] += 1
    return stages, group_stages


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicRate:
    """How fast a topic grew before a moment. `read_rates` makes it."""

    records_per_s: float
    tokens_per_s: float
    total: int
    """Records in all, up to the moment."""


def read_rates(catalog: CatalogReader, moment: Moment, *, now: float, window_s: float = 120.0) -> dict[str, TopicRate]:
    """Return the rate of each topic over the last `window_s` seconds before the moment. `now` is the time now."""
    end = min(now, moment.at_s)
    rows = catalog.rows(
        "SELECT topic, sum(records) AS total, sum(CASE WHEN bucket > :begin THEN records ELSE 0 END) AS records,"
        " sum(CASE WHEN bucket > :begin THEN tokens ELSE 0 END) AS tokens FROM rates WHERE bucket <= :end GROUP BY 1",
        {"begin": (end - window_s) // BUCKET_S, "end": end // BUCKET_S},
    )
    return {
        row["topic"]: TopicRate(
            records_per_s=row["records"] / window_s, tokens_per_s=row["tokens"] / window_s, total=row["total"]
        )
        for row in rows
    }


def newest_time(catalog: CatalogReader) -> float:
    """Return until when the catalog has records, to within BUCKET_S; 0 if it has none."""
    row = catalog.row("SELECT coalesce(max(bucket) + 1, 0) AS bucket FROM rates")
    return 0.0 if row is None else float(row["bucket"] * BUCKET_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadKind:
    """Dead letters of one reason whose errors differ in nothing but their numbers. `count_letters` makes it."""

    reason: str
    error: str
    """The error of the newest one; empty where letters do not say it."""
    count: int


def count_letters(catalog: CatalogReader, moment: Moment) -> list[DeadKind]:
    """Count dead letters by reason and kind of error, the most frequent first."""
    rows = catalog.rows(
        "SELECT reason, kind, count(*) AS letters, max(offset) AS offset, error FROM letters WHERE at <= :at"
        " GROUP BY reason, kind ORDER BY letters DESC, offset",
        {"at": moment.at_s},
    )
    return [DeadKind(reason=row["reason"], error=row["error"], count=row["letters"]) for row in rows]
