"""Counts of a run at a moment: fates of groups and rollouts, waiting ones, growth of topics.

They are the counts of `audit` and `status`, from the catalog instead of the log. The catalog's groups hold the counts
of their rollouts, so that no query reads every rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rftstream.error_kinds import counted_kinds
from rftstream.queries.audits.balance import STAGES, Balance
from rftstream.queries.audits.rows import RESULTS
from rftstream.queries.catalog.database import BUCKET_S, CatalogReader
from rftstream.queries.catalog.moments import Moment

NEWER = 10_000
"""Sequences after the newest group of a moment that may still have been admitted before it: feeders admit in order, but
writers' clocks differ."""
_FATES = ("kept", "expired", "filtered", "dead")
"""Names of the fates of rollouts, by their codes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogCounts:
    """The counts of a run's groups and rollouts by fate. `count_fates` makes it."""

    groups: Balance
    rollouts: Balance
    newest_batch: int
    """Number of the newest batch. -1: there is none yet."""
    reasons: Mapping[tuple[str, str], int]
    """Result and reason -> decided groups."""


def count_fates(catalog: CatalogReader, moment: Moment) -> CatalogCounts:
    """Count every group and rollout by fate. Decisions in buckets before the moment's are summed by bucket; in the
    moment's bucket each group is read."""
    bucket = 1 << 62 if moment.is_now else int(moment.at_s // BUCKET_S)
    at = {"at": moment.at_s, "bucket": bucket, "begin": float(bucket * BUCKET_S), "version": moment.version}
    sums = catalog.rows(
        "SELECT result, reason, sum(groups) AS groups, sum(kept) AS kept, sum(expired) AS expired,"
        " sum(filtered) AS filtered, sum(dead) AS dead FROM ("
        "SELECT result, reason, groups, kept, expired, filtered, dead FROM decisions WHERE bucket < :bucket UNION ALL "
        "SELECT result, reason, 1, num_kept, num_expired, num_filtered, num_dead FROM groups"
        " WHERE decided_at >= :begin AND decided_at <= :at) GROUP BY 1, 2 HAVING sum(groups) > 0",
        at,
    )
    admitted = catalog.row(
        "SELECT sum(groups) AS groups, sum(rollouts) AS rollouts FROM ("
        "SELECT groups, rollouts FROM admissions WHERE bucket < :bucket UNION ALL "
        "SELECT 1, group_size FROM groups WHERE admitted_at >= :begin AND admitted_at <= :at)",
        at,
    )
    assert admitted is not None, "an aggregate has one row"
    newest_batch = _newest_batch(catalog, moment)
    waiting = catalog.row(
        "SELECT count(*) AS groups, coalesce(sum(num_kept), 0) AS kept FROM groups"
        " WHERE batch >= :version AND batch <= :newest AND decided_at <= :at",
        {**at, "newest": newest_batch},
    )
    assert waiting is not None, "an aggregate has one row"
    of_groups, of_rollouts = dict.fromkeys(_FATES, 0), dict.fromkeys(_FATES, 0)
    for one in sums:
        of_groups[_FATES[one["result"]]] += one["groups"]
        for fate in _FATES:
            of_rollouts[fate] += one[fate]
    for fate, count in _late_later(catalog, moment).items():
        of_rollouts[fate] -= count
    stages, group_stages = _stages(catalog, moment)
    return CatalogCounts(
        groups=_balance(admitted["groups"] or 0, of_groups, waiting["groups"], group_stages),
        rollouts=_balance(admitted["rollouts"] or 0, of_rollouts, waiting["kept"], stages),
        newest_batch=newest_batch,
        reasons={(str(RESULTS[one["result"]]), one["reason"]): one["groups"] for one in sums},
    )


def oldest_open(catalog: CatalogReader) -> float | None:
    """Return the admission time of the oldest group without an outcome, in log time in seconds; None if there is
    none."""
    found = catalog.row("SELECT min(admitted_at) AS at FROM groups WHERE decided_at IS NULL", {})
    return None if found is None else found["at"]


def _newest_batch(catalog: CatalogReader, moment: Moment) -> int:
    """Return the newest batch that a group was decided into; -1 if there is none."""
    last = catalog.row("SELECT max(batch) AS batch FROM batches WHERE written_at <= :at", {"at": moment.at_s})
    bound = "" if moment.is_now or last is None or last["batch"] is None else " AND batch <= :last"
    found = catalog.row(
        f"SELECT batch FROM groups WHERE batch IS NOT NULL AND decided_at <= :at{bound} ORDER BY batch DESC LIMIT 1",
        {"at": moment.at_s, "last": None if last is None else last["batch"]},
    )
    return -1 if found is None else int(found["batch"])


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
    """Return, by fate, the late rollouts that came after the moment, of groups that were decided at the moment."""
    if moment.is_now:
        return {}
    rows = catalog.rows(
        "SELECT r.fate AS fate, count(*) AS rollouts FROM rollouts r JOIN groups g USING (sequence)"
        " WHERE r.late = 1 AND r.decided_at > :at AND g.decided_at <= :at GROUP BY 1",
        {"at": moment.at_s},
    )
    return {_FATES[row["fate"]]: row["rollouts"] for row in rows}


def _stages(catalog: CatalogReader, moment: Moment) -> tuple[dict[str, int], dict[str, int]]:
    """Return the stages of rollouts and groups without an outcome. A group has the stage of its last sibling."""
    unnamed = "(r.fate IS NULL OR r.decided_at > :at)"
    last = catalog.row(
        "SELECT sequence FROM groups WHERE admitted_at <= :at ORDER BY admitted_at DESC LIMIT 1", {"at": moment.at_s}
    )
    later = "" if moment.is_now else "SELECT sequence FROM groups WHERE decided_at > :at AND sequence <= :last UNION "
    rows = catalog.rows(
        "SELECT g.group_size AS size, coalesce(g.decided_at <= :at, 0) AS decided,"
        f" count(CASE WHEN r.sampled_at <= :at AND {unnamed} THEN 1 END) AS sampled,"
        f" count(CASE WHEN r.verified_at <= :at AND {unnamed} THEN 1 END) AS verified,"
        " count(CASE WHEN r.fate IS NOT NULL AND r.decided_at <= :at THEN 1 END) AS named"
        f" FROM ({later}SELECT sequence FROM groups WHERE decided_at IS NULL UNION"
        " SELECT sequence FROM groups INDEXED BY groups_incomplete"
        " WHERE decided_at IS NOT NULL AND num_named < group_size UNION"
        " SELECT sequence FROM rollouts WHERE late = 1) CROSS JOIN groups g USING (sequence)"  # in this order
        " LEFT JOIN rollouts r USING (sequence) WHERE g.admitted_at <= :at GROUP BY g.sequence",
        {"at": moment.at_s, "last": NEWER if last is None else last["sequence"] + NEWER},
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
    """The growth of a topic before a moment. `read_rates` makes it."""

    records_per_s: float
    tokens_per_s: float
    seconds: float
    """Time over which the rates are: that of the run before the moment, up to the window, without pauses."""
    total: int
    """Records in all, up to the moment."""


def read_rates(
    catalog: CatalogReader,
    moment: Moment,
    *,
    now: float,
    window_s: float = 120.0,
    at_work_s: Callable[[float], float] = float,
) -> dict[str, TopicRate]:
    """Return the rate of each topic over the last `window_s` seconds before the moment, or since the first rollouts of
    a shorter run: workers that load models have no speed yet. `now` is the current time, or that of the newest record
    of a run that does not go on. `at_work_s` gives a clock time minus the pauses before it: no speed counts these."""
    end = min(now, moment.at_s)
    first = catalog.row(
        "SELECT coalesce((SELECT min(bucket) FROM rates WHERE topic = 'rollouts'),"
        " (SELECT min(bucket) FROM rates)) AS bucket"
    )
    began = end if first is None or first["bucket"] is None else float(first["bucket"]) * BUCKET_S
    begin = max((end - window_s) // BUCKET_S, began // BUCKET_S - 1)
    seconds = max(1.0, at_work_s(end) - at_work_s(max(began, (begin + 1) * BUCKET_S)))
    rows = catalog.rows(
        "SELECT topic, sum(records) AS total, sum(CASE WHEN bucket > :begin THEN records ELSE 0 END) AS records,"
        " sum(CASE WHEN bucket > :begin THEN tokens ELSE 0 END) AS tokens FROM rates WHERE bucket <= :end GROUP BY 1",
        {"begin": begin, "end": end // BUCKET_S},
    )
    return {
        row["topic"]: TopicRate(
            records_per_s=row["records"] / seconds,
            tokens_per_s=row["tokens"] / seconds,
            seconds=seconds,
            total=row["total"],
        )
        for row in rows
    }


def newest_time(catalog: CatalogReader) -> float:
    """Return the time of the newest admission, decision or batch; 0 if there is none."""
    row = catalog.row(
        "SELECT max(coalesce((SELECT max(admitted_at) FROM groups), 0), coalesce((SELECT max(decided_at) FROM groups),"
        " 0), coalesce((SELECT written_at FROM batches ORDER BY batch DESC, share DESC LIMIT 1), 0)) AS at"
    )
    return 0.0 if row is None else float(row["at"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorKind:
    """Dead letters of one reason whose errors are of one kind. `count_letters` makes it."""

    reason: str
    error: str
    """The error, with N and dots for what differs among these letters' errors; empty if letters do not have it."""
    count: int


def count_put_back(catalog: CatalogReader, moment: Moment) -> int:
    """Count the dead groups that were put back: each as one group that is no first attempt."""
    row = catalog.row(
        "SELECT count(*) AS groups FROM groups WHERE group_id NOT LIKE '%/0' AND admitted_at <= ?", (moment.at_s,)
    )
    return 0 if row is None else int(row["groups"])


def count_letters(catalog: CatalogReader, moment: Moment) -> list[ErrorKind]:
    """Count dead letters by reason and kind of error, the most frequent first."""
    rows = catalog.rows(
        "SELECT reason, error, count(*) AS letters FROM letters WHERE at <= :at"
        " GROUP BY reason, kind, error ORDER BY max(offset)",
        {"at": moment.at_s},
    )
    errors: dict[str, list[tuple[str, int]]] = {}
    for row in rows:
        errors.setdefault(row["reason"], []).append((row["error"], row["letters"]))
    kinds = [
        ErrorKind(reason=reason, error=error, count=count)
        for reason, texts in errors.items()
        for error, count in counted_kinds(texts)
    ]
    return sorted(kinds, key=lambda kind: -kind.count)
