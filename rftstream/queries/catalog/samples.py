"""Samples of evaluations from a catalog: the best and the worst of a version, and two versions beside each other."""

from __future__ import annotations

from dataclasses import dataclass

from rftstream.queries.catalog.database import CatalogReader, Row, like
from rftstream.queries.catalog.finding import PAGE

ORDERS = {
    "problem": "s.task, s.number",
    "last": "s.task DESC, s.number DESC",
    "worst": "s.reward IS NULL, s.reward, s.task, s.number",
    "best": "s.reward DESC, s.task, s.number",
}
"""Orders of samples."""
ORDERS_BESIDE = {
    **ORDERS,
    "lost": "change IS NULL, change, s.task, s.number",
    "gained": "change IS NULL, change DESC, s.task, s.number",
}
"""Orders of samples that have another version beside them: the change is the reward minus the one there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSample:
    """A sample of an evaluation."""

    version: int
    problem: int
    sample: int
    """Number of the attempt at the problem, from 0."""
    prompt: str
    answer: str | None
    completion: str
    reward: float | None
    reason: str
    """Why it has no reward, or this one, such as the first test that failed; empty if nothing says."""
    num_tokens: int
    change: float | None = None
    """Reward minus that of the sample beside it."""
    beside: EvaluationSample | None = None
    """The sample of the same problem and number at another version."""


_COLUMNS = "s.*, q.text AS prompt, q.answer"
_FROM = "samples s LEFT JOIN questions q ON q.evaluation = s.evaluation AND q.task = s.task"


def list_evaluated(catalog: CatalogReader, evaluation: str) -> list[int]:
    """Return the versions whose samples are in the catalog, newest first."""
    rows = catalog.rows("SELECT DISTINCT version FROM results WHERE evaluation = ? ORDER BY 1 DESC", (evaluation,))
    return [row["version"] for row in rows]


def find_extreme_samples(catalog: CatalogReader, evaluation: str, version: int) -> list[EvaluationSample]:
    """Return the best and the worst sample of a version; none if none has a reward."""
    found = {}
    for direction in ("DESC", "ASC"):
        row = catalog.row(
            f"SELECT {_COLUMNS} FROM {_FROM} WHERE s.evaluation = ? AND s.version = ? AND s.reward IS NOT NULL"
            f" ORDER BY s.reward {direction} LIMIT 1",
            (evaluation, version),
        )
        if row is not None:
            found[row["task"], row["number"]] = _sample(row)
    return list(found.values())


def find_samples(
    catalog: CatalogReader,
    evaluation: str,
    version: int,
    *,
    beside: int | None = None,
    text: str = "",
    order: str = "task",
    skip: int = 0,
    limit: int = PAGE,
) -> list[EvaluationSample]:
    """Return samples of a version, each with the one of the version `beside`. `text`: one that the prompt or one of
    the completions has."""
    rows = catalog.rows(
        f"SELECT {_COLUMNS}, s.reward - b.reward AS change, b.said AS other_said, b.reward AS other_reward,"
        f" b.version AS other_version, b.reason AS other_reason, b.num_tokens AS other_num_tokens FROM {_FROM}"
        " LEFT JOIN samples b ON b.evaluation = s.evaluation AND b.version = :beside AND b.task = s.task"
        " AND b.number = s.number WHERE s.evaluation = :evaluation AND s.version = :version"
        " AND (s.said LIKE :text ESCAPE '!' OR b.said LIKE :text ESCAPE '!' OR q.text LIKE :text ESCAPE '!')"
        f" ORDER BY {ORDERS_BESIDE.get(order, ORDERS['problem'])} LIMIT :limit OFFSET :skip",
        {
            "evaluation": evaluation,
            "version": version,
            "beside": beside,
            "text": like(text),
            "limit": limit,
            "skip": skip,
        },
    )
    return [_sample(row, change=row["change"], beside=_beside(row)) for row in rows]


def count_changes(catalog: CatalogReader, evaluation: str, version: int, beside: int) -> tuple[int, int, int]:
    """Return how many samples of a version gained reward over the version `beside`, lost some, and have the same."""
    row = catalog.row(
        "SELECT count(CASE WHEN s.reward > b.reward THEN 1 END) AS gained,"
        " count(CASE WHEN s.reward < b.reward THEN 1 END) AS lost, count(CASE WHEN s.reward = b.reward THEN 1 END)"
        " AS equal FROM samples s JOIN samples b USING (evaluation, task, number)"
        " WHERE s.evaluation = ? AND s.version = ? AND b.version = ?",
        (evaluation, version, beside),
    )
    assert row is not None, "an aggregate has one row"
    return row["gained"], row["lost"], row["equal"]


def _sample(
    row: Row, *, change: float | None = None, beside: EvaluationSample | None = None, other: str = ""
) -> EvaluationSample:
    """Return the sample of a row. `other`: prefix of the columns of the sample beside it."""
    return EvaluationSample(
        version=row[f"{other}version"],
        problem=row["task"],
        sample=row["number"],
        prompt=row["prompt"] or "",
        answer=row["answer"],
        completion=row[f"{other}said"],
        reward=row[f"{other}reward"],
        reason=row[f"{other}reason"],
        num_tokens=row[f"{other}num_tokens"],
        change=change,
        beside=beside,
    )


def _beside(row: Row) -> EvaluationSample | None:
    return None if row["other_said"] is None else _sample(row, other="other_")
