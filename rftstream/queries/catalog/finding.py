"""Groups, rollouts, problems, batches and dead letters from a catalog, one page at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from rftstream.contracts.feedback import Feedback
from rftstream.contracts.ids import next_attempt, split_group_id
from rftstream.contracts.outcomes import GroupResult
from rftstream.data.feedback.fold import GroupStatus
from rftstream.queries.audits.rows import RESULTS
from rftstream.queries.catalog.database import CatalogReader, Row
from rftstream.queries.catalog.moments import Moment

Range = tuple[float | None, float | None]
PAGE = 25
"""Rows of a page, unless the caller gives another number."""

FATES = ("pending", "batched", "trained", "expired", "filtered", "dead")
"""The fates of a group or a rollout, named as in the audit; `batched` counts as pending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRow:
    """A rollout of the catalog at a moment."""

    rollout_id: str
    sibling: int
    fate: str
    """One of FATES."""
    stage: str
    """waiting, sampled or verified: the last stage that the rollout has reached."""
    status: str | None
    """How sampling ended; None before its end."""
    num_tokens: int | None
    reward: float | None
    """Reward. None: not scored, or the group is not decided yet (then only the record on `verified` has the reward)."""
    unscored: str | None
    """Why it has no reward."""
    rejected: str | None
    """`operator: reason` if an operator left it out of its group's batch."""
    late: bool
    """Whether it came after its group was decided."""
    sampled_at: float | None
    verified_at: float | None
    rollout_offset: int | None
    verified_offset: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """A group of the catalog at a moment, with its siblings if they were requested."""

    group_id: str
    sequence: int
    taskset: str
    problem: int
    group_size: int
    fate: str
    """One of FATES."""
    reason: str | None
    """Reason of the decision; None before the decision."""
    batch: int | None
    admitted_at: float
    decided_at: float | None
    min_version: int
    num_scored: int
    reward_mean: float | None
    reward_least: float | None
    reward_most: float | None
    tokens_mean: float | None
    task_offset: int | None
    outcome_offset: int | None
    siblings: tuple[RolloutRow, ...] = ()

    @property
    def attempt(self) -> int:
        """Return how often the group was put back."""
        ids = split_group_id(self.group_id)
        return 0 if ids is None else ids[3]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFilter:
    """Conditions for groups. Empty fields are no condition."""

    fate: str = ""
    """One of FATES."""
    reason: str = ""
    taskset: str = ""
    batch: int | None = None
    problem: int | None = None
    decided: bool = False
    """Only those that are not pending."""


def find_groups(
    catalog: CatalogReader,
    moment: Moment,
    wanted: GroupFilter,
    *,
    before: int | None = None,
    limit: int = PAGE,
    with_siblings: bool = True,
) -> list[GroupRow]:
    """Return groups, newest first. `before`: only groups with a smaller sequence, for the next page."""
    where, values = conditions_of(wanted, moment)
    if before is not None:
        where.append("sequence < :before")
    rows = catalog.rows(
        f"SELECT * FROM groups WHERE {' AND '.join(where)} ORDER BY sequence DESC LIMIT :limit",
        {**values, "limit": limit, "before": before},
    )
    return [_group(catalog, row, moment, with_siblings=with_siblings) for row in rows]


def conditions_of(wanted: GroupFilter, moment: Moment) -> tuple[list[str], dict[str, Any]]:
    """Return the conditions of a filter on the table `groups`, and the values in them."""
    where, values = ["admitted_at <= :at"], values_at(moment)
    if wanted.fate:
        where.append(_FATE_CONDITIONS.get(wanted.fate, "0"))
    for name in ("reason", "taskset", "batch", "problem"):
        value = getattr(wanted, name)
        if value not in ("", None):
            where.append(f"{name} = :{name}")
            values[name] = value
    if wanted.decided or wanted.reason or wanted.batch is not None:
        where.append("decided_at <= :at")
    return where, values


def find_group(catalog: CatalogReader, moment: Moment, group_id: str) -> GroupRow | None:
    """Return a group with its siblings, or None if the catalog has none of this id at the moment."""
    row = catalog.row(
        "SELECT * FROM groups WHERE group_id = :group AND admitted_at <= :at ORDER BY sequence LIMIT 1",
        {"group": group_id, "at": moment.at_s},
    )
    return None if row is None else _group(catalog, row, moment, with_siblings=True)


def find_vote_statuses(catalog: CatalogReader, votes: Sequence[Feedback]) -> dict[str, GroupStatus]:
    """Return the state of the groups of these votes, by feedback_id. Votes on unscored rollouts are left out."""
    names = {vote.feedback_id: vote.rollout_id.rpartition("/")[0] for vote in votes if vote.rollouts}
    groups = {name: find_group(catalog, Moment(), name) for name in set(names.values())}
    found: dict[str, GroupStatus] = {}
    for vote in votes:
        group = groups.get(names.get(vote.feedback_id, ""))
        scored = {row.rollout_id for row in group.siblings if row.verified_offset is not None} if group else set()
        if group is not None and scored >= set(vote.rollouts):
            found[vote.feedback_id] = GroupStatus(_result(group), group.batch)
    return found


def _result(group: GroupRow) -> GroupResult | None:
    if group.batch is not None:
        return GroupResult.batched
    return None if group.fate == "pending" else GroupResult(group.fate)


def find_put_back(catalog: CatalogReader, moment: Moment, groups: Sequence[str]) -> set[str]:
    """Return those of the groups that were put back: a group with the next attempt exists."""
    rows = (
        (group, catalog.row("SELECT admitted_at FROM groups WHERE group_id = ?", (next_attempt(group),)))
        for group in groups
    )
    return {group for group, row in rows if row is not None and row["admitted_at"] <= moment.at_s}


def _group(catalog: CatalogReader, row: Row, moment: Moment, *, with_siblings: bool) -> GroupRow:
    decided = row["decided_at"] is not None and row["decided_at"] <= moment.at_s
    batch = row["batch"] if decided else None
    fate = _fate_name(row["result"] if decided else None, batch, moment)
    told: dict[str, Any] = {name: row[name] for name in _OF_TASKS}
    told |= {name: row[name] if decided else None for name in _OF_OUTCOMES}
    return GroupRow(
        **told,
        fate=fate,
        min_version=max(0, row["min_version"] or 0),
        num_scored=row["num_scored"] if decided else 0,
        siblings=_siblings(catalog, row, batch, moment) if with_siblings else (),
    )


_OF_TASKS = ("group_id", "sequence", "taskset", "problem", "group_size", "admitted_at", "task_offset")
_REWARDS = ("reward_mean", "reward_least", "reward_most", "tokens_mean")
_OF_OUTCOMES = ("reason", "batch", "decided_at", "outcome_offset", *_REWARDS)


def _siblings(catalog: CatalogReader, group: Row, batch: int | None, moment: Moment) -> tuple[RolloutRow, ...]:
    rows = catalog.rows("SELECT * FROM rollouts WHERE sequence = ? ORDER BY sibling", (group["sequence"],))
    by_sibling = {row["sibling"]: row for row in rows}
    size = max(group["group_size"], max(by_sibling, default=-1) + 1)
    return tuple(
        rollout_row(f"{group['group_id']}/{sibling}", sibling, by_sibling.get(sibling), batch, moment)
        for sibling in range(min(size, MAX_SIBLINGS))
    )


MAX_SIBLINGS = 512
"""The most siblings of a group that are shown."""


def rollout_row(rollout_id: str, sibling: int, row: Row | None, batch: int | None, moment: Moment) -> RolloutRow:
    """Return a rollout from its row of the catalog, if it has one, at a moment. `batch`: that of its group."""

    def then(column: str, value: Any) -> Any:
        """Return a value if the row's time is not after the moment."""
        return value if row is not None and row[column] is not None and row[column] <= moment.at_s else None

    def cell(name: str) -> Any:
        return None if row is None else row[name]

    is_sampled, is_verified = then("sampled_at", True), then("verified_at", True)
    fate = then("decided_at", cell("fate"))
    return RolloutRow(
        rollout_id=rollout_id,
        sibling=sibling,
        fate=_fate_name(fate, batch, moment),
        stage="verified" if is_verified else "sampled" if is_sampled else "waiting",
        status=cell("status") if is_sampled or fate is not None else None,
        num_tokens=cell("num_tokens") if is_sampled or fate is not None else None,
        unscored=cell("unscored") if is_verified or fate is not None else None,
        late=bool(then("decided_at", cell("late"))),
        **{name: then(at, cell(name)) for at, names in _KNOWN_SINCE.items() for name in names},
    )


_KNOWN_SINCE = {
    "sampled_at": ("sampled_at", "rollout_offset"),
    "verified_at": ("verified_at", "verified_offset"),
    "decided_at": ("reward", "rejected"),
}


def _fate_name(result: int | None, batch: int | None, moment: Moment) -> str:
    if result is None:
        return "pending"
    if result == 0:
        return "trained" if batch is not None and batch < moment.version else "batched"
    return str(RESULTS[result])


_UNDECIDED = "(decided_at IS NULL OR decided_at > :at)"
_FATE_CONDITIONS = {
    "pending": f"({_UNDECIDED} OR (result = 0 AND batch >= :version))",
    "batched": "result = 0 AND batch >= :version AND decided_at <= :at",
    "trained": "result = 0 AND batch < :version AND decided_at <= :at",
    **{str(result): f"result = {code} AND decided_at <= :at" for code, result in enumerate(RESULTS) if code != 0},
}


def values_at(moment: Moment, **more: Any) -> dict[str, Any]:
    """Return the values in the conditions of a moment, and more."""
    return {"at": moment.at_s, "version": moment.version, "version_from": None, **more}


# --------------------------------------------------------------------------------------------- batches, letters


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShare:
    """A share of a batch, with the places of its records on `batches`."""

    batch: int
    share: int
    begin_offset: int
    manifest_offset: int
    count: int
    written_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """A batch with the number of its rollouts, from all shares."""

    batch: int
    trained: bool
    """Whether it is trained into a version in force."""
    num_shares: int
    num_rollouts: int
    written_at: float


def find_batches(
    catalog: CatalogReader, moment: Moment, *, before: int | None = None, limit: int = PAGE
) -> list[BatchRow]:
    """Return batches, newest first. `before`: only batches with a smaller number, for the next page."""
    rows = catalog.rows(
        "SELECT batch, batch < :version AS trained, count(*) AS num_shares, sum(count) AS num_rollouts,"
        " max(written_at) AS written_at FROM batches WHERE written_at <= :at AND batch < coalesce(:before, batch + 1)"
        " GROUP BY batch ORDER BY batch DESC LIMIT :limit",
        values_at(moment, before=before, limit=limit),
    )
    return [replace(found, trained=bool(found.trained)) for found in (row_as(BatchRow, row) for row in rows)]


def find_batch(catalog: CatalogReader, moment: Moment, batch: int) -> list[BatchShare]:
    """Return the shares of a batch; none if the batch does not exist at the moment."""
    rows = catalog.rows(
        "SELECT * FROM batches WHERE batch = :batch AND written_at <= :at ORDER BY share",
        {"batch": batch, "at": moment.at_s},
    )
    return [row_as(BatchShare, row) for row in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """A dead letter, from its headers."""

    id: str
    role: str
    topic: str
    reason: str
    error: str
    at: float
    offset: int
    """Offset on `dead`."""


def find_letters_page(
    catalog: CatalogReader,
    moment: Moment,
    *,
    reason: str = "",
    before: int | None = None,
    limit: int = PAGE,
    ids: Sequence[str] = (),
) -> list[Letter]:
    """Return dead letters, newest first: those with a reason, or those with these ids."""
    where, values = ["at <= :at"], values_at(moment, limit=limit, reason=reason, before=before)
    if reason:
        where.append("reason = :reason")
    if before is not None:
        where.append("offset < :before")
    if ids:
        names = {f"id{i}": name for i, name in enumerate(ids)}
        where.append(f"id IN ({', '.join(f':{name}' for name in names)})")
        values |= names
    rows = catalog.rows(f"SELECT * FROM letters WHERE {' AND '.join(where)} ORDER BY offset DESC LIMIT :limit", values)
    return [row_as(Letter, row) for row in rows]


T = TypeVar("T")


def row_as(kind: type[T], row: Row) -> T:
    """Return a data class whose fields are filled from the columns of the same names."""
    return kind(**{field.name: row[field.name] for field in fields(kind)})  # type: ignore[arg-type]  # a data class
