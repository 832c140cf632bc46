"""Lists of rollouts by what they said and how they fared, and the best and the worst of some groups.

A list looks at WINDOW rollouts at most, in the order of an index, so that its time is bounded whatever it filters by.
If these hold too few, the next page goes on behind them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rftstream.contracts.ids import split_group_id
from rftstream.queries.catalog.database import CatalogReader, Row, like
from rftstream.queries.catalog.finding import PAGE, GroupFilter, RolloutRow, conditions_of, rollout_row
from rftstream.queries.catalog.moments import Moment
from rftstream.queries.catalog.texts import SIBLING_BITS

WINDOW = 50_000
"""Most rollouts that one page looks at."""
NEWEST = 128
"""Most groups at the beginning, and most at the end, that versions are listed from."""
NEWEST_SHOWN = 32
"""Most groups, the newest ones, that the best and the worst rollout are chosen from, once for each row of a list."""

ORDERS = {
    "newest": ("sequence", "DESC"),
    "oldest": ("sequence", "ASC"),
    "best": ("reward", "DESC"),
    "worst": ("reward", "ASC"),
    "longest": ("num_tokens", "DESC"),
    "shortest": ("num_tokens", "ASC"),
}
"""Order of rollouts -> column and direction. The table `rollouts` has an index for each."""

FATES = {
    "trained": "r.fate = 0 AND g.batch < :version AND r.decided_at <= :at",
    "pending": "(r.fate IS NULL OR r.decided_at > :at OR (r.fate = 0 AND g.batch >= :version))",
    "batched": "r.fate = 0 AND g.batch >= :version AND r.decided_at <= :at",
    "expired": "r.fate = 1 AND r.decided_at <= :at",
    "filtered": "r.fate = 2 AND r.decided_at <= :at",
    "dead": "r.fate = 3 AND r.decided_at <= :at",
}
"""Fate of a rollout -> its condition."""

Range = tuple[float | None, float | None]
"""Least and most; None: no limit."""
ALL: Range = (None, None)
Cursor = tuple[float, int, int]
"""Value of the order's column, sequence and sibling of the last rollout of a page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFilter:
    """Conditions for rollouts. Empty fields are no condition."""

    text: str = ""
    """Text that the completion has, whatever the case of its letters."""
    fate: str = ""
    """One of FATES."""
    status: str = ""
    """How sampling ended."""
    tool: str = ""
    """Name of a tool that was called; `any`: a tool was called."""
    reward: Range = ALL
    tokens: Range = ALL
    version: Range = ALL
    """Range of the version that sampled the first token."""
    groups: GroupFilter = field(default_factory=GroupFilter)
    """Conditions for the group: a taskset, or all groups of a problem or of a batch."""

    @property
    def is_of_few(self) -> bool:
        """Whether its groups are found by an index: those of one problem, or of one batch."""
        return self.groups.problem is not None or self.groups.batch is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRollout:
    """A rollout with its texts, as lists show it."""

    row: RolloutRow
    sequence: int
    """Sequence number of its group."""
    group_id: str
    batch: int | None
    prompt: str
    """Last message of the user in its problem; empty until texts are read."""
    said: str
    is_read: bool
    """Whether it has no texts but those here. If not, the catalog has still to read them."""
    tools: tuple[str, ...]
    version: int | None

    @property
    def problem(self) -> tuple[str, int]:
        """Return taskset and number of its problem."""
        ids = split_group_id(self.group_id)
        return ("", 0) if ids is None else (ids[0], ids[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPage:
    """A page of rollouts. `find_rollouts` makes it."""

    rollouts: tuple[ListedRollout, ...]
    after: Cursor | None
    """Where the next page begins; None at the end."""
    num_looked: int | None
    """Rollouts that were looked at without filling the page; None if it is full, or if it is the last one."""


def find_rollouts(
    catalog: CatalogReader,
    moment: Moment,
    wanted: RolloutFilter,
    *,
    order: str = "newest",
    after: Cursor | None = None,
    limit: int = PAGE,
) -> RolloutPage:
    """Return a page of rollouts that were sampled by the moment. `after`: the end of the page before."""
    column, direction = ORDERS.get(order, ORDERS["newest"])
    values: dict[str, Any] = {"at": moment.at_s, "version": moment.version, "window": WINDOW, "limit": limit + 1}
    window = _window(catalog, moment, wanted, column, direction, after, values)
    where = _conditions(wanted, moment, values)
    if column == "reward":
        where.append("r.decided_at <= :at")
    rows = catalog.rows(
        f"SELECT {_COLUMNS}, w.key FROM ({window}) w CROSS JOIN rollouts r USING (sequence, sibling) {_JOINS}"
        f" WHERE {' AND '.join(where)} LIMIT :limit",
        values,
    )
    found = tuple(_listed(row, moment) for row in rows[:limit])
    if len(rows) > limit:
        last = rows[limit - 1]
        return RolloutPage(rollouts=found, after=(last["key"], last["sequence"], last["sibling"]), num_looked=None)
    end = catalog.row(f"SELECT * FROM ({window}) LIMIT 1 OFFSET {WINDOW - 1}", values)
    if end is None:
        return RolloutPage(rollouts=found, after=None, num_looked=None)
    return RolloutPage(rollouts=found, after=(end["key"], end["sequence"], end["sibling"]), num_looked=WINDOW)


def select_rollouts(
    catalog: CatalogReader,
    moment: Moment,
    wanted: RolloutFilter,
    columns: str,
    *,
    order: str,
    limit: int | None,
    since: int,
) -> tuple[str, dict[str, Any]]:
    """Return the query of these columns of all rollouts that `find_rollouts` would list, and the values in it. `since`:
    only of groups from this sequence on."""
    column, direction = ORDERS[order]
    values: dict[str, Any] = {
        "at": moment.at_s,
        "version": moment.version,
        "window": -1,
        "limit": limit or -1,
        "since": since,
    }
    window = _window(
        catalog, moment, wanted, column, direction, None, values, columns="r.*", within="r.sequence >= :since"
    )
    where = _conditions(wanted, moment, values)
    if column == "reward":
        where.append("r.decided_at <= :at")
    joins = _JOINS if any("g." in text or "t." in text for text in (columns, *where)) else ""
    return f"SELECT {columns} FROM ({window}) r {joins} WHERE {' AND '.join(where)} LIMIT :limit", values


_COLUMNS = "r.*, g.group_id, g.batch, g.decided_at AS group_decided_at, t.said, t.tools, t.version, p.text AS prompt"
_JOINS = (
    "JOIN groups g ON g.sequence = r.sequence"
    f" LEFT JOIN texts t ON t.id = ((r.sequence << {SIBLING_BITS}) | r.sibling)"
    " LEFT JOIN prompts p ON p.taskset = g.taskset AND p.problem = g.problem"
)


def _window(
    catalog: CatalogReader,
    moment: Moment,
    wanted: RolloutFilter,
    column: str,
    direction: str,
    after: Cursor | None,
    values: dict[str, Any],
    *,
    columns: str = "r.sequence, r.sibling",
    within: str = "1",
) -> str:
    """Return the query of the rollouts that a page looks at, in its order. `within`: one more condition."""
    source, where = "rollouts r", [within]
    where.append("r.num_tokens >= 0" if column == "num_tokens" else f"r.{column} IS NOT NULL")
    if wanted.is_of_few:
        conditions, more = conditions_of(wanted.groups, moment)
        values |= more
        source = (
            f"(SELECT sequence FROM groups WHERE {' AND '.join(conditions)}) CROSS JOIN rollouts r USING (sequence)"
        )
    elif column == "sequence" and wanted.version != ALL:  # versions follow each other nearly as groups do
        bounds = catalog.row(
            f"SELECT min(id) >> {SIBLING_BITS} AS first, max(id) >> {SIBLING_BITS} AS last FROM texts"
            f" WHERE {_between('version', 'version', wanted.version, values)}",
            values,
        )
        assert bounds is not None, "an aggregate has one row"
        values |= {"first": bounds["first"], "last": bounds["last"]}
        where.append("r.sequence BETWEEN :first AND :last")
    if column in ("reward", "num_tokens"):
        range_ = wanted.reward if column == "reward" else wanted.tokens
        where.append(_between(f"r.{column}", column, range_, values))
    if after is not None:
        values |= dict(zip(("after", "after_sequence", "after_sibling"), after, strict=True))
        sign = "<" if direction == "DESC" else ">"
        where.append(f"(r.{column}, r.sequence, r.sibling) {sign} (:after, :after_sequence, :after_sibling)")
    order = ", ".join(f"r.{name} {direction}" for name in dict.fromkeys((column, "sequence", "sibling")))
    return (
        f"SELECT r.{column} AS key, {columns} FROM {source} WHERE {' AND '.join(where)} ORDER BY {order} LIMIT :window"
    )


def _between(name: str, parameter: str, range_: Range, values: dict[str, Any]) -> str:
    """Return the condition that a column is in a range."""
    values |= {f"{parameter}_least": range_[0], f"{parameter}_most": range_[1]}
    found = [
        f"{name} {sign} :{parameter}_{end}"
        for sign, end, limit in ((">=", "least", range_[0]), ("<=", "most", range_[1]))
        if limit is not None
    ]
    return " AND ".join(found) or "1"


def _conditions(wanted: RolloutFilter, moment: Moment, values: dict[str, Any]) -> list[str]:
    then = "(r.sampled_at <= :at OR r.decided_at <= :at)"
    now = "coalesce(r.sampled_at, r.decided_at) IS NOT NULL"  # the same, which is checked in less time
    where = [now if moment.is_now else then, _between("r.num_tokens", "tokens", wanted.tokens, values)]
    if wanted.reward != ALL:
        where += ["r.decided_at <= :at", _between("r.reward", "rewards", wanted.reward, values)]
    if wanted.version != ALL:
        where.append(_between("t.version", "versions", wanted.version, values))
    if wanted.fate:
        where.append(FATES.get(wanted.fate, "0"))
    if wanted.groups.taskset and not wanted.is_of_few:
        where.append("g.taskset = :taskset")
    if wanted.tool:
        where.append("t.tools != ''" if wanted.tool == "any" else "t.tools LIKE :tool ESCAPE '!'")
    if wanted.status:
        where.append("r.status = :status")
    if wanted.text:
        where.append("t.said LIKE :text ESCAPE '!'")
    values |= {"taskset": wanted.groups.taskset, "status": wanted.status}
    values |= {"tool": like(f" {wanted.tool} "), "text": like(wanted.text)}
    return where


def list_tools(catalog: CatalogReader) -> list[str]:
    """Return the names of the tools that rollouts have called."""
    return [row["name"] for row in catalog.rows("SELECT name FROM tools ORDER BY name LIMIT 200")]


def list_versions(catalog: CatalogReader, moment: Moment, wanted: GroupFilter) -> list[int]:
    """Return the versions that sampled the oldest and the newest groups of a filter, in order."""
    conditions, values = conditions_of(wanted, moment)
    some = f"SELECT * FROM (SELECT sequence FROM groups WHERE {' AND '.join(conditions)} ORDER BY sequence"
    ends = f"{some} LIMIT {NEWEST}) UNION {some} DESC LIMIT {NEWEST})"
    rows = catalog.rows(
        f"SELECT DISTINCT t.version FROM ({ends}) g CROSS JOIN texts t"
        f" ON t.id BETWEEN g.sequence << {SIBLING_BITS} AND ((g.sequence + 1) << {SIBLING_BITS}) - 1"
        " WHERE t.version IS NOT NULL ORDER BY 1",
        values,
    )
    return [row["version"] for row in rows]


def _listed(row: Row, moment: Moment) -> ListedRollout:
    decided = row["group_decided_at"] is not None and row["group_decided_at"] <= moment.at_s
    batch = row["batch"] if decided else None
    return ListedRollout(
        row=rollout_row(f"{row['group_id']}/{row['sibling']}", row["sibling"], row, batch, moment),
        sequence=row["sequence"],
        group_id=row["group_id"],
        batch=batch,
        prompt=row["prompt"] or "",
        said=row["said"] or "",
        is_read=row["said"] is not None or row["rollout_offset"] is None,
        tools=tuple((row["tools"] or "").split()),
        version=row["version"],
    )


# --------------------------------------------------------------------------------------------- best and worst


@dataclass(frozen=True, slots=True, kw_only=True)
class Extremes:
    """The best and the worst rollout of some groups; None if none has a reward. `find_extremes` makes it."""

    prompt: str
    """Prompt of the problem, or of the best rollout if the groups have several problems."""
    best: ListedRollout | None
    worst: ListedRollout | None

    @property
    def rollouts(self) -> list[ListedRollout]:
        """Return the best and the worst one; a single rollout is both."""
        return list({one.row.rollout_id: one for one in (self.best, self.worst) if one is not None}.values())

    def filled(self, found: Mapping[str, ListedRollout]) -> Extremes:
        """Return them with the rollouts that were found, by id, in place of those here."""
        best, worst = (None if one is None else found.get(one.row.rollout_id, one) for one in (self.best, self.worst))
        return Extremes(prompt=self.prompt or ("" if best is None else best.prompt), best=best, worst=worst)


def find_extremes(catalog: CatalogReader, moment: Moment, wanted: Iterable[GroupFilter | int]) -> list[Extremes]:
    """Return the best and the worst rollout of the newest groups of each filter, or of the group with a sequence."""
    found = []
    for one in wanted:
        best, worst = (_extreme(catalog, moment, one, which) for which in ("max", "min"))
        prompt = _prompt(catalog, one) or ("" if best is None else best.prompt)
        found.append(Extremes(prompt=prompt, best=best, worst=worst))
    return found


def _prompt(catalog: CatalogReader, wanted: GroupFilter | int) -> str:
    """Return the prompt of a group, or of the problem that a filter names."""
    if isinstance(wanted, int):
        row = catalog.row("SELECT text FROM groups JOIN prompts USING (taskset, problem) WHERE sequence = ?", (wanted,))
    else:
        which = (wanted.taskset, wanted.problem)
        row = catalog.row("SELECT text FROM prompts WHERE taskset = ? AND problem = ?", which)
    return "" if row is None else str(row["text"])


def _extreme(catalog: CatalogReader, moment: Moment, wanted: GroupFilter | int, which: str) -> ListedRollout | None:
    values: Mapping[str, Any]
    if isinstance(wanted, int):
        conditions, values = ["sequence = :one"], {"at": moment.at_s, "one": wanted}
    else:
        conditions, values = conditions_of(replace(wanted, fate=""), moment)
    row = catalog.row(
        f"SELECT r.sequence, r.sibling, {which}(r.reward) AS reward FROM (SELECT sequence FROM groups"
        f" WHERE {' AND '.join(conditions)} ORDER BY sequence DESC LIMIT {NEWEST_SHOWN}) CROSS JOIN rollouts r"
        " USING (sequence) WHERE r.reward IS NOT NULL AND r.decided_at <= :at",
        values,
    )
    if row is None or row["sequence"] is None:
        return None
    found = catalog.row(
        f"SELECT {_COLUMNS} FROM rollouts r {_JOINS} WHERE r.sequence = :sequence AND r.sibling = :sibling",
        {"sequence": row["sequence"], "sibling": row["sibling"]},
    )
    return None if found is None else _listed(found, moment)
